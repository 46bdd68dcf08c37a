//! Connecting: the wrong server, no server, several addresses, a full server; and probes of the path.

use std::time::Duration;
use tensor_relay_client::{Client, ClientError, ConnectError, Ticket};
use tensor_relay_protocol::{CloseCode, ProbeBytes};
use tensor_relay_server::Fingerprint;
use tensor_relay_tests::{
    pair::{Sim, client_config, eventually, publish, server_config, simulate, token, topic, transport},
    simnet::Path,
};
use tensor_relay_transport::{LaneError, Transport};

/// Goal: a client refuses a server whose key is not in the ticket; the error has both keys, and the server gets no
/// session.
/// Method: change the ticket's key.
#[test]
fn a_server_with_the_wrong_key_is_refused() {
    simulate(1, async |sim| {
        let server = sim.server(server_config());
        let right = Fingerprint(sim.ticket().keys()[0]);
        let error = connect(&sim, &[sim.server_address().to_string()], [7; 32]).await.unwrap_err();
        let ClientError::Connect(ConnectError::WrongKey { address, found, expected }) = &error else {
            panic!("{error}")
        };
        assert_eq!((*address, *found), (sim.server_address(), right));
        assert!(expected.contains(&"07".repeat(32)), "{expected}");
        eventually("no session remains", || server.stats().sessions == 0).await;
    });
}

/// Goal: a server that does not answer is reported after the connect timeout, with the tried addresses.
/// Method: connect to a port without a listener, to a partitioned server, and to an address without a host.
#[test]
fn an_unreachable_server_is_reported() {
    simulate(2, async |sim| {
        let _server = sim.server(server_config());
        sim.net.partition(&sim.server_host(), &sim.client_host(1));
        for address in ["10.0.0.1:1", "10.0.0.1:4747", "10.9.9.9:4747"] {
            let began = sim.elapsed();
            let error = connect(&sim, &[address.into()], [7; 32]).await.unwrap_err();
            match &error {
                ClientError::Connect(ConnectError::Unreachable { addresses, timeout_ms }) => {
                    assert_eq!((addresses.as_str(), *timeout_ms), (address, 10_000));
                }
                // Simulated byte streams to an address without a host are refused at once.
                ClientError::Connect(ConnectError::TcpFailed { addresses, detail }) => {
                    assert_eq!(addresses, address);
                    assert!(
                        ["connection refused", "no answer within 10000 ms"].contains(&detail.as_str()),
                        "{detail}"
                    );
                    continue;
                }
                error => panic!("{error}"),
            }
            let waited = sim.elapsed() - began;
            assert!(
                waited >= Duration::from_secs(9) && waited <= Duration::from_millis(10_100),
                "{waited:?}"
            );
        }
    });
}

/// Goal: of several addresses, the first that answers is used, without waiting for the others.
/// Method: two dead addresses before the right one.
#[test]
fn the_first_address_that_answers_is_used() {
    simulate(3, async |sim| {
        let _server = sim.server(server_config());
        let addresses = ["10.9.9.1:1".into(), "10.9.9.2:1".into(), sim.server_address().to_string()];
        connect(&sim, &addresses, sim.ticket().keys()[0]).await.unwrap();
        assert!(sim.elapsed() < Duration::from_millis(600), "{:?}", sim.elapsed());
    });
}

/// Goal: a client beyond `sessions_max` is refused at once; when another leaves, it is admitted.
/// Method: a limit of two sessions.
#[test]
fn a_full_server_refuses_clients() {
    simulate(4, async |sim| {
        let server = sim.server(tensor_relay_server::Config { sessions_max: 2, ..server_config() });
        let one = sim.client(1, client_config()).await.unwrap();
        let _two = sim.client(2, client_config()).await.unwrap();
        let began = sim.elapsed();
        let error = sim.client(3, client_config()).await.unwrap_err();
        let ClientError::Refused(LaneError::ClosedByPeer { code, .. }) = &error else { panic!("{error}") };
        assert_eq!(*code, Some(CloseCode::TooBusy));
        assert!(sim.elapsed() - began < Duration::from_secs(1));
        one.close().await;
        eventually("one session remains", || server.stats().sessions == 1).await;
        sim.client(3, client_config()).await.unwrap();
    });
}

/// Goal: handshakes succeed on the worst paths that lanes must support.
/// Method: a tenth of all datagrams is lost, a fifth is duplicated, and delays vary.
#[test]
fn handshakes_succeed_on_bad_paths() {
    for seed in 100..120 {
        simulate(seed, async |sim| {
            let _server = sim.server(server_config());
            sim.net.set_path(Path {
                delay: Duration::from_millis(1)..=Duration::from_millis(100),
                loss: 0.1,
                duplication: 0.2,
                ..Path::default()
            });
            let client = sim.client(1, client_config()).await.unwrap();
            assert!(client.server().agent.starts_with("tensor-relay/"));
            assert_eq!(client.list().await.unwrap(), []);
        });
    }
}

async fn connect(sim: &Sim, addresses: &[String], key: [u8; 32]) -> Result<Client, ClientError> {
    let ticket = Ticket::new(addresses.to_vec(), vec![key], None).unwrap().with_token(token());
    Client::connect_with(&sim.connector(1), &ticket, client_config()).await
}

/// Goal: a probe may follow another at once, however late the server notices the end of the earlier one.
/// Method: a thousand probes.
#[test]
fn a_probe_may_follow_another_at_once() {
    simulate(13, async |sim| {
        let _server = sim.server(server_config());
        let client = sim.client(1, client_config()).await.unwrap();
        for number in 0..1_000 {
            let probed = client.probe(ProbeBytes::new(number % 7).unwrap()).await.unwrap();
            assert!(probed.is_some(), "{number}");
        }
        client.close().await;
    });
}

/// Goal: a second probe during the first is refused, and disturbs nothing.
/// Method: two probes at once, then a third.
#[test]
fn a_second_probe_at_once_is_refused() {
    simulate(14, async |sim| {
        let _server = sim.server(server_config());
        let client = sim.client(1, client_config()).await.unwrap();
        let bytes = ProbeBytes::new(1_000_000).unwrap();
        let (first, second) = tokio::join!(client.probe(bytes), client.probe(bytes));
        assert!(first.unwrap().is_some());
        assert!(matches!(second, Err(ClientError::ProbeInProgress)), "{second:?}");
        assert!(client.probe(bytes).await.unwrap().is_some());
        client.close().await;
    });
}

/// Goal: a probe returns the requested number of bytes and measurements, repeatedly, and does not disturb a
/// subscription.
/// Method: probes of three sizes; the largest takes longer than the path's delay.
#[test]
fn a_probe_measures_the_path() {
    simulate(12, async |sim| {
        let delay = Duration::from_millis(5);
        sim.net.set_path(Path { delay: delay..=delay, ..Path::default() });
        let server = sim.server(server_config());
        let mut publisher = server.publisher(topic("t")).unwrap();
        let client = sim.client(1, client_config()).await.unwrap();
        let mut subscription = client.subscribe(&topic("t")).await.unwrap();
        for (version, bytes) in [(1, 1), (2, 100_000), (3, 40_000_000)] {
            publish(&server, &mut publisher, version, 10_000).await;
            let probed = client.probe(ProbeBytes::new(bytes).unwrap()).await.unwrap().unwrap();
            assert_eq!(probed.bytes, u64::from(bytes));
            if transport() == Transport::Quic {
                // Over byte streams these are the counters of this machine.
                assert_eq!(probed.sender.lost_packets, 0);
            }
            if bytes > 1_000_000 {
                assert!(probed.elapsed >= delay, "{probed:?}");
            }
            assert_eq!(subscription.next().await.unwrap().id().version.0, version);
        }
        client.close().await;
    });
}
