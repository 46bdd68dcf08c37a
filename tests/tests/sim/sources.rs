//! One client that receives a version from two servers with the same content (PROTOCOL.md §6.10).

use crate::{OUTAGE_DURATION, slow_path};
use std::time::Duration;
use tensor_relay_client::{
    Client, Config, Glob, Indices, Request, Slice, Snapshot, Subscription, TensorBox, Version,
};
use tensor_relay_protocol::{Epoch, Ticket};
use tensor_relay_server::{Publisher, Server};
use tensor_relay_tests::{
    pair::{CHUNK_BYTES, Sim, eventually, publish, reconnecting, retaining, server_config, simulate, topic},
    tensors,
};
use tokio::time::{sleep, timeout};

/// Sixty-four chunks: sixteen times what the origin may push at once.
const BYTES: u64 = 4 << 20;

/// The most bytes of chunks that a lost connection costs, and what several sources order twice near the end.
const AGAIN_BYTES: u64 = 12 * CHUNK_BYTES as u64;

/// Two servers that publish the same versions.
struct Pair {
    servers: [(Server, Publisher); 2],
    /// The ticket of the second server.
    other: Ticket,
}

impl Pair {
    fn new(sim: &Sim) -> Self {
        slow_path(sim);
        let first = sim.server(server_config());
        let (second, other) = sim.other_server(server_config());
        let open = |server: Server| {
            let publisher = server.publisher_with(topic("t"), Some(Epoch(3)), retaining(2)).unwrap();
            (server, publisher)
        };
        Self { servers: [open(first), open(second)], other }
    }

    async fn publish(&mut self, version: u64) {
        for (server, publisher) in &mut self.servers {
            publish(server, publisher, version, BYTES).await;
        }
    }

    fn config(&self) -> Config {
        Config { sources: vec![self.other.clone()], ..reconnecting() }
    }

    /// Connects a client to both servers, and waits until it is.
    async fn connect(&self, sim: &Sim) -> Client {
        let client = sim.client(1, self.config()).await.unwrap();
        eventually("both are connected", || {
            self.servers.iter().all(|(server, _)| server.stats().sessions == 1)
        })
        .await;
        client
    }
}

/// The bytes that each server has sent.
fn sent(sim: &Sim) -> [u64; 2] {
    [sim.server_host(), sim.other_host()].map(|host| sim.net.sent_by(&host).bytes)
}

async fn next(subscription: &mut Subscription, version: u64) -> Snapshot {
    let snapshot = timeout(Duration::from_secs(60), subscription.next()).await.unwrap().unwrap();
    assert_eq!(snapshot.id().version, Version(version));
    tensors::check(&snapshot);
    snapshot
}

/// Goal: both servers send about a half of each version, and nothing travels twice but what is ordered near the end; small
/// versions come from the origin alone. Method: both modes, three versions, then a small one.
#[test]
fn both_servers_send_a_part_of_each_version() {
    for request in [Request::latest, Request::every] {
        simulate(1, async |sim| {
            let mut pair = Pair::new(&sim);
            let client = pair.connect(&sim).await;
            let mut subscription = client.subscribe_to(request(topic("t"))).await.unwrap();
            for version in 1..=3 {
                let before = sent(&sim);
                pair.publish(version).await;
                let wire_bytes = next(&mut subscription, version).await.receipt().wire_bytes;
                assert!((BYTES..BYTES + AGAIN_BYTES).contains(&wire_bytes), "{wire_bytes}");
                let after = sent(&sim);
                let parts = [0, 1].map(|at| after[at] - before[at]);
                assert!(parts.iter().all(|part| *part > BYTES / 3), "{parts:?}");
            }
            sleep(Duration::from_secs(1)).await; // What was ordered twice is cut off.
            let before = sent(&sim)[1];
            for (server, publisher) in &mut pair.servers {
                publish(server, publisher, 4, u64::from(CHUNK_BYTES)).await;
            }
            next(&mut subscription, 4).await;
            assert!(
                sent(&sim)[1] - before < u64::from(CHUNK_BYTES) / 2,
                "the second server sends none of it"
            );
        });
    }
}

/// Goal: a box comes from both servers too. Method: the second half of a tensor, three versions.
#[test]
fn both_servers_send_a_part_of_a_box() {
    simulate(1, async |sim| {
        let mut pair = Pair::new(&sim);
        let client = pair.connect(&sim).await;
        let slices = vec![Slice { dimension: 0, indices: Indices::Part { part: 1, parts: 2 } }];
        let half = TensorBox { tensors: Glob::new("**").unwrap(), slices };
        let request = Request::latest(topic("t")).boxes([half]);
        let mut subscription = client.subscribe_to(request).await.unwrap();
        for version in 1..=3 {
            let before = sent(&sim);
            pair.publish(version).await;
            let receipt = next(&mut subscription, version).await.receipt();
            assert_eq!(receipt.wanted_bytes, BYTES / 2);
            assert!(receipt.wire_bytes < BYTES / 2 + AGAIN_BYTES, "{receipt:?}");
            let after = sent(&sim);
            let parts = [0, 1].map(|at| after[at] - before[at]);
            assert!(parts.iter().all(|part| *part > BYTES / 6), "{parts:?}");
        }
    });
}

/// Goal: a server that is lost in the middle costs only its chunks under way, whichever it is, and the version is
/// committed without it. Method: cut the path to one of the servers for ever when a half is verified.
#[test]
fn a_lost_server_costs_only_its_chunks_under_way() {
    for lost in 0..2 {
        simulate(1, async |sim| {
            let mut pair = Pair::new(&sim);
            let client = pair.connect(&sim).await;
            let mut subscription = client.subscribe(&topic("t")).await.unwrap();
            pair.publish(1).await;
            eventually("a half is there", || subscription.progress().verified_bytes >= BYTES / 2).await;
            let host = if lost == 0 { sim.server_host() } else { sim.other_host() };
            sim.net.partition(&host, &sim.client_host(1));
            sim.net.reset_streams(&host, &sim.client_host(1));
            let receipt = next(&mut subscription, 1).await.receipt();
            assert!(receipt.wire_bytes < BYTES + AGAIN_BYTES, "{receipt:?}");
            // The next version comes from the server that is left, and from both once the path is mended.
            pair.publish(2).await;
            next(&mut subscription, 2).await;
            sim.net.repair(&host, &sim.client_host(1));
            sleep(OUTAGE_DURATION).await;
            let before = sent(&sim);
            pair.publish(3).await;
            next(&mut subscription, 3).await;
            let after = sent(&sim);
            assert!(
                (0..2).all(|at| after[at] - before[at] > BYTES / 8),
                "both send again: {before:?}, {after:?}"
            );
        });
    }
}

/// Goal: a server with other content under the same version is not used, and the version is the origin's. Method: the
/// second server publishes other bytes with the same manifest, which no digest in an announcement tells apart.
#[test]
fn a_server_with_other_content_is_not_used() {
    simulate(1, async |sim| {
        let mut pair = Pair::new(&sim);
        let client = pair.connect(&sim).await;
        let mut subscription = client.subscribe(&topic("t")).await.unwrap();
        let [(first, publisher), (second, other)] = &mut pair.servers;
        let staged = tensors::stage(second, vec![tensors::noise("noise", BYTES)], 77);
        other.publish(staged, tensors::metadata(77)).await.unwrap();
        publish(first, publisher, 1, BYTES).await;
        let receipt = next(&mut subscription, 1).await.receipt();
        assert_eq!(receipt.resumed, 0, "the session stays");
        let before = sent(&sim)[1];
        pair.publish(2).await;
        next(&mut subscription, 2).await;
        assert!(sent(&sim)[1] - before > BYTES / 4, "it is used for the next version, which is the same");
    });
}

/// Goal: when both servers are lost at once, the version continues once one of them is back. Method: cut both paths in the
/// middle, and mend one of them.
#[test]
fn both_servers_are_lost_at_once() {
    for back in 0..2 {
        simulate(1, async |sim| {
            let mut pair = Pair::new(&sim);
            let client = pair.connect(&sim).await;
            let mut subscription = client.subscribe(&topic("t")).await.unwrap();
            pair.publish(1).await;
            eventually("a half is there", || subscription.progress().verified_bytes >= BYTES / 2).await;
            let hosts = [sim.server_host(), sim.other_host()];
            for host in &hosts {
                sim.net.partition(host, &sim.client_host(1));
                sim.net.reset_streams(host, &sim.client_host(1));
            }
            sleep(OUTAGE_DURATION).await;
            sim.net.repair(&hosts[back], &sim.client_host(1));
            let receipt = next(&mut subscription, 1).await.receipt();
            assert!(receipt.wire_bytes < BYTES + 2 * AGAIN_BYTES, "{receipt:?}");
        });
    }
}

/// Goal: a subscription that ends in the middle ends at both servers. Method: drop it when a quarter is verified.
#[test]
fn a_subscription_ends_at_both_servers() {
    simulate(1, async |sim| {
        let mut pair = Pair::new(&sim);
        let client = pair.connect(&sim).await;
        let subscription = client.subscribe(&topic("t")).await.unwrap();
        pair.publish(1).await;
        eventually("a quarter is there", || subscription.progress().verified_bytes >= BYTES / 4).await;
        drop(subscription);
        let is_over = || pair.servers.iter().all(|(server, _)| server.stats().transfers == 0);
        eventually("no transfer is left", is_over).await;
        assert!(sent(&sim).iter().sum::<u64>() < BYTES, "{:?}", sent(&sim));
        let mut again = client.subscribe(&topic("t")).await.unwrap();
        next(&mut again, 1).await;
    });
}

/// Goal: what a server with other content sent is discarded, and received from the origin although the client's base has
/// become that content. Method: versions that differ a little, so that deltas are sent; the second server's second version
/// is another one.
#[test]
fn other_content_with_deltas_is_received_from_the_origin() {
    simulate(1, async |sim| {
        let mut pair = Pair::new(&sim);
        let client = pair.connect(&sim).await;
        let mut subscription = client.subscribe(&topic("t")).await.unwrap();
        for version in 1..=2 {
            pair.publish(version).await;
            next(&mut subscription, version).await;
        }
        let [(first, publisher), (second, other)] = &mut pair.servers;
        let staged = tensors::stage(second, vec![tensors::noise("noise", BYTES)], 78);
        other.publish(staged, tensors::metadata(78)).await.unwrap();
        publish(first, publisher, 3, BYTES).await;
        next(&mut subscription, 3).await;
        pair.publish(4).await;
        next(&mut subscription, 4).await;
    });
}

/// Goal: a server that has the version later joins later, and one that is not there at all is no error. Method: the
/// second server publishes when a quarter is verified; then it is closed.
#[test]
fn a_server_that_is_behind_joins_later() {
    simulate(1, async |sim| {
        let mut pair = Pair::new(&sim);
        let delay = Duration::from_millis(300);
        let path = tensor_relay_tests::simnet::Path { delay: delay..=delay, ..Default::default() };
        sim.net.set_path(path);
        let client = pair.connect(&sim).await;
        let mut subscription = client.subscribe(&topic("t")).await.unwrap();
        let before = sent(&sim);
        let [(first, publisher), (second, other)] = &mut pair.servers;
        publish(first, publisher, 1, BYTES).await;
        eventually("a quarter is there", || subscription.progress().verified_bytes >= BYTES / 4).await;
        publish(second, other, 1, BYTES).await;
        next(&mut subscription, 1).await;
        assert!(sent(&sim)[1] - before[1] > BYTES / 8, "{before:?}, {:?}", sent(&sim));
        let [(first, mut publisher), (second, other)] = pair.servers;
        drop((second, other));
        publish(&first, &mut publisher, 2, BYTES).await;
        next(&mut subscription, 2).await;
    });
}

/// Goal: a reader in mode `every` keeps its place, and nothing of its accounting changes by other sources. Method: a
/// retention of two versions that are all received, none acknowledged too early.
#[test]
fn the_place_of_a_reader_is_at_its_origin() {
    simulate(1, async |sim| {
        let mut pair = Pair::new(&sim);
        let client = pair.connect(&sim).await;
        let request = Request::every(topic("t")).window(1);
        let mut subscription = client.subscribe_to(request).await.unwrap();
        for version in 1..=4 {
            pair.publish(version).await;
            next(&mut subscription, version).await;
        }
        let committed = || pair.servers.each_ref().map(|(server, _)| server.stats().committed);
        eventually("commits are counted at the origin", || committed() == [4, 0]).await;
        eventually("no transfer is left", || pair.servers[1].0.stats().transfers == 0).await;
    });
}
