//! Successive servers that publish different bytes under one epoch and version: clients compare content, not numbers
//! (PROTOCOL.md §6.6).

use crate::slow_path;
use std::time::Duration;
use tensor_relay_client::{Client, Receipt, Request, Subscription};
use tensor_relay_protocol::{Epoch, Mode, TensorSpec, Version};
use tensor_relay_server::{Publisher, Server};
use tensor_relay_tests::{
    pair::{CHUNK_BYTES, Sim, eventually, reconnecting, retaining, server_config, simulate, topic},
    tensors,
};
use tokio::time::{sleep, timeout};

/// Sixteen chunks.
const BYTES: u64 = 1 << 20;

const CHUNKS: u32 = (BYTES / CHUNK_BYTES as u64) as u32;

/// Content number `OTHER + n` is the other content that a later server publishes as version `n`.
const OTHER: u64 = 1000;

/// Longer than a client needs to reconnect.
const RECONNECT_DURATION: Duration = Duration::from_secs(8);

fn open(server: &Server) -> Publisher {
    server.publisher_with(topic("t"), Some(Epoch(5)), retaining(4)).unwrap()
}

/// Publishes these contents as the next versions.
async fn publish(server: &Server, publisher: &mut Publisher, contents: impl IntoIterator<Item = u64>) {
    publish_of(server, publisher, contents, || tensors::noise("noise", BYTES)).await;
}

async fn publish_of(
    server: &Server,
    publisher: &mut Publisher,
    contents: impl IntoIterator<Item = u64>,
    spec: impl Fn() -> TensorSpec,
) {
    for content in contents {
        let staged = tensors::stage(server, vec![spec()], content);
        publisher.publish(staged, tensors::metadata(content)).await.unwrap();
    }
}

async fn follow(sim: &Sim, request: fn(tensor_relay_client::Topic) -> Request) -> (Client, Subscription) {
    let client = sim.client(1, reconnecting()).await.unwrap();
    let subscription = client.subscribe_to(request(topic("t"))).await.unwrap();
    client.list().await.unwrap();
    (client, subscription)
}

/// Receives the next version, which must have this number and content, and belong to the same epoch without a change of
/// content.
async fn next(subscription: &mut Subscription, version: u64, content: u64) -> Receipt {
    next_checked(subscription, (version, content), false).await
}

/// As [`next`], for a version whose number was committed before with other content.
async fn next_with_other_content(subscription: &mut Subscription, version: u64, content: u64) -> Receipt {
    next_checked(subscription, (version, content), true).await
}

async fn next_checked(
    subscription: &mut Subscription,
    (version, content): (u64, u64),
    is_new_epoch: bool,
) -> Receipt {
    let snapshot = subscription.next().await.unwrap();
    assert_eq!(snapshot.id().version, Version(version));
    tensors::check_content(&snapshot, content);
    assert_eq!((snapshot.skipped(), snapshot.is_new_epoch()), (0, is_new_epoch));
    snapshot.receipt()
}

/// Drops the server and its publisher, and starts another server with the same key.
async fn restart(sim: &Sim, server: Server, publisher: Publisher) -> (Server, Publisher) {
    drop((publisher, server));
    let server = sim.server_again(server_config()).await;
    let publisher = open(&server);
    (server, publisher)
}

async fn wait_until_half_is_verified(subscription: &Subscription) {
    eventually("half of the version is verified", || subscription.progress().verified_bytes >= BYTES / 2)
        .await;
}

/// Goal: a client that committed a version gets the whole version if the next server publishes other bytes under its
/// number, and then continues; equal bytes are not sent again. Method: both modes; the second server publishes before
/// and after the client reconnects.
#[test]
fn a_committed_version_with_other_content_is_sent_again() {
    for request in [Request::latest, Request::every] {
        for wait in [Duration::ZERO, RECONNECT_DURATION] {
            for other in [0, OTHER] {
                simulate(1, async |sim| {
                    let server = sim.server(server_config());
                    let mut publisher = open(&server);
                    let (_client, mut subscription) = follow(&sim, request).await;
                    publish(&server, &mut publisher, [1]).await;
                    next(&mut subscription, 1, 1).await;

                    let (server, mut publisher) = restart(&sim, server, publisher).await;
                    sleep(wait).await;
                    let before = sim.server_sent();
                    publish(&server, &mut publisher, [other + 1]).await;
                    if other > 0 {
                        let receipt = next_with_other_content(&mut subscription, 1, other + 1).await;
                        assert_eq!((receipt.resumed, receipt.wire_bytes), (0, BYTES));
                    } else {
                        assert!(
                            timeout(RECONNECT_DURATION, subscription.next()).await.is_err(),
                            "version 1 is not delivered again"
                        );
                        assert!(sim.server_sent() - before < BYTES / 10);
                    }
                    publish(&server, &mut publisher, [2]).await;
                    next(&mut subscription, 2, 2).await;
                });
            }
        }
    }
}

/// Goal: the transfer of a partial version is continued only by a server with the same bytes. Method: both modes; end
/// the first server during the transfer; the second one publishes the same or other bytes, before and after the client
/// reconnects.
#[test]
fn a_partial_version_is_continued_only_with_the_same_bytes() {
    for request in [Request::latest, Request::every] {
        for wait in [Duration::ZERO, RECONNECT_DURATION] {
            for other in [0, OTHER] {
                simulate(2, async |sim| {
                    slow_path(&sim);
                    let server = sim.server(server_config());
                    let mut publisher = open(&server);
                    let (_client, mut subscription) = follow(&sim, request).await;
                    publish(&server, &mut publisher, [1]).await;
                    wait_until_half_is_verified(&subscription).await;

                    let (server, mut publisher) = restart(&sim, server, publisher).await;
                    sleep(wait).await;
                    let before = sim.server_sent();
                    publish(&server, &mut publisher, [other + 1]).await;
                    let receipt = next(&mut subscription, 1, other + 1).await;
                    assert_eq!((receipt.resumed, receipt.chunks), (u32::from(other == 0), CHUNKS));
                    let sent = sim.server_sent() - before;
                    let (min, max) = if other > 0 { (BYTES, BYTES * 12 / 10) } else { (0, BYTES * 6 / 10) };
                    assert!((min..=max).contains(&sent), "{sent} of {BYTES}");
                });
            }
        }
    }
}

/// Goal: a version whose number was committed before with other content is resumed like any other version.
/// Method: commit a version; a second server publishes other bytes under its number, and ends during the transfer; a
/// third server has the bytes of the second.
#[test]
fn a_partial_version_with_other_content_is_resumed() {
    for request in [Request::latest, Request::every] {
        simulate(3, async |sim| {
            slow_path(&sim);
            let server = sim.server(server_config());
            let mut publisher = open(&server);
            let (_client, mut subscription) = follow(&sim, request).await;
            publish(&server, &mut publisher, [1]).await;
            next(&mut subscription, 1, 1).await;
            let (server, mut publisher) = restart(&sim, server, publisher).await;
            publish(&server, &mut publisher, [OTHER + 1]).await;
            let has_begun = || (1..BYTES).contains(&subscription.progress().verified_bytes);
            eventually("the transfer of the other content has begun", has_begun).await;
            wait_until_half_is_verified(&subscription).await;
            let (server, mut publisher) = restart(&sim, server, publisher).await;
            publish(&server, &mut publisher, [OTHER + 1]).await;
            assert_eq!(next_with_other_content(&mut subscription, 1, OTHER + 1).await.resumed, 1);
            publish(&server, &mut publisher, [2]).await;
            next(&mut subscription, 2, 2).await;
        });
    }
}

/// Goal: in mode `every`, a reader continues at the first version whose content differs: it receives no earlier version
/// again, and all later ones. Method: a second server publishes versions 1 and 2 with the same content, version 3 with
/// other content, and version 4; before and after the client reconnects.
#[test]
fn a_reader_continues_at_the_version_with_other_content() {
    for wait in [Duration::ZERO, RECONNECT_DURATION] {
        simulate(4, async |sim| {
            let server = sim.server(server_config());
            let mut publisher = open(&server);
            let (_client, mut subscription) = follow(&sim, Request::every).await;
            publish(&server, &mut publisher, 1..=3).await;
            for version in 1..=3 {
                next(&mut subscription, version, version).await;
            }
            let (server, mut publisher) = restart(&sim, server, publisher).await;
            sleep(wait).await;
            publish(&server, &mut publisher, [1, 2, OTHER + 3, 4]).await;
            next_with_other_content(&mut subscription, 3, OTHER + 3).await;
            next(&mut subscription, 4, 4).await;
        });
    }
}

/// Goal: a client that holds a newer version than its server ever had in the epoch, because the publisher continued
/// from an older record, receives what the server has, and then continues; the user is told.
/// Method: both modes; commit versions 1 to 5; a second server publishes other content from version 2 on, before and
/// after the client reconnects. In mode `every` a reader with a window of one also shows that an acknowledgement of
/// version 5 acknowledges nothing of the second server.
#[test]
fn a_client_that_is_ahead_receives_what_the_server_has() {
    for mode in [Mode::Latest, Mode::Every] {
        for wait in [Duration::ZERO, RECONNECT_DURATION] {
            simulate(6, async |sim| {
                let server = sim.server(server_config());
                let mut publisher = open(&server);
                let request = match mode {
                    Mode::Every => |topic| Request::every(topic).window(1),
                    _ => Request::latest,
                };
                let (client, mut subscription) = follow(&sim, request).await;
                for version in 1..=5 {
                    publish(&server, &mut publisher, [version]).await;
                    next(&mut subscription, version, version).await;
                }
                subscription.acknowledge();
                let (server, mut publisher) = restart(&sim, server, publisher).await;
                publisher.continue_at(Version(2));
                sleep(wait).await;
                publish(&server, &mut publisher, [OTHER + 2]).await;
                if mode == Mode::Every {
                    let gap = subscription.next().await.unwrap_err();
                    assert!(gap.to_string().contains("t went back to version 2 after version 5"), "{gap}");
                }
                next_with_other_content(&mut subscription, 2, OTHER + 2).await;
                for version in 3..=6 {
                    publish(&server, &mut publisher, [OTHER + version]).await;
                    next(&mut subscription, version, OTHER + version).await;
                }
                assert_eq!(client.reconnects(), 1);
            });
        }
    }
}

/// Goal: no delta is coded against a base whose bytes differ at the client. Method: a client with a base; a second
/// server publishes other bytes as that version, and a similar next version. In mode `latest`, only the next version is
/// sent.
#[test]
fn no_delta_uses_a_base_with_other_content() {
    for request in [Request::latest, Request::every] {
        simulate(5, async |sim| {
            let server = sim.server(server_config());
            let mut publisher = open(&server);
            let (client, mut subscription) = follow(&sim, request).await;
            let steady = || tensors::steady("weights", BYTES);
            for version in 1..=3 {
                publish_of(&server, &mut publisher, [version], steady).await;
                let receipt = next(&mut subscription, version, version).await;
                assert_eq!(receipt.codecs.deltas().chunks > 0, version == 3, "version {version}");
            }
            sim.cut(1);
            let (server, mut publisher) = restart(&sim, server, publisher).await;
            publisher.continue_at(Version(3));
            publish_of(&server, &mut publisher, [OTHER + 3, OTHER + 4], steady).await;
            sim.mend(1);
            if request(topic("t")).mode() == Request::every(topic("t")).mode() {
                let receipt = next_with_other_content(&mut subscription, 3, OTHER + 3).await;
                assert_eq!(receipt.codecs.deltas().chunks, 0);
                next(&mut subscription, 4, OTHER + 4).await;
            } else {
                let snapshot = subscription.next().await.unwrap();
                tensors::check_content(&snapshot, OTHER + 4);
                assert_eq!((snapshot.id().version, snapshot.skipped()), (Version(4), 1));
                assert_eq!(snapshot.receipt().codecs.deltas().chunks, 0);
            }
            assert_eq!(client.reconnects(), 1);
            publish_of(&server, &mut publisher, [OTHER + 5, OTHER + 6], steady).await;
            while subscription.next().await.unwrap().id().version < Version(6) {}
        });
    }
}
