//! Complete sessions over simulated byte streams: servers and clients do not depend on a lane's transport.

use std::{sync::Arc, time::Duration};
use tensor_relay_client::{Client, Config, Lanes};
use tensor_relay_protocol::CodecId;
use tensor_relay_server::{Access, Listener, Server};
use tensor_relay_tests::{
    pair::{Sim, client_config, eventually, publish, reconnecting, seeds, server_config, simulate, topic},
    simnet::Path,
    tensors,
};
use tensor_relay_transport::Transport;

const BYTES: u64 = 4 << 20;

fn server(sim: &Sim, config: tensor_relay_server::Config) -> Server {
    let (host, address) = (Arc::new(sim.server_host()), sim.server_address());
    let listener = Listener::bind_on(host, Transport::Auto, address, &sim.identity(), sim.tuning.clone());
    Server::start(listener.unwrap(), Access::open(), config)
}

async fn client(sim: &Sim, number: u8, config: Config) -> Client {
    let config = Config { transport: Transport::Tcp, ..config };
    Client::connect_with(&sim.connector(number), &sim.ticket(), config)
        .await
        .unwrap()
}

/// Goal: versions arrive intact over one or several byte streams, beside a session over QUIC.
#[test]
fn versions_arrive_over_byte_streams() {
    for (seed, lanes) in [(1, 1), (2, 3)] {
        for codec in [CodecId::Raw, CodecId::Zstd] {
            simulate(seed, async |sim| {
                let server =
                    server(&sim, tensor_relay_server::Config { codec: codec.into(), ..server_config() });
                let mut publisher = server.publisher(topic("t")).unwrap();
                let config = || Config { lanes: Lanes::Fixed(lanes), ..client_config() };
                let one = client(&sim, 1, config()).await;
                let other = sim.client(2, config()).await.unwrap();
                for client in [&one, &other] {
                    eventually("all lanes have joined", || client.lanes().len() as u32 == lanes).await;
                }
                let mut streams = one.subscribe(&topic("t")).await.unwrap();
                let mut quic = other.subscribe(&topic("t")).await.unwrap();
                for version in 1..=3 {
                    publish(&server, &mut publisher, version, BYTES).await;
                    tensors::check(&streams.next().await.unwrap());
                    tensors::check(&quic.next().await.unwrap());
                }
                assert!(
                    one.lanes()
                        .iter()
                        .all(|lane| lane.udp_payload_bytes == 0 && lane.received_bytes > 0)
                );
                one.close().await;
                eventually("the session has ended", || server.stats().sessions == 1).await;
                assert!(server.shutdown(Duration::from_secs(5)).await);
                quic.next().await.unwrap_err();
            });
        }
    }
}

/// Goal: a client resumes after a reset and after a partition.
/// Method: reset the connection during one version, and partition the client during the next.
#[test]
fn clients_reconnect_after_a_loss() {
    for seed in seeds(4) {
        simulate(seed, async |sim| {
            let server = server(&sim, server_config());
            sim.net.set_path(Path {
                delay: Duration::from_millis(5)..=Duration::from_millis(20),
                ..Path::default()
            });
            let mut publisher = server.publisher(topic("t")).unwrap();
            let client = client(&sim, 1, reconnecting()).await;
            let mut subscription = client.subscribe(&topic("t")).await.unwrap();
            for version in 1..=2 {
                publish(&server, &mut publisher, version, BYTES).await;
                eventually("the transfer runs", || subscription.progress().verified_bytes > BYTES / 4).await;
                match version {
                    1 => sim.net.reset_streams(&sim.server_host(), &sim.client_host(1)),
                    _ => {
                        sim.cut(1);
                        tokio::time::sleep(Duration::from_secs(15)).await;
                        sim.mend(1);
                    }
                }
                tensors::check(&subscription.next().await.unwrap());
                assert_eq!(client.reconnects(), version);
            }
        });
    }
}
