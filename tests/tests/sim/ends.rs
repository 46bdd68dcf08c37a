//! The end of sessions, topics and subscriptions: in order, in bounded time, and with a reason.

use futures_util::StreamExt;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::{pin::pin, time::Duration};
use tensor_relay_client::{
    ClientError, ConnectError, EndReason, Request, Subscription, SubscriptionError, Version,
};
use tensor_relay_tests::{
    pair::{Sim, client_config, eventually, publish, retaining, server_config, simulate, topic},
    simnet::Path,
    tensors,
};
use tokio::time::sleep;

/// Goal: a server that shuts down finishes active transfers, begins no others, and notifies its clients.
/// Method: shut down during a transfer while a newer version waits and a new client connects.
#[test]
fn a_shutdown_finishes_active_transfers() {
    simulate(1, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = server.publisher(topic("t")).unwrap();
        let client = sim.client(1, client_config()).await.unwrap();
        let mut subscription = client.subscribe(&topic("t")).await.unwrap();
        publish(&server, &mut publisher, 1, 8 << 20).await;
        eventually("the transfer runs", || subscription.progress().verified_bytes > 0).await;
        publish(&server, &mut publisher, 2, 1 << 20).await;
        let connecting = async {
            sleep(Duration::from_millis(1)).await;
            sim.client(2, client_config()).await.unwrap_err()
        };
        let began = sim.elapsed();
        let (finished, refused) = tokio::join!(server.shutdown(Duration::from_secs(20)), connecting);
        assert!(finished && sim.elapsed() - began < Duration::from_secs(5), "{:?}", sim.elapsed());
        assert!(matches!(refused, ClientError::Connect(ConnectError::Refused { .. })), "{refused}");
        let snapshot = subscription.next().await.unwrap();
        assert_eq!(snapshot.id().version, Version(1));
        tensors::check(&snapshot);
        expect_shut_down(subscription.next().await.unwrap_err());
    });
}

/// Goal: a client without a transfer is notified of a shutdown at once, not after the transfers of other clients.
/// Method: shut down while one client is receiving a version and another one waits for a topic.
#[test]
fn idle_clients_are_notified_first() {
    simulate(2, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = server.publisher(topic("t")).unwrap();
        let (busy, idle) = tokio::join!(sim.client(1, client_config()), sim.client(2, client_config()));
        let (busy, idle) = (busy.unwrap(), idle.unwrap());
        let mut receiving = busy.subscribe(&topic("t")).await.unwrap();
        let mut waiting = idle.subscribe(&topic("u")).await.unwrap();
        idle.list().await.unwrap();
        publish(&server, &mut publisher, 1, 16 << 20).await;
        eventually("the transfer runs", || receiving.progress().verified_bytes > 0).await;
        let notified = async {
            expect_shut_down(waiting.next().await.unwrap_err());
            let progress = receiving.progress();
            assert!(progress.verified_bytes < progress.payload_bytes, "{progress:?}");
        };
        let (finished, ()) = tokio::join!(server.shutdown(Duration::from_secs(20)), notified);
        assert!(finished);
        tensors::check(&receiving.next().await.unwrap());
    });
}

/// Goal: connected readers in mode `every` receive all retained versions before a shutdown, which would lose them.
/// Method: publish three versions, and shut down before the reader takes any; its window is one version.
#[test]
fn a_shutdown_delivers_all_retained_versions_first() {
    for seed in 0..10 {
        simulate(seed, async |sim| {
            let server = sim.server(server_config());
            let mut publisher = server.publisher_with(topic("t"), None, retaining(3)).unwrap();
            let client = sim.client(1, client_config()).await.unwrap();
            let mut every = client.subscribe_to(Request::every(topic("t")).window(1)).await.unwrap();
            client.list().await.unwrap();
            for version in 1..=3 {
                publish(&server, &mut publisher, version, 300_000).await;
            }
            let reading = async {
                for version in 1..=3 {
                    let snapshot = every.next().await.unwrap();
                    assert_eq!(snapshot.id().version, Version(version));
                    tensors::check(&snapshot);
                }
                expect_shut_down(every.next().await.unwrap_err());
            };
            let (finished, ()) = tokio::join!(server.shutdown(Duration::from_secs(20)), reading);
            assert!(finished && sim.elapsed() < Duration::from_secs(10), "{:?}", sim.elapsed());
        });
    }
}

/// Goal: after a shutdown, a request fails with the reason for the lost connection.
/// Method: send requests while the client tries to reconnect, and after it has given up.
#[test]
fn requests_after_a_shutdown_fail_with_the_reason() {
    simulate(3, async |sim| {
        let server = sim.server(server_config());
        let reconnect_timeout = Duration::from_secs(30);
        let config = tensor_relay_client::Config { reconnect_timeout, ..client_config() };
        let client = sim.client(1, config).await.unwrap();
        assert!(client.list().await.unwrap().is_empty() && client.connection_lost().is_none());
        server.shutdown(Duration::from_secs(1)).await;
        eventually("the connection is lost", || client.connection_lost().is_some()).await;
        let error = client.list().await.unwrap_err();
        assert!(matches!(error, ClientError::NotReconnected { .. }), "{error}");
        assert!(error.to_string().contains("the server is shutting down"), "{error}");
        let (listed, _) = tokio::join!(client.list(), sleep(reconnect_timeout));
        assert!(listed.is_err());
        let ended = client.list().await.unwrap_err();
        assert!(ended.to_string().contains("was not reached again within 30000 ms"), "{ended}");
    });
}

/// Goal: a shutdown ends about a second after its grace time at the latest, even if transfers do not.
/// Method: shut down during transfers that would take longer, on paths with loss.
#[test]
fn a_shutdown_ends_soon_after_its_grace_time() {
    for seed in 0..10 {
        simulate(seed, async |sim| _ = cut_off(&sim, seed as u32 * 2).await);
    }
}

/// Goal: a subscriber whose transfer is cut off is notified of the shutdown, and does not wait for its idle timeout.
/// Method: shut down while the congestion window is full; the subscriber gets the error within two seconds.
#[test]
fn a_shutdown_is_reported_during_a_transfer() {
    for seed in 0..10 {
        simulate(seed, async |sim| {
            let mut subscription = cut_off(&sim, 0).await;
            let began = sim.elapsed();
            expect_shut_down(subscription.next().await.unwrap_err());
            assert!(sim.elapsed() - began < Duration::from_secs(2), "{:?}", sim.elapsed() - began);
        });
    }
}

/// Shuts a server down when a transfer has run for two milliseconds and `round_trips` round trips. Returns the
/// subscription.
async fn cut_off(sim: &Sim, round_trips: u32) -> Subscription {
    let mut rng = ChaCha8Rng::seed_from_u64(sim.seed);
    let delay = Duration::from_millis(rng.random_range(10..50));
    sim.net.set_path(Path { delay: delay..=delay, loss: 0.001, ..Path::default() });
    let server = sim.server(server_config());
    let mut publisher = server.publisher(topic("t")).unwrap();
    let client = sim.client(1, client_config()).await.unwrap();
    let subscription = client.subscribe(&topic("t")).await.unwrap();
    client.list().await.unwrap();
    publish(&server, &mut publisher, 1, 16 << 20).await;
    sleep(Duration::from_millis(2) + delay * 2 * round_trips).await;
    let (grace, began) = (Duration::from_millis(3), sim.elapsed());
    assert!(!server.shutdown(grace).await, "the transfer takes longer");
    let took = sim.elapsed() - began;
    assert!(took < grace + Duration::from_millis(1_100), "{took:?}");
    // The client must outlive the subscription, or it closes the session itself.
    tokio::spawn(async move {
        sleep(Duration::from_secs(60)).await;
        client.close().await;
    });
    subscription
}

fn expect_shut_down(error: SubscriptionError) {
    let SubscriptionError::Disconnected { source, .. } = &error else { panic!("{error}") };
    assert!(source.to_string().contains("shutting down"), "{source}");
}

/// Goal: the end of a topic is reported after its last version, also to later subscribers.
/// Method: publish, end, and subscribe once more.
#[test]
fn the_end_of_a_topic_is_reported_after_its_last_version() {
    simulate(3, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = server.publisher(topic("t")).unwrap();
        let client = sim.client(1, client_config()).await.unwrap();
        let mut early = client.subscribe(&topic("t")).await.unwrap();
        publish(&server, &mut publisher, 1, 1 << 20).await;
        publisher.end();
        let mut late = client.subscribe(&topic("t")).await.unwrap();
        for subscription in [&mut early, &mut late] {
            tensors::check(&subscription.next().await.unwrap());
            for _ in 0..2 {
                let error = subscription.next().await.unwrap_err();
                let SubscriptionError::Ended { reason, .. } = error else { panic!("{error}") };
                assert_eq!(reason, EndReason::TopicEnded);
            }
        }
    });
}

/// Goal: subscribers of a topic that has ended receive all requested versions and the end before the server shuts down,
/// however soon.
/// Method: publish, end and shut down at once, with readers of every version and of the newest.
#[test]
fn a_shutdown_delivers_the_end_of_a_topic_first() {
    for seed in 0..10 {
        simulate(seed, async |sim| {
            let server = sim.server(server_config());
            let mut publisher = server.publisher_with(topic("t"), None, retaining(3)).unwrap();
            let client = sim.client(1, client_config()).await.unwrap();
            let every = Request::every(topic("t")).window(1);
            let mut every = client.subscribe_to(every).await.unwrap();
            let mut latest = client.subscribe(&topic("t")).await.unwrap();
            let mut other_topic = client.subscribe(&topic("u")).await.unwrap();
            client.list().await.unwrap();
            for version in 1..=3 {
                publish(&server, &mut publisher, version, 300_000).await;
            }
            publisher.end();
            let reading = async {
                for version in 1..=3 {
                    let snapshot = every.next().await.unwrap();
                    assert_eq!(snapshot.id().version, Version(version));
                    tensors::check(&snapshot);
                }
                expect_topic_ended(&every.next().await.unwrap_err());
                tensors::check(&latest.next().await.unwrap());
                expect_topic_ended(&next_error(&mut latest).await);
            };
            let (finished, ()) = tokio::join!(server.shutdown(Duration::from_secs(20)), reading);
            assert!(finished && sim.elapsed() < Duration::from_secs(10), "{:?}", sim.elapsed());
            expect_shut_down(other_topic.next().await.unwrap_err());
        });
    }
}

/// The next error, after the remaining versions.
async fn next_error(subscription: &mut Subscription) -> SubscriptionError {
    loop {
        if let Err(error) = subscription.next().await {
            return error;
        }
    }
}

/// Goal: a reader of an ended topic that takes no more versions delays a shutdown for its grace time, and a second more
/// at most.
/// Method: two versions, a window of one, and a user that never requests the second version.
#[test]
fn an_idle_reader_delays_a_shutdown_by_its_grace_time() {
    simulate(7, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = server.publisher_with(topic("t"), None, retaining(2)).unwrap();
        let client = sim.client(1, client_config()).await.unwrap();
        let every = Request::every(topic("t")).window(1);
        let mut every = client.subscribe_to(every).await.unwrap();
        client.list().await.unwrap();
        for version in 1..=2 {
            publish(&server, &mut publisher, version, 1000).await;
        }
        every.next().await.unwrap();
        publisher.end();
        let (grace, began) = (Duration::from_secs(3), sim.elapsed());
        assert!(!server.shutdown(grace).await, "the reader has not received the end");
        let took = sim.elapsed() - began;
        assert!(took >= grace && took < grace + Duration::from_secs(1), "{took:?}");
        drop(every);
    });
}

fn expect_topic_ended(error: &SubscriptionError) {
    let ended = matches!(error, SubscriptionError::Ended { reason: EndReason::TopicEnded, .. });
    assert!(ended, "{error}");
}

/// Goal: when a client leaves during a transfer, its resources are released at once, and others are not affected.
/// Method: close a client, and drop a subscription of another, during a transfer.
#[test]
fn a_client_that_leaves_releases_its_resources() {
    simulate(4, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = server.publisher(topic("t")).unwrap();
        let leaver = sim.client(1, client_config()).await.unwrap();
        let stayer = sim.client(2, client_config()).await.unwrap();
        let left = leaver.subscribe(&topic("t")).await.unwrap();
        let dropped = stayer.subscribe(&topic("t")).await.unwrap();
        let mut kept = stayer.subscribe(&topic("t")).await.unwrap();
        publish(&server, &mut publisher, 1, 8 << 20).await;
        eventually("all transfers run", || {
            server.stats().transfers == 3 && left.progress().verified_bytes > 0
        })
        .await;
        drop(dropped);
        eventually("two transfers remain", || server.stats().transfers == 2).await;
        leaver.close().await;
        eventually("one session remains", || server.stats().sessions == 1).await;
        tensors::check(&kept.next().await.unwrap());
        publish(&server, &mut publisher, 2, 1 << 20).await;
        tensors::check(&kept.next().await.unwrap());
        eventually("version 1 is released", || server.stats().staged_bytes == 1 << 20).await;
        assert_eq!(server.stats().evicted, 0);
    });
}

/// Goal: an idle client closes within a few round trips, without waiting for QUIC's draining period (three probe
/// timeouts).
/// Method: close on a short path and on a long one; an acknowledgement may be 25 ms late.
#[test]
fn closing_takes_few_round_trips() {
    for delay in [Duration::from_micros(50), Duration::from_millis(20)] {
        simulate(6, async |sim| {
            sim.net.set_path(Path { delay: delay..=delay, ..Path::default() });
            let server = sim.server(server_config());
            let client = sim.client(1, client_config()).await.unwrap();
            client.list().await.unwrap();
            let began = sim.elapsed();
            client.close().await;
            let took = sim.elapsed() - began;
            assert!(took <= 4 * 2 * delay + Duration::from_millis(30), "{took:?} with {delay:?} each way");
            eventually("the server has closed the session", || server.stats().sessions == 0).await;
        });
    }
}

/// Goal: a commit is reported to the publisher even if the subscriber closes as soon as it has its snapshot, as a
/// consumer of one version does.
/// Method: close the client right after `next`, on a clean network.
#[test]
fn a_commit_is_reported_before_the_close() {
    simulate(5, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = server.publisher(topic("t")).unwrap();
        let mut publication = publish(&server, &mut publisher, 1, 1 << 20).await;
        let client = sim.client(1, client_config()).await.unwrap();
        let mut subscription = client.subscribe(&topic("t")).await.unwrap();
        subscription.next().await.unwrap();
        client.close().await;
        assert!(publication.committed(1, Duration::from_secs(10)).await);
    });
}

/// Goal: a subscription as a stream ends when its topic does.
/// Method: take one version, end the topic, take the remaining items.
#[test]
fn a_stream_ends_with_its_topic() {
    simulate(1, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = server.publisher(topic("t")).unwrap();
        publish(&server, &mut publisher, 1, 1 << 20).await;
        let client = sim.client(1, client_config()).await.unwrap();
        let mut stream = pin!(client.subscribe(&topic("t")).await.unwrap().into_stream());
        assert_eq!(stream.next().await.unwrap().unwrap().id().version, Version(1));
        publisher.end();
        let last = stream.next().await.unwrap().unwrap_err();
        assert!(matches!(last, SubscriptionError::Ended { reason: EndReason::TopicEnded, .. }), "{last}");
        assert!(stream.next().await.is_none());
    });
}
