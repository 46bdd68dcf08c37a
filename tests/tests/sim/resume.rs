//! Connections that are lost during a transfer: received chunks are kept, only missing ones are sent again, and a
//! client that cannot continue reports an error.

mod outages;

use crate::{OUTAGE_DURATION, slow_path};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::time::Duration;
use tensor_relay_client::{
    Client, ClientError, ConnectError, EndReason, Glob, Subscription, SubscriptionError, Version,
};
use tensor_relay_protocol::{CodecId, Epoch};
use tensor_relay_server::{Publisher, Server, TopicOptions};
use tensor_relay_tests::{
    pair::{
        CHUNK_BYTES, Sim, client_config, eventually, publish, reconnecting, seeds, server_config, simulate,
        topic,
    },
    tensors,
};
use tensor_relay_transport::Workers;
use tokio::time::sleep;

const BYTES: u64 = 4 << 20;

/// The maximum number of wire bytes that a lost connection costs: those of the chunks in flight.
const LOST_BYTES: u64 = 4 * CHUNK_BYTES as u64;

fn open(server: &Server, epoch: u64) -> Publisher {
    server
        .publisher_with(topic("t"), Some(Epoch(epoch)), TopicOptions::default())
        .unwrap()
}

async fn follow(sim: &Sim) -> (Client, Subscription) {
    let client = sim.client(1, reconnecting()).await.unwrap();
    let subscription = client.subscribe(&topic("t")).await.unwrap();
    client.list().await.unwrap();
    (client, subscription)
}

/// Waits until `bytes` bytes of `version` are verified.
async fn wait_until_verified(subscription: &Subscription, version: u64, bytes: u64) {
    let are_verified = || {
        let progress = subscription.progress();
        progress.version == version && progress.verified_bytes >= bytes
    };
    eventually("the transfer runs", are_verified).await;
}

/// Goal: after a lost connection, the transfer is resumed: every byte is sent about once.
/// Method: cut the path for longer than the idle timeout, one to three times, at random moments of the transfer.
#[test]
fn a_version_is_resumed() {
    for seed in seeds(20) {
        simulate(seed, async |sim| {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            let server = sim.server(server_config());
            slow_path(&sim);
            let mut publisher = open(&server, 1);
            let (client, mut subscription) = follow(&sim).await;
            let before = sim.server_sent();
            publish(&server, &mut publisher, 1, BYTES).await;
            let cuts = rng.random_range(1..=3);
            for cut in 1..=cuts {
                wait_until_verified(&subscription, 1, BYTES * (cut - 1) / 4 + rng.random_range(1..BYTES / 4))
                    .await;
                sim.cut(1);
                sleep(OUTAGE_DURATION).await;
                sim.mend(1);
                eventually("the client is connected again", || client.reconnects() == cut).await;
            }
            let snapshot = subscription.next().await.unwrap();
            tensors::check(&snapshot);
            let receipt = snapshot.receipt();
            // A connection that is lost before the announcement does not count as resumed.
            assert!((1..=cuts).contains(&receipt.resumed.into()), "{receipt:?} after {cuts} cuts");
            assert_eq!(u64::from(receipt.chunks), BYTES / u64::from(CHUNK_BYTES));
            assert!(
                (BYTES..=BYTES + cuts * LOST_BYTES).contains(&receipt.wire_bytes),
                "{receipt:?} after {cuts} cuts"
            );
            let sent = sim.server_sent() - before;
            assert!(sent < BYTES * 107 / 100 + cuts * (2 * LOST_BYTES + 50_000), "{sent} after {cuts} cuts");
            assert_eq!((snapshot.skipped(), snapshot.is_new_epoch()), (0, false));
            eventually("one session remains", || server.stats().sessions == 1).await;
            publish(&server, &mut publisher, 2, 1000).await;
            tensors::check(&subscription.next().await.unwrap());
        });
    }
}

/// How a server is stopped before it is started again.
#[derive(Clone, Copy, Debug)]
enum Stop {
    /// The server notifies its clients.
    Notified,
    /// The server is stopped behind a partition, so that no client is notified.
    Silent,
}

async fn restart(sim: &Sim, server: Server, stop: Stop) -> Server {
    match stop {
        Stop::Notified => drop(server),
        Stop::Silent => {
            sim.cut(1);
            drop(server);
            sleep(Duration::from_secs(2)).await;
            sim.mend(1);
        }
    }
    sim.server_again(server_config()).await
}

/// Goal: a server that is restarted with the same content under the same epoch sends only missing chunks.
/// Method: stop the server during a transfer, with or without notifying the client; publish again before or after the
/// client has reconnected.
#[test]
fn a_restart_with_the_same_content_resumes_the_transfer() {
    for (seed, stop, publish_after) in [
        (1, Stop::Notified, Duration::ZERO),
        (2, Stop::Notified, Duration::from_secs(20)),
        (3, Stop::Silent, Duration::ZERO),
        (4, Stop::Silent, Duration::from_secs(20)),
    ] {
        simulate(seed, async |sim| {
            let server = sim.server(server_config());
            slow_path(&sim);
            let mut publisher = open(&server, 7);
            let (client, mut subscription) = follow(&sim).await;
            publish(&server, &mut publisher, 1, BYTES).await;
            wait_until_verified(&subscription, 1, BYTES / 2).await;
            drop(publisher);
            let server = restart(&sim, server, stop).await;
            let before = sim.server_sent();
            sleep(publish_after).await;
            let mut publisher = open(&server, 7);
            publish(&server, &mut publisher, 1, BYTES).await;
            let snapshot = subscription.next().await.unwrap();
            tensors::check(&snapshot);
            assert_eq!((snapshot.receipt().resumed, client.reconnects()), (1, 1), "{stop:?}");
            assert!(snapshot.receipt().wire_bytes <= BYTES + LOST_BYTES, "{:?}", snapshot.receipt());
            assert!(sim.server_sent() - before < BYTES * 6 / 10, "{stop:?}: only missing chunks are sent");

            publisher.continue_at(Version(5));
            publish(&server, &mut publisher, 5, 1000).await;
            let snapshot = subscription.next().await.unwrap();
            tensors::check(&snapshot);
            assert_eq!((snapshot.id().version, snapshot.skipped()), (Version(5), 3));
            assert!(!snapshot.is_new_epoch());
        });
    }
}

/// Goal: a committed version is not sent again after a restart with the same epoch.
/// Method: stop the server after the first version, publish the same version again, then a newer one.
#[test]
fn a_restart_does_not_repeat_a_committed_version() {
    simulate(5, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = open(&server, 7);
        let (_client, mut subscription) = follow(&sim).await;
        publish(&server, &mut publisher, 1, BYTES).await;
        subscription.next().await.unwrap();
        drop(publisher);
        let server = restart(&sim, server, Stop::Notified).await;
        let before = sim.server_sent();
        let mut publisher = open(&server, 7);
        publish(&server, &mut publisher, 1, BYTES).await;
        let next = tokio::time::timeout(Duration::from_secs(30), subscription.next()).await;
        assert!(next.is_err(), "version 1 is not delivered again");
        assert!(sim.server_sent() - before < 100_000);
        publish(&server, &mut publisher, 2, 1 << 20).await;
        let snapshot = subscription.next().await.unwrap();
        assert_eq!((snapshot.id().version, snapshot.skipped()), (Version(2), 0));
        tensors::check(&snapshot);
    });
}

/// Goal: after a restart with another epoch, versions are received from their first byte, and the new epoch is
/// reported.
/// Method: commit one version, stop the server during the transfer of the second, and start it with another epoch.
#[test]
fn another_epoch_is_received_from_its_first_byte() {
    for (seed, stop) in [(1, Stop::Notified), (2, Stop::Silent)] {
        simulate(seed, async |sim| {
            let server = sim.server(server_config());
            slow_path(&sim);
            let mut publisher = open(&server, 7);
            let (_client, mut subscription) = follow(&sim).await;
            publish(&server, &mut publisher, 1, 1000).await;
            assert!(!subscription.next().await.unwrap().is_new_epoch());
            publish(&server, &mut publisher, 2, BYTES).await;
            wait_until_verified(&subscription, 2, BYTES / 2).await;
            drop(publisher);
            let server = restart(&sim, server, stop).await;
            let mut publisher = open(&server, 8);
            publish(&server, &mut publisher, 1, BYTES).await;
            let snapshot = subscription.next().await.unwrap();
            tensors::check(&snapshot);
            assert_eq!((snapshot.id().epoch, snapshot.id().version), (Epoch(8), Version(1)));
            assert!(snapshot.is_new_epoch());
            assert_eq!((snapshot.receipt().resumed, snapshot.receipt().wire_bytes), (0, BYTES));
            assert_eq!(snapshot.skipped(), 0);
            publish(&server, &mut publisher, 2, 1000).await;
            assert!(!subscription.next().await.unwrap().is_new_epoch());
        });
    }
}

/// Goal: a partial version that is no longer published is dropped for the newest one, and counted as skipped.
/// Method: publish a newer version in the same epoch during an outage, or after a restart.
#[test]
fn an_obsolete_partial_version_is_skipped() {
    for restarted in [false, true] {
        simulate(3, async |sim| {
            let mut server = sim.server(server_config());
            slow_path(&sim);
            let mut publisher = open(&server, 7);
            let (_client, mut subscription) = follow(&sim).await;
            publish(&server, &mut publisher, 1, 1000).await;
            subscription.next().await.unwrap();
            publish(&server, &mut publisher, 2, BYTES).await;
            wait_until_verified(&subscription, 2, BYTES / 2).await;
            if restarted {
                drop(publisher);
                server = restart(&sim, server, Stop::Notified).await;
                publisher = open(&server, 7);
                publisher.continue_at(Version(3));
                publish(&server, &mut publisher, 3, BYTES).await;
            } else {
                sim.cut(1);
                sleep(OUTAGE_DURATION).await;
                publish(&server, &mut publisher, 3, BYTES).await;
                sim.mend(1);
            }
            let snapshot = subscription.next().await.unwrap();
            tensors::check(&snapshot);
            assert_eq!((snapshot.id().version, snapshot.skipped()), (Version(3), 1));
            assert_eq!((snapshot.receipt().resumed, snapshot.receipt().wire_bytes), (0, BYTES));
            eventually("version 2 is released", || server.stats().staged_bytes == BYTES).await;
        });
    }
}

/// Goal: a version that was preempted before the connection was lost is counted as skipped after the reconnect.
/// Method: preempt a version, and cut the path while only the newer one is being sent.
#[test]
fn a_preempted_version_is_counted_after_a_reconnect() {
    simulate(4, async |sim| {
        let server = sim.server(server_config());
        slow_path(&sim);
        let mut publisher = open(&server, 7);
        let client = sim.client(1, reconnecting()).await.unwrap();
        let request = tensor_relay_client::Request::latest(topic("t")).preempt(true);
        let mut subscription = client.subscribe_to(request).await.unwrap();
        client.list().await.unwrap();
        publish(&server, &mut publisher, 1, 1000).await;
        subscription.next().await.unwrap();
        publish(&server, &mut publisher, 2, BYTES).await;
        wait_until_verified(&subscription, 2, BYTES / 4).await;
        publish(&server, &mut publisher, 3, BYTES).await;
        wait_until_verified(&subscription, 3, 1).await;
        sim.cut(1);
        sleep(OUTAGE_DURATION).await;
        publish(&server, &mut publisher, 4, 1000).await;
        sim.mend(1);
        let snapshot = subscription.next().await.unwrap();
        assert_eq!((snapshot.id().version, snapshot.skipped()), (Version(4), 2));
    });
}
