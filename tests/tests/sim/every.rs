//! Mode `every`: each version once and in order; if that is impossible, a gap is reported.

use crate::{OUTAGE_DURATION, slow_path};
use std::{future::Future, task::Poll, time::Duration};
use tensor_relay_client::{
    Client, Config, EndReason, Gap, ReaderName, Request, Start, Subscription, SubscriptionError, Version,
};
use tensor_relay_protocol::Epoch;
use tensor_relay_server::{Publisher, Server, TopicOptions, WhenFull};
use tensor_relay_tests::{
    pair::{client_config, eventually, publish, reconnecting, retaining, server_config, simulate, topic},
    tensors,
};
use tokio::time::sleep;

const EPOCH: Epoch = Epoch(3);

fn open(server: &Server, options: TopicOptions) -> Publisher {
    server.publisher_with(topic("t"), Some(EPOCH), options).unwrap()
}

fn every() -> Request {
    Request::every(topic("t"))
}

fn name(name: &str) -> ReaderName {
    ReaderName::new(name).unwrap()
}

/// The number of the next version, whose content is checked.
async fn next(subscription: &mut Subscription) -> u64 {
    let snapshot = subscription.next().await.unwrap();
    tensors::check(&snapshot);
    snapshot.id().version.0
}

async fn next_gap(subscription: &mut Subscription) -> Gap {
    match subscription.next().await {
        Err(SubscriptionError::Gap(gap)) => *gap,
        other => panic!("a gap was expected: {:?}", other.map(|snapshot| snapshot.id().clone())),
    }
}

async fn end_reason(subscription: &mut Subscription) -> EndReason {
    match subscription.next().await {
        Err(SubscriptionError::Ended { reason, .. }) => reason,
        other => panic!("an end was expected: {:?}", other.map(|snapshot| snapshot.id().clone())),
    }
}

/// Whether `future` is not ready after `wait`. It can be awaited again.
async fn still_waits<F: Future + Unpin>(future: &mut F, wait: Duration) -> bool {
    tokio::time::timeout(wait, future).await.is_err()
}

/// Goal: a reader that does not keep up is evicted when the publisher has waited for `publish_timeout`, and not before.
/// The reader gets the reason, the server counts the eviction, and other readers are not affected.
/// Method: a reader that takes no version, and one that takes all.
#[test]
fn a_slow_reader_is_evicted() {
    simulate(1, async |sim| {
        let server = sim.server(server_config());
        let options = TopicOptions { publish_timeout: Duration::from_secs(7), ..retaining(2) };
        let mut publisher = open(&server, options);
        let client = sim.client(1, client_config()).await.unwrap();
        let mut slow = client.subscribe_to(every()).await.unwrap();
        let mut good = client.subscribe_to(every()).await.unwrap();
        client.list().await.unwrap();
        for version in 1..=2 {
            publish(&server, &mut publisher, version, 1000).await;
            assert_eq!(next(&mut good).await, version);
        }
        good.acknowledge();
        let began = sim.elapsed();
        publish(&server, &mut publisher, 3, 1000).await;
        let waited = sim.elapsed() - began;
        assert!(waited >= Duration::from_secs(7) && waited < Duration::from_millis(7_100), "{waited:?}");
        assert_eq!(server.stats().evicted, 1);
        assert_eq!(next(&mut good).await, 3);
        // The evicted reader can still take the versions that it has received.
        assert_eq!((next(&mut slow).await, next(&mut slow).await), (1, 2));
        for _ in 0..2 {
            assert_eq!(end_reason(&mut slow).await, EndReason::TooSlow);
        }
        good.acknowledge();
        let began = sim.elapsed();
        publish(&server, &mut publisher, 4, 1000).await;
        assert!(sim.elapsed() - began < Duration::from_millis(10), "no reader delays the publisher any more");
    });
}

/// Goal: a reader that does not keep up delays a receiver that offers its versions to others by two seconds, less than its
/// origin waits for it, and is evicted then. Method: a receiver of the origin's versions, as itself an origin for a reader
/// that takes no version.
#[test]
fn a_slow_reader_delays_a_receiver_for_two_seconds() {
    simulate(1, async |sim| {
        let (origin, ticket) = sim.other_server(server_config());
        let mut publisher = open(&origin, retaining(3));
        let receiver = sim.server(server_config());
        let mut forwarder = receiver.forwarder(topic("t"));
        let config = Config { device: None, ..client_config() }; // Only host memory is offered.
        let from_origin = Client::connect_with(&sim.connector(2), &ticket, config).await.unwrap();
        let mut received = from_origin.subscribe_to(every()).await.unwrap();
        let (mut slow, mut delays) = (None, vec![]);
        for version in 1..=4 {
            publish(&origin, &mut publisher, version, 1000).await;
            let snapshot = received.next().await.unwrap();
            let id = (snapshot.id().epoch, snapshot.id().version);
            let (manifest, source) = (snapshot.manifest().clone(), snapshot.source().unwrap());
            let began = sim.elapsed();
            forwarder
                .offer(id, manifest, source, snapshot.metadata().to_vec())
                .await
                .unwrap();
            delays.push(sim.elapsed() - began);
            received.acknowledge();
            if slow.is_none() {
                let client = sim.client(1, client_config()).await.unwrap();
                let subscription = client.subscribe_to(every()).await.unwrap();
                client.list().await.unwrap();
                slow = Some((client, subscription));
            }
        }
        let total: Duration = delays.iter().sum();
        let expected = Duration::from_secs(2);
        assert!(total >= expected && total < expected + Duration::from_millis(200), "{delays:?}");
        assert_eq!((receiver.stats().evicted, origin.stats().evicted), (1, 0));
        let (_client, mut slow) = slow.unwrap();
        next(&mut slow).await;
        assert_eq!(end_reason(&mut slow).await, EndReason::TooSlow);
    });
}

/// Goal: a publisher with `WhenFull::Block` waits without limit, until the reader has acknowledged.
/// Method: a reader that takes its first version after five minutes.
#[test]
fn a_blocking_publisher_waits_without_limit() {
    simulate(2, async |sim| {
        let server = sim.server(server_config());
        let options = TopicOptions { when_full: WhenFull::Block, ..retaining(1) };
        let mut publisher = open(&server, options);
        let client = sim.client(1, client_config()).await.unwrap();
        let mut slow = client.subscribe_to(every()).await.unwrap();
        client.list().await.unwrap();
        publish(&server, &mut publisher, 1, 1000).await;
        let mut publishing = Box::pin(publish(&server, &mut publisher, 2, 1000));
        assert!(still_waits(&mut publishing, Duration::from_secs(300)).await);
        assert_eq!(next(&mut slow).await, 1);
        assert!(still_waits(&mut publishing, Duration::from_secs(60)).await, "version 1 is not acknowledged");
        let (_, version) = tokio::join!(publishing, next(&mut slow));
        assert_eq!((version, server.stats().evicted), (2, 0));
    });
}

/// Goal: a publish that waits for a reader is a problem in the status until it ends, also if it is cancelled. Method:
/// the status while a publish waits, and after that was dropped.
#[test]
fn a_cancelled_publish_is_no_problem_any_more() {
    simulate(2, async |sim| {
        let server = sim.server(server_config());
        let options = TopicOptions { when_full: WhenFull::Block, ..retaining(1) };
        let mut publisher = open(&server, options);
        let client = sim.client(1, client_config()).await.unwrap();
        let _slow = client.subscribe_to(every()).await.unwrap();
        client.list().await.unwrap();
        publish(&server, &mut publisher, 1, 1000).await;
        let status = server.status_reader();
        let problem = || status.read().unwrap().topics[0].publish_problem.clone();
        let mut publishing = Box::pin(publish(&server, &mut publisher, 2, 1000));
        assert!(still_waits(&mut publishing, Duration::from_secs(300)).await);
        assert!(problem().is_some_and(|problem| problem.contains("waits for 1 reader")));
        drop(publishing);
        assert_eq!(problem(), None);
    });
}

/// Goal: the place of a lost reader is kept for `reader_linger`, and no longer.
/// Method: cut the reader's path, and publish a version that must wait for the reader; with a reader name from the
/// user, and with a name from the client.
#[test]
fn the_place_of_a_lost_reader_expires() {
    for named in [true, false] {
        simulate(3, async |sim| {
            let linger = Duration::from_secs(20);
            let server = sim.server(tensor_relay_server::Config { reader_linger: linger, ..server_config() });
            let options = TopicOptions { when_full: WhenFull::Block, ..retaining(1) };
            let mut publisher = open(&server, options);
            let client = sim.client(1, reconnecting()).await.unwrap();
            let request = if named { every().reader(name("r")) } else { every() };
            let mut gone = client.subscribe_to(request).await.unwrap();
            client.list().await.unwrap();
            publish(&server, &mut publisher, 1, 1000).await;
            assert_eq!(next(&mut gone).await, 1);
            sim.cut(1);
            let cut = sim.elapsed();
            publish(&server, &mut publisher, 2, 1000).await;
            let waited = sim.elapsed() - cut;
            let idle = Duration::from_millis(sim.tuning.idle_timeout_ms.into());
            assert!(waited >= linger && waited < idle + linger + Duration::from_secs(2), "{waited:?}");
            assert_eq!(server.stats().evicted, 0, "the reader's place expired, which is not an eviction");

            sim.mend(1);
            let subscribers = || async { client.list().await.unwrap()[0].subscribers };
            assert_eq!(
                next(&mut gone).await,
                2,
                "no version was missed, since the reader had received version 1"
            );
            assert_eq!(subscribers().await, 1);
        });
    }
}

/// Goal: a named reader that returns after its place was given up is told what it missed, and nothing if it missed
/// nothing.
/// Method: a reader that acknowledged version 2 leaves; its place expires, or it is evicted while it is away; another
/// process returns under its name when versions are missing, and when none is; in the end it has a place again.
#[test]
fn a_reader_that_lost_its_place_is_told_what_it_missed() {
    for (when_full, missed) in [(WhenFull::Block, true), (WhenFull::Evict, true), (WhenFull::Block, false)] {
        simulate(12, async |sim| {
            let linger = Duration::from_secs(20);
            let server = sim.server(tensor_relay_server::Config { reader_linger: linger, ..server_config() });
            let mut publisher = open(&server, TopicOptions { when_full, ..retaining(2) });
            let join = async |number| {
                let client = sim.client(number, client_config()).await.unwrap();
                let reader = client.subscribe_to(every().reader(name("r"))).await.unwrap();
                client.list().await.unwrap();
                (client, reader)
            };
            let (client, mut reader) = join(1).await;
            for version in 1..=2 {
                publish(&server, &mut publisher, version, 1000).await;
                assert_eq!(next(&mut reader).await, version);
            }
            reader.acknowledge();
            drop(reader);
            client.close().await;
            let last = if missed { 7 } else { 4 };
            if when_full == WhenFull::Block {
                sleep(linger * 2).await;
            }
            for version in 3..=last {
                publish(&server, &mut publisher, version, 1000).await;
            }
            let (client, mut reader) = join(2).await;
            if missed {
                let gap = reader.next().await.unwrap_err().to_string();
                assert!(gap.contains("3 versions are missing of t: 3 was expected, 6 was received"), "{gap}");
            }
            for version in (if missed { 6 } else { 3 })..=last {
                assert_eq!(next(&mut reader).await, version);
            }
            drop(reader); // It has not acknowledged the last version.
            client.close().await;
            let (_client, mut reader) = join(3).await;
            assert_eq!(next(&mut reader).await, last, "it has a place again");
        });
    }
}

/// Goal: a dropped subscription with a reader name keeps its place, one without a name does not.
/// Method: drop both kinds of subscription, and publish.
#[test]
fn only_a_named_reader_keeps_its_place() {
    for (named, waits) in [(false, Duration::ZERO), (true, Duration::from_secs(30))] {
        simulate(4, async |sim| {
            let server = sim.server(server_config());
            let options = TopicOptions { when_full: WhenFull::Block, ..retaining(1) };
            let mut publisher = open(&server, options);
            let client = sim.client(1, reconnecting()).await.unwrap();
            let request = if named { every().reader(name("r")) } else { every() };
            let mut leaving = client.subscribe_to(request).await.unwrap();
            client.list().await.unwrap();
            publish(&server, &mut publisher, 1, 1000).await;
            assert_eq!(next(&mut leaving).await, 1);
            drop(leaving);
            client.list().await.unwrap();
            let left = sim.elapsed();
            publish(&server, &mut publisher, 2, 1000).await;
            let waited = sim.elapsed() - left;
            assert!(waited >= waits.saturating_sub(Duration::from_millis(100)), "{waited:?}");
            assert!(waited < waits + Duration::from_millis(100), "{waited:?}");
        });
    }
}

/// Goal: versions that a named reader has not acknowledged are delivered to it again, acknowledged ones are not.
/// Method: drop the subscription after two versions, with and without an acknowledgement, and subscribe again at once,
/// over the same connection or another.
#[test]
fn unacknowledged_versions_are_delivered_again() {
    for (acknowledged, same_client) in [(false, false), (false, true), (true, false), (true, true)] {
        simulate(5, async |sim| {
            let server = sim.server(server_config());
            let mut publisher = open(&server, retaining(5));
            for version in 1..=4 {
                publish(&server, &mut publisher, version, 1000).await;
            }
            let mut client = sim.client(1, reconnecting()).await.unwrap();
            let request = every().reader(name("r"));
            let mut first = client.subscribe_to(request.clone()).await.unwrap();
            assert_eq!((next(&mut first).await, next(&mut first).await), (1, 2));
            if acknowledged {
                first.acknowledge();
            }
            drop(first);
            if !same_client {
                client.close().await;
                client = sim.client(1, reconnecting()).await.unwrap();
            }
            let mut second = client.subscribe_to(request).await.unwrap();
            for version in if acknowledged { 3..=4 } else { 2..=4 } {
                assert_eq!(next(&mut second).await, version);
            }
            let mut other = client.subscribe_to(every().reader(name("other"))).await.unwrap();
            assert_eq!(next(&mut other).await, 1, "another name is another reader");
        });
    }
}

/// Goal: a reader can begin at a given version; this acknowledges earlier versions. If the version is not retained, the
/// reader gets a gap first.
/// Method: begin at a version that is retained, at one that is not, and at a future one.
#[test]
fn a_reader_begins_at_a_version_or_gets_a_gap() {
    simulate(6, async |sim| {
        let server = sim.server(server_config());
        let options = TopicOptions { when_full: WhenFull::Block, ..retaining(3) };
        let mut publisher = open(&server, options);
        for version in 1..=5 {
            publish(&server, &mut publisher, version, 1000).await;
        }
        let client = sim.client(1, reconnecting()).await.unwrap();
        let at = |epoch: Option<Epoch>, version| {
            client.subscribe_to(every().from(Start::At(epoch, Version(version))))
        };
        assert_eq!(next(&mut at(None, 4).await.unwrap()).await, 4);
        assert_eq!(next(&mut at(Some(EPOCH), 5).await.unwrap()).await, 5);

        let mut late = at(Some(EPOCH), 2).await.unwrap();
        let gap = next_gap(&mut late).await;
        assert_eq!((gap.missing(), gap.found.version), (Some(1), Version(3)));
        assert_eq!(next(&mut late).await, 3);

        let mut stranger = at(Some(Epoch(99)), 5).await.unwrap();
        let gap = next_gap(&mut stranger).await;
        assert_eq!((gap.missing(), gap.found.version), (None, Version(3)));
        assert_eq!(next(&mut stranger).await, 3);
        drop((late, stranger));

        let mut early = at(Some(EPOCH), 6).await.unwrap();
        client.list().await.unwrap();
        publish(&server, &mut publisher, 6, 1000).await;
        assert_eq!(next(&mut early).await, 6);
    });
}

/// Goal: the number of unacknowledged versions never exceeds the window, also over lost connections.
/// Method: count the commits of a reader that takes no version; lose the connection; then take and acknowledge versions
/// one by one.
#[test]
fn unacknowledged_versions_never_exceed_the_window() {
    for (window, start) in
        [(1, Start::Oldest), (3, Start::Oldest), (3, Start::At(Some(EPOCH), Version(1))), (2, Start::Newest)]
    {
        simulate(7, async |sim| {
            let server = sim.server(server_config());
            let mut publisher = open(&server, retaining(50));
            publish(&server, &mut publisher, 1, 1000).await;
            let client = sim.client(1, reconnecting()).await.unwrap();
            let mut reader = client.subscribe_to(every().window(window).from(start)).await.unwrap();
            client.list().await.unwrap();
            for version in 2..=12 {
                publish(&server, &mut publisher, version, 1000).await;
            }
            sleep(Duration::from_secs(5)).await;
            assert_eq!(server.stats().committed, u64::from(window));
            for lost in 1..=2 {
                sim.cut(1);
                sleep(OUTAGE_DURATION).await;
                sim.mend(1);
                eventually("the client is connected again", || client.reconnects() == lost).await;
                sleep(Duration::from_secs(5)).await;
                assert_eq!(server.stats().committed, u64::from(window), "after {lost} lost connections");
            }
            for version in 1..=12 {
                assert_eq!(next(&mut reader).await, version);
                sleep(Duration::from_secs(1)).await;
                let committed = (version - 1 + u64::from(window)).min(12);
                assert_eq!(server.stats().committed, committed, "version {version} is not acknowledged");
            }
        });
    }
}

/// Goal: a publisher that is opened again in the same server continues after the previous one: no retained version is
/// lost, and the new epoch is reported.
/// Method: two epochs, with an early reader and a late one.
#[test]
fn a_reopened_publisher_continues_after_the_previous_one() {
    simulate(8, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = open(&server, retaining(4));
        let client = sim.client(1, reconnecting()).await.unwrap();
        let mut early = client.subscribe_to(every()).await.unwrap();
        client.list().await.unwrap();
        for version in 1..=2 {
            publish(&server, &mut publisher, version, 1000).await;
        }
        drop(publisher);
        let mut publisher = server.publisher_with(topic("t"), Some(Epoch(4)), retaining(4)).unwrap();
        for version in 1..=2 {
            publish(&server, &mut publisher, version, 1000).await;
        }
        let mut late = client.subscribe_to(every()).await.unwrap();
        for reader in [&mut early, &mut late] {
            assert_eq!((next(reader).await, next(reader).await), (1, 2));
            let gap = next_gap(reader).await;
            assert_eq!((gap.missing(), gap.found.epoch, gap.found.version), (None, Epoch(4), Version(1)));
            let snapshot = reader.next().await.unwrap();
            assert!(snapshot.is_new_epoch() && snapshot.id().epoch == Epoch(4));
            assert_eq!(next(reader).await, 2);
            reader.acknowledge();
        }
        // The readers' places outlive their publisher too.
        publish(&server, &mut publisher, 3, 1000).await;
        assert_eq!((next(&mut early).await, next(&mut late).await), (3, 3));
    });
}

/// Goal: when a server is restarted with the same versions under the same epoch, its readers continue: versions that
/// they have are not sent again, and none is missed.
/// Method: publish all versions again, before or after the reader has reconnected; with a full window.
#[test]
fn readers_continue_after_a_restart_with_the_same_versions() {
    for wait in [Duration::ZERO, Duration::from_secs(10)] {
        simulate(9, async |sim| {
            let server = sim.server(server_config());
            let options = TopicOptions { when_full: WhenFull::Block, ..retaining(4) };
            let mut publisher = open(&server, options.clone());
            let client = sim.client(1, reconnecting()).await.unwrap();
            let request = every().window(2).reader(name("r"));
            let mut reader = client.subscribe_to(request.clone()).await.unwrap();
            client.list().await.unwrap();
            for version in 1..=4 {
                publish(&server, &mut publisher, version, 1000).await;
            }
            for version in 1..=3 {
                assert_eq!(next(&mut reader).await, version);
            }
            eventually("version 4 is committed", || server.stats().committed == 4).await;
            drop((publisher, server));
            let server = sim.server_again(server_config()).await;
            sleep(wait).await;
            let mut publisher = open(&server, options);
            let publishing = async {
                for version in 1..=7 {
                    publish(&server, &mut publisher, version, 1000).await;
                    sleep(Duration::from_secs(1)).await;
                }
            };
            let reading = async {
                for version in 4..=6 {
                    assert_eq!(next(&mut reader).await, version);
                }
                // Version 6 is not acknowledged, so it is delivered again.
                drop(reader);
                let mut again = client.subscribe_to(request).await.unwrap();
                assert_eq!((next(&mut again).await, next(&mut again).await), (6, 7));
            };
            tokio::join!(publishing, reading);
        });
    }
}

/// Goal: mode `every` is never preempted.
/// Method: request both, and publish faster than the path's rate.
#[test]
fn every_is_not_preempted() {
    simulate(10, async |sim| {
        let server = sim.server(server_config());
        slow_path(&sim);
        let mut publisher = open(&server, retaining(10));
        let client = sim.client(1, reconnecting()).await.unwrap();
        let mut reader = client.subscribe_to(every().preempt(true)).await.unwrap();
        client.list().await.unwrap();
        for version in 1..=6 {
            publish(&server, &mut publisher, version, 1 << 20).await;
            sleep(Duration::from_millis(30)).await;
        }
        for version in 1..=6 {
            assert_eq!(next(&mut reader).await, version);
        }
    });
}

/// Goal: a second reader of the same name replaces the first, which gets the reason.
/// Method: two readers at once, over two connections, during a transfer.
#[test]
fn a_second_reader_of_a_name_replaces_the_first() {
    simulate(11, async |sim| {
        let server = sim.server(server_config());
        slow_path(&sim);
        let options = TopicOptions { when_full: WhenFull::Block, ..retaining(3) };
        let mut publisher = open(&server, options);
        let one = sim.client(1, reconnecting()).await.unwrap();
        let two = sim.client(2, reconnecting()).await.unwrap();
        let request = every().reader(name("r"));
        let mut first = one.subscribe_to(request.clone()).await.unwrap();
        one.list().await.unwrap();
        publish(&server, &mut publisher, 1, 1000).await;
        publish(&server, &mut publisher, 2, 2 << 20).await;
        assert_eq!(next(&mut first).await, 1);
        let mut second = two.subscribe_to(request).await.unwrap();
        assert_eq!(end_reason(&mut first).await, EndReason::Replaced);
        drop(first);
        assert_eq!((next(&mut second).await, next(&mut second).await), (1, 2));
        publish(&server, &mut publisher, 3, 1000).await;
        let mut publishing = Box::pin(publish(&server, &mut publisher, 4, 1000));
        let is_published =
            std::future::poll_fn(|cx| Poll::Ready(publishing.as_mut().poll(cx).is_ready())).await;
        assert!(is_published, "version 1 is acknowledged, and only the second reader counts");
    });
}

/// Goal: a reader waits without limit for the next version of an existing topic; for a topic that does not exist, it
/// gets an error.
/// Method: begin at the next version, and publish it five minutes later.
#[test]
fn the_wait_for_the_next_version_has_no_limit() {
    simulate(12, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = open(&server, retaining(3));
        publish(&server, &mut publisher, 1, 1000).await;
        let client = sim.client(1, reconnecting()).await.unwrap();
        let from_next = |name| Request::every(topic(name)).from(Start::Next);
        let mut late = client.subscribe_to(from_next("t")).await.unwrap();
        let mut newest = client
            .subscribe_to(Request::latest(topic("t")).from(Start::Next))
            .await
            .unwrap();
        let mut none = client.subscribe_to(from_next("none")).await.unwrap();
        let publishing = async {
            sleep(Duration::from_secs(300)).await;
            publish(&server, &mut publisher, 2, 1000).await;
        };
        let (late, newest, none, ()) =
            tokio::join!(next(&mut late), next(&mut newest), none.next(), publishing);
        assert_eq!((late, newest), (2, 2));
        assert!(matches!(none.unwrap_err(), SubscriptionError::NotFound { .. }));
    });
}
