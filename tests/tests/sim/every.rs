//! Mode `every`: each version once and in order, and where that cannot be, a word that says so.

use std::{future::Future, task::Poll, time::Duration};
use tensor_relay_client::{
    EndReason, Gap, ReaderName, Request, Start, Subscription, SubscriptionError, Version,
};
use tensor_relay_protocol::Epoch;
use tensor_relay_server::{Publisher, Server, TopicOptions, WhenFull};
use tensor_relay_tests::{
    pair::{client_config, eventually, keeping, publish, reconnecting, server_config, simulate, topic},
    simnet::Path,
    tensors,
};
use tokio::time::sleep;

const EPOCH: Epoch = Epoch(3);

/// Longer than the idle timeout of both ends.
const LONG: Duration = Duration::from_secs(15);

fn open(server: &Server, options: TopicOptions) -> Publisher {
    server.publisher_with(topic("t"), Some(EPOCH), options).unwrap()
}

fn every() -> Request {
    Request::every(topic("t"))
}

fn name(name: &str) -> ReaderName {
    ReaderName::new(name).unwrap()
}

/// The next version, whole.
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

/// Whether `future` is not ready after `wait`; it lives on.
async fn still_waits<F: Future + Unpin>(future: &mut F, wait: Duration) -> bool {
    tokio::time::timeout(wait, future).await.is_err()
}

/// Goal: a reader that does not keep up is evicted when the publisher has waited as long as it may, and not before; both
/// ends are told; the others go on.
/// Method: a reader that takes nothing beside one that takes everything.
#[test]
fn a_slow_reader_is_evicted() {
    simulate(1, async |sim| {
        let server = sim.server(server_config());
        let options = TopicOptions { publish_timeout: Duration::from_secs(7), ..keeping(2) };
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
        // What it has received already it may still take.
        assert_eq!((next(&mut slow).await, next(&mut slow).await), (1, 2));
        for _ in 0..2 {
            assert_eq!(end_reason(&mut slow).await, EndReason::TooSlow);
        }
        good.acknowledge();
        let began = sim.elapsed();
        publish(&server, &mut publisher, 4, 1000).await;
        assert!(sim.elapsed() - began < Duration::from_millis(10), "nobody stands in the way any more");
    });
}

/// Goal: a publisher that blocks waits for as long as it takes, and no longer.
/// Method: a reader that wakes after five minutes.
#[test]
fn a_publisher_that_blocks() {
    simulate(2, async |sim| {
        let server = sim.server(server_config());
        let options = TopicOptions { when_full: WhenFull::Block, ..keeping(1) };
        let mut publisher = open(&server, options);
        let client = sim.client(1, client_config()).await.unwrap();
        let mut slow = client.subscribe_to(every()).await.unwrap();
        client.list().await.unwrap();
        publish(&server, &mut publisher, 1, 1000).await;
        let mut publishing = Box::pin(publish(&server, &mut publisher, 2, 1000));
        assert!(still_waits(&mut publishing, Duration::from_secs(300)).await);
        assert_eq!(next(&mut slow).await, 1);
        assert!(still_waits(&mut publishing, Duration::from_secs(60)).await, "it works on version 1");
        let (_, version) = tokio::join!(publishing, next(&mut slow));
        assert_eq!((version, server.stats().evicted), (2, 0));
    });
}

/// Goal: the place of a named reader that disappears is kept for as long as the server says, and no longer.
/// Method: cut its way for good; a publish that must wait for it; with a name of its own and with one that only the
/// client knows.
#[test]
fn a_reader_that_disappears() {
    for named in [true, false] {
        simulate(3, async |sim| {
            let linger = Duration::from_secs(20);
            let server = sim.server(tensor_relay_server::Config { reader_linger: linger, ..server_config() });
            let options = TopicOptions { when_full: WhenFull::Block, ..keeping(1) };
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
            assert_eq!(server.stats().evicted, 0, "it gave its place up by being away");

            sim.mend(1);
            let subscribers = || async { client.list().await.unwrap()[0].subscribers };
            assert_eq!(next(&mut gone).await, 2, "nothing was missed, as version 1 had come");
            assert_eq!(subscribers().await, 1);
        });
    }
}

/// Goal: a reader that leaves for good holds nothing; a named one that leaves for a while does.
/// Method: drop both kinds of subscription, and publish.
#[test]
fn a_reader_that_leaves() {
    for (named, waits) in [(false, Duration::ZERO), (true, Duration::from_secs(30))] {
        simulate(4, async |sim| {
            let server = sim.server(server_config());
            let options = TopicOptions { when_full: WhenFull::Block, ..keeping(1) };
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

/// Goal: what a named reader did not acknowledge is delivered to it again, and what it did is not.
/// Method: end it after a version, with and without a word, and come back at once; with another connection and the same.
#[test]
fn what_was_not_acknowledged_comes_again() {
    for (acknowledged, same_client) in [(false, false), (false, true), (true, false), (true, true)] {
        simulate(5, async |sim| {
            let server = sim.server(server_config());
            let mut publisher = open(&server, keeping(5));
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

/// Goal: a reader that says where it was goes on there, whatever it acknowledged; where it was is acknowledged by that.
/// Method: begin at a version that is retained, at one that is not, and at one to come.
#[test]
fn beginning_at_a_version() {
    simulate(6, async |sim| {
        let server = sim.server(server_config());
        let options = TopicOptions { when_full: WhenFull::Block, ..keeping(3) };
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

/// Goal: no more versions are under way or unacknowledged than the window says, over lost connections too.
/// Method: a reader that takes nothing; count what it committed; lose the connection; take and acknowledge one by one.
#[test]
fn the_window_holds() {
    for (window, start) in
        [(1, Start::Oldest), (3, Start::Oldest), (3, Start::At(Some(EPOCH), Version(1))), (2, Start::Newest)]
    {
        simulate(7, async |sim| {
            let server = sim.server(server_config());
            let mut publisher = open(&server, keeping(50));
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
                sleep(LONG).await;
                sim.mend(1);
                eventually("it is connected again", || client.reconnects() == lost).await;
                sleep(Duration::from_secs(5)).await;
                assert_eq!(server.stats().committed, u64::from(window), "after {lost} lost connections");
            }
            for version in 1..=12 {
                assert_eq!(next(&mut reader).await, version);
                sleep(Duration::from_secs(1)).await;
                let most = (version - 1 + u64::from(window)).min(12);
                assert_eq!(server.stats().committed, most, "{version} is not acknowledged");
            }
        });
    }
}

/// Goal: a publisher that is opened again in the same server goes on behind the one before: nothing that is retained is
/// lost, and the new epoch is told.
/// Method: two epochs for an early reader and a late one.
#[test]
fn a_publisher_that_is_opened_again() {
    simulate(8, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = open(&server, keeping(4));
        let client = sim.client(1, reconnecting()).await.unwrap();
        let mut early = client.subscribe_to(every()).await.unwrap();
        client.list().await.unwrap();
        for version in 1..=2 {
            publish(&server, &mut publisher, version, 1000).await;
        }
        drop(publisher);
        let mut publisher = server.publisher_with(topic("t"), Some(Epoch(4)), keeping(4)).unwrap();
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

/// Goal: a server that is started again with the same versions under the same epoch goes on with its readers: what they
/// have is not sent again, and nothing is missed.
/// Method: publish everything again, before the reader is back or after; with a window that is full.
#[test]
fn a_server_that_publishes_the_same_again() {
    for wait in [Duration::ZERO, Duration::from_secs(10)] {
        simulate(9, async |sim| {
            let server = sim.server(server_config());
            let options = TopicOptions { when_full: WhenFull::Block, ..keeping(4) };
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
            eventually("version 4 has come", || server.stats().committed == 4).await;
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
                // Version 6 is not acknowledged: it comes again.
                drop(reader);
                let mut again = client.subscribe_to(request).await.unwrap();
                assert_eq!((next(&mut again).await, next(&mut again).await), (6, 7));
            };
            tokio::join!(publishing, reading);
        });
    }
}

/// Goal: mode `every` is never preempted.
/// Method: ask for both, and publish faster than the path carries.
#[test]
fn every_is_not_preempted() {
    simulate(10, async |sim| {
        let server = sim.server(server_config());
        let delay = Duration::from_millis(20);
        sim.net.set_path(Path { delay: delay..=delay, ..Path::default() });
        let mut publisher = open(&server, keeping(10));
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

/// Goal: two readers of one name are one reader: the second takes the place of the first, which is told.
/// Method: both at once, on connections of their own, in the middle of a version.
#[test]
fn a_name_that_is_taken_over() {
    simulate(11, async |sim| {
        let server = sim.server(server_config());
        let delay = Duration::from_millis(20);
        sim.net.set_path(Path { delay: delay..=delay, ..Path::default() });
        let options = TopicOptions { when_full: WhenFull::Block, ..keeping(3) };
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
        let once = std::future::poll_fn(|cx| Poll::Ready(publishing.as_mut().poll(cx).is_ready())).await;
        assert!(once, "version 1 is acknowledged, and nobody but the second reader counts");
    });
}

/// Goal: a reader that waits for the next version of a topic that exists waits without bound; one of a topic that does not
/// is told.
/// Method: begin behind everything, and publish five minutes later.
#[test]
fn waiting_for_the_next_version() {
    simulate(12, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = open(&server, keeping(3));
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
