//! The choice between QUIC and TCP where a client allows both.

use std::{sync::Arc, time::Duration};
use tensor_relay_tests::{
    pair::{Sim, simulate},
    simnet::Path,
};
use tensor_relay_transport::{ConnectError, Connector, Lane, LaneKind, LaneKindReason, Listener, Transport};

/// A path with a delay of `delay_ms` in each direction.
fn path(delay_ms: u64) -> Path {
    let delay = Duration::from_millis(delay_ms);
    Path { delay: delay..=delay, ..Path::default() }
}

/// Connects to a server that listens on the `offered` transports; returns the result and the duration in milliseconds.
async fn connect(sim: &Sim, connector: &Connector, offered: Transport) -> (Result<Lane, ConnectError>, u128) {
    connect_to_starting(sim, connector, offered, Duration::ZERO).await
}

/// Connects to a server that starts to listen `after` the client has begun.
async fn connect_to_starting(
    sim: &Sim,
    connector: &Connector,
    offered: Transport,
    after: Duration,
) -> (Result<Lane, ConnectError>, u128) {
    let (host, address) = (Arc::new(sim.server_host()), sim.server_address());
    let (hosts, keys, began) = ([address.to_string()], [sim.identity().fingerprint()], sim.elapsed());
    let accepting = async {
        tokio::time::sleep(after).await;
        let listener =
            Listener::bind_on(host, offered, address, &sim.identity(), sim.tuning.clone()).unwrap();
        loop {
            let arrival = listener.accept().await.unwrap();
            tokio::spawn(async move {
                if let Ok(lane) = arrival.accept().await {
                    lane.closed().await;
                }
            });
        }
    };
    let lane = tokio::select! {
        biased;
        () = accepting => unreachable!("accepting never ends"),
        lane = connector.connect(&hosts, &keys) => lane,
    };
    (lane, (sim.elapsed() - began).as_millis())
}

fn connector(sim: &Sim) -> Connector {
    sim.connector(1).with_transport(Transport::Auto)
}

fn kind_and_reason(lane: &Lane) -> (LaneKind, LaneKindReason) {
    (lane.kind(), lane.reason())
}

#[test]
fn short_paths_use_tcp_and_long_ones_quic() {
    for (delay_ms, expected) in [
        (1, (LaneKind::Tcp, LaneKindReason::ShortPath)),
        (20, (LaneKind::Quic, LaneKindReason::Answered)),
        (150, (LaneKind::Quic, LaneKindReason::Answered)),
    ] {
        simulate(3, async |sim| {
            sim.net.set_path(path(delay_ms));
            let (lane, _) = connect(&sim, &connector(&sim), Transport::Auto).await;
            assert_eq!(kind_and_reason(&lane.unwrap()), expected, "{delay_ms} ms");
        });
    }
}

/// Goal: where TCP is expected, a path that seems long does not lead to QUIC; a server that refuses TCP is reached over
/// QUIC.
#[test]
fn expected_tcp_is_tried_first_on_any_path() {
    for (seed, offered, expected) in [
        (7, Transport::Auto, (LaneKind::Tcp, LaneKindReason::Expected)),
        (8, Transport::Quic, (LaneKind::Quic, LaneKindReason::Answered)),
    ] {
        simulate(seed, async |sim| {
            sim.net.set_path(path(100));
            let (lane, _) = connect(&sim, &connector(&sim).expecting_tcp(), offered).await;
            assert_eq!(kind_and_reason(&lane.unwrap()), expected);
        });
    }
}

/// Goal: on a long path without UDP, only the first connection waits for QUIC's head start.
#[test]
fn silent_udp_delays_only_the_first_connection() {
    simulate(4, async |sim| {
        sim.net.set_path(path(20));
        let connector = connector(&sim);
        let (lane, first_ms) = connect(&sim, &connector, Transport::Tcp).await;
        assert_eq!(kind_and_reason(&lane.unwrap()), (LaneKind::Tcp, LaneKindReason::UdpSilent));
        tokio::time::sleep(Duration::from_secs(1)).await;
        let (lane, second_ms) = connect(&sim, &connector, Transport::Tcp).await;
        assert_eq!(kind_and_reason(&lane.unwrap()), (LaneKind::Tcp, LaneKindReason::UdpSilent));
        assert!((250..1_000).contains(&first_ms) && second_ms < 200, "{first_ms} ms, then {second_ms} ms");
    });
}

/// Goal: a client that reconnects while its server restarts uses the transport that it would use later. Method: TCP is
/// refused when the client begins; QUIC repeats its packets until the server has started.
#[test]
fn a_server_that_starts_meanwhile_is_reached_over_tcp() {
    for (seed, offered, expected) in [
        (11, Transport::Auto, (LaneKind::Tcp, LaneKindReason::ShortPath)),
        (12, Transport::Quic, (LaneKind::Quic, LaneKindReason::Answered)),
    ] {
        simulate(seed, async |sim| {
            sim.net.set_path(path(1));
            let after = Duration::from_millis(500);
            let (lane, _) = connect_to_starting(&sim, &connector(&sim), offered, after).await;
            assert_eq!(kind_and_reason(&lane.unwrap()), expected);
        });
    }
}

#[test]
fn refused_tcp_causes_no_delay() {
    simulate(5, async |sim| {
        sim.net.set_path(path(1));
        let (lane, duration_ms) = connect(&sim, &connector(&sim), Transport::Quic).await;
        assert_eq!(kind_and_reason(&lane.unwrap()), (LaneKind::Quic, LaneKindReason::Answered));
        assert!(duration_ms < 50, "{duration_ms} ms");
    });
}

/// Goal: if neither transport connects, the error reports the result of both.
#[test]
fn an_error_reports_both_transports() {
    simulate(6, async |sim| {
        let keys = [sim.identity().fingerprint()];
        let hosts = [sim.server_address().to_string()];
        let error = connector(&sim).connect(&hosts, &keys).await.unwrap_err();
        assert!(matches!(error, ConnectError::NoAnswer { .. }), "{error}");
        let error = error.to_string();
        assert!(error.contains("nothing over UDP") && error.contains("refused"), "{error}");
    });
}

/// Goal: a wrong key is reported as a wrong key while both transports are tried.
#[test]
fn a_wrong_key_is_not_reported_as_no_answer() {
    simulate(7, async |sim| {
        let stranger = sim.with_key_of(8);
        let host = Arc::new(sim.server_host());
        let bound = Listener::bind_on(
            host,
            Transport::Auto,
            sim.server_address(),
            &stranger.identity(),
            sim.tuning.clone(),
        );
        let listener = bound.unwrap();
        let (hosts, keys) = ([sim.server_address().to_string()], [sim.identity().fingerprint()]);
        let accepting = async {
            loop {
                let arrival = listener.accept().await.unwrap();
                tokio::spawn(async move { drop(arrival.accept().await) });
            }
        };
        let connector = connector(&sim);
        let error = tokio::select! {
            () = accepting => unreachable!("accepting never ends"),
            lane = connector.connect(&hosts, &keys) => lane.unwrap_err(),
        };
        assert!(matches!(error, ConnectError::WrongKey { .. }), "{error}");
    });
}
