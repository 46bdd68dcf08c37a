//! What a publisher may rely on: what is kept, who is waited for, what a version's end looks like from both sides.

use std::time::Duration;
use tensor_relay_client::{EndReason, Request, Start, Subscription, SubscriptionError, Version};
use tensor_relay_protocol::{CodecId, Epoch};
use tensor_relay_server::{Keep, PublishError, Publisher, Server, TopicOptions, WhenFull};
use tensor_relay_tests::{
    pair::{
        Sim, client_config, eventually, keeping, publish, reconnecting, seeds, server_config, simulate, topic,
    },
    simnet::Path,
    tensors,
};
use tokio::time::sleep;

fn open(server: &Server, options: TopicOptions) -> Publisher {
    server.publisher_with(topic("t"), Some(Epoch(3)), options).unwrap()
}

/// A slow path: four chunks for each round trip of 40 ms, so a MiB takes 160 ms.
fn slow_path(sim: &Sim) {
    let delay = Duration::from_millis(20);
    sim.net.set_path(Path { delay: delay..=delay, ..Path::default() });
}

async fn next(subscription: &mut Subscription) -> (u64, u64) {
    let snapshot = subscription.next().await.unwrap();
    tensors::check(&snapshot);
    (snapshot.id().version.0, snapshot.skipped())
}

async fn end_reason(subscription: &mut Subscription) -> EndReason {
    match subscription.next().await {
        Err(SubscriptionError::Ended { reason, .. }) => reason,
        other => panic!("an end was expected: {:?}", other.map(|snapshot| snapshot.id().clone())),
    }
}

async fn runs(subscription: &Subscription, version: u64) {
    let has_begun = || {
        let progress = subscription.progress();
        progress.version == version && progress.verified_bytes > 0
    };
    eventually("the transfer runs", has_begun).await;
}

/// Goal: what is retained is what late readers get: as many versions and as many bytes as the publisher said, and the
/// newest in any case.
/// Method: bounds of both kinds; look at memory, and at a reader that comes late.
#[test]
fn what_is_kept() {
    let keep = |versions, bytes| Keep { versions, bytes };
    for (keep, first) in [
        (keep(0, u64::MAX), 6),
        (keep(1, u64::MAX), 6),
        (keep(3, u64::MAX), 4),
        (keep(100, u64::MAX), 1),
        (keep(100, 4 * 4096), 3),
        (keep(100, 4 * 4096 - 1), 4),
        (keep(100, 0), 6),
    ] {
        simulate(1, async |sim| {
            let server = sim.server(server_config());
            let mut publisher = open(&server, TopicOptions { keep, ..TopicOptions::default() });
            for version in 1..=6 {
                publish(&server, &mut publisher, version, 4096).await;
            }
            assert_eq!(server.stats().staged_bytes, (7 - first) * 4096, "{keep:?}");
            let client = sim.client(1, client_config()).await.unwrap();
            let request = Request::every(topic("t")).window(10);
            let mut every = client.subscribe_to(request).await.unwrap();
            for version in first..=6 {
                assert_eq!(next(&mut every).await.0, version, "{keep:?}");
            }
            let mut latest = client.subscribe(&topic("t")).await.unwrap();
            assert_eq!(next(&mut latest).await, (6, 0));
        });
    }
}

/// Goal: a subscriber to the newest never waits for old versions and never makes the publisher wait: versions rise, and
/// every one that was not delivered is counted, exactly.
/// Method: publish ten times as fast as the path carries, to a prompt user and a slow one, with and without preemption.
#[test]
fn latest_behind_a_fast_publisher() {
    for seed in seeds(6) {
        simulate(seed, async |sim| {
            const VERSIONS: u64 = 60;
            let server = sim.server(server_config());
            slow_path(&sim);
            let mut publisher = open(&server, keeping(1 + seed as u32 % 3));
            let client = sim.client(1, client_config()).await.unwrap();
            let request = Request::latest(topic("t"));
            let mut prompt = client.subscribe_to(request.clone()).await.unwrap();
            let mut preempting = client.subscribe_to(request.clone().preempt(true)).await.unwrap();
            let mut slow = client.subscribe_to(request).await.unwrap();
            client.list().await.unwrap();
            let publishing = async {
                let began = sim.elapsed();
                for version in 1..=VERSIONS {
                    publish(&server, &mut publisher, version, 1 << 20).await;
                    sleep(Duration::from_millis(if version % 15 == 0 { 1_000 } else { 16 })).await;
                }
                assert!(sim.elapsed() - began < Duration::from_secs(6), "nobody is waited for");
            };
            let follow = async |subscription: &mut Subscription, pause_ms| {
                let (mut last, mut seen) = (0, 0);
                while last < VERSIONS {
                    let (version, skipped) = next(subscription).await;
                    assert_eq!(version, last + 1 + skipped);
                    (last, seen) = (version, seen + 1);
                    sleep(Duration::from_millis(pause_ms)).await;
                }
                seen
            };
            let ((), prompt, preempting, slow) = tokio::join!(
                publishing,
                follow(&mut prompt, 0),
                follow(&mut preempting, 0),
                follow(&mut slow, 700)
            );
            assert!((8..40).contains(&prompt), "{prompt} versions");
            assert!((4..=prompt).contains(&preempting), "{preempting} of {prompt} versions");
            assert!((3..=prompt).contains(&slow), "{slow} of {prompt} versions");
            let server_committed = server.stats().committed;
            assert!(server_committed >= prompt + preempting + slow, "{server_committed}");
        });
    }
}

/// Goal: who does not want to wait for old versions is given the newest at once, whenever it comes: also in the moment
/// when the old one is complete.
/// Method: publish the second version at every millisecond of the first one's way.
#[test]
fn a_newer_version_at_any_moment() {
    for moment in 1..seeds(140).end {
        simulate(moment, async |sim| {
            let server = sim.server(server_config());
            slow_path(&sim);
            let mut publisher = open(&server, keeping(1));
            let client = sim.client(1, client_config()).await.unwrap();
            let request = Request::latest(topic("t")).preempt(true);
            let mut subscription = client.subscribe_to(request).await.unwrap();
            client.list().await.unwrap();
            publish(&server, &mut publisher, 1, 300_000).await;
            sleep(Duration::from_millis(moment)).await;
            publish(&server, &mut publisher, 2, 1000).await;
            let published = sim.elapsed();
            let (mut version, mut skipped) = next(&mut subscription).await;
            if version == 1 {
                assert_eq!(skipped, 0);
                (version, skipped) = next(&mut subscription).await;
                skipped += 1;
            }
            assert_eq!((version, skipped), (2, 1));
            // Given up, answered, announced, sent: some round trips of a lane that has just begun.
            let took = sim.elapsed() - published;
            assert!(took < Duration::from_millis(300), "{took:?} at {moment} ms");
            publish(&server, &mut publisher, 3, 100_000).await;
            assert_eq!(next(&mut subscription).await, (3, 0));
            assert_eq!(server.stats().sessions, 1);
        });
    }
}

/// Goal: a version that left retention may be finished for as long as the publisher said; then those who are still at it
/// are cut off, hear of it, and get the next one. The session and other subscriptions live on.
/// Method: a version that takes longer than that, replaced at once; in both modes.
#[test]
fn who_is_too_slow_for_a_version_that_left() {
    for every in [false, true] {
        simulate(2, async |sim| {
            let server = sim.server(server_config());
            slow_path(&sim);
            let options = TopicOptions {
                release_timeout: Some(Duration::from_millis(500)),
                publish_timeout: Duration::from_secs(60),
                ..keeping(1)
            };
            let mut publisher = open(&server, options);
            let client = sim.client(1, client_config()).await.unwrap();
            let request = if every { Request::every(topic("t")) } else { Request::latest(topic("t")) };
            let mut subscription = client.subscribe_to(request).await.unwrap();
            client.list().await.unwrap();
            publish(&server, &mut publisher, 1, 1000).await;
            assert_eq!(next(&mut subscription).await, (1, 0));
            subscription.acknowledge();
            let mut large = publish(&server, &mut publisher, 2, 8 << 20).await;
            runs(&subscription, 2).await;
            if every {
                // A reader in mode `every` would be waited for; but what is taken back is taken back.
                large.withdraw();
            }
            publish(&server, &mut publisher, 3, 1000).await;
            let replaced = sim.elapsed();
            if every {
                let Err(SubscriptionError::Gap(gap)) = subscription.next().await else { panic!("a gap") };
                assert_eq!((gap.missing(), gap.found.version), (Some(1), Version(3)));
            }
            assert_eq!(next(&mut subscription).await, (3, u64::from(!every)));
            let took = sim.elapsed() - replaced;
            assert!(took > Duration::from_millis(500) && took < Duration::from_millis(700), "{took:?}");
            assert!(!large.committed(1, Duration::from_secs(60)).await);
            eventually("version 2 is let go", || server.stats().staged_bytes < 10_000).await;
            assert_eq!(server.stats().evicted, 0);
        });
    }
}

/// Goal: the cut may come at any moment, also when the version is complete and its commit is on the way.
/// Method: release timeouts of every length that the version needs.
#[test]
fn a_cut_at_any_moment() {
    for moment in 0..seeds(140).end {
        simulate(moment, async |sim| {
            let server = sim.server(server_config());
            slow_path(&sim);
            let release_timeout = Some(Duration::from_millis(moment));
            let mut publisher = open(&server, TopicOptions { release_timeout, ..keeping(1) });
            let client = sim.client(1, client_config()).await.unwrap();
            let mut subscription = client.subscribe(&topic("t")).await.unwrap();
            client.list().await.unwrap();
            publish(&server, &mut publisher, 1, 300_000).await;
            sleep(Duration::from_millis(1)).await;
            publish(&server, &mut publisher, 2, 1000).await;
            let (mut version, mut skipped) = next(&mut subscription).await;
            if version == 1 {
                (version, skipped) = next(&mut subscription).await;
                skipped += 1;
            }
            assert_eq!((version, skipped), (2, 1));
            publish(&server, &mut publisher, 3, 100_000).await;
            assert_eq!(next(&mut subscription).await, (3, 0));
            assert_eq!((server.stats().sessions, server.stats().evicted), (1, 0));
        });
    }
}

/// Goal: a client that is gone while a version is taken from it costs no processor time and no memory beyond deadlines.
/// Method: cut its way, and let the version leave. Time would stand still if anything were busy.
#[test]
fn a_cut_that_nobody_answers() {
    simulate(3, async |sim| {
        let server = sim.server(server_config());
        slow_path(&sim);
        let release_timeout = Some(Duration::from_millis(100));
        let mut publisher = open(&server, TopicOptions { release_timeout, ..keeping(1) });
        let client = sim.client(1, client_config()).await.unwrap();
        let subscription = client.subscribe(&topic("t")).await.unwrap();
        client.list().await.unwrap();
        publish(&server, &mut publisher, 1, 8 << 20).await;
        runs(&subscription, 1).await;
        sim.cut(1);
        publish(&server, &mut publisher, 2, 1000).await;
        sleep(Duration::from_secs(15)).await;
        eventually("all is let go", || server.stats().staged_bytes < 10_000).await;
        assert_eq!(server.stats().sessions, 0);
    });
}

/// Goal: a version that is taken back is never begun for anybody again; who is at it may finish.
/// Method: take back the newest, one in the middle, and one that is on its way.
#[test]
fn versions_taken_back() {
    simulate(4, async |sim| {
        let server = sim.server(server_config());
        slow_path(&sim);
        let mut publisher = open(&server, keeping(10));
        let client = sim.client(1, client_config()).await.unwrap();
        let mut running = client.subscribe(&topic("t")).await.unwrap();
        client.list().await.unwrap();
        let mut one = publish(&server, &mut publisher, 1, 1 << 20).await;
        runs(&running, 1).await;
        one.withdraw();
        one.withdraw();
        assert_eq!(client.list().await.unwrap(), [], "there is nothing on offer");
        assert_eq!(next(&mut running).await, (1, 0));
        assert!(one.committed(1, Duration::from_secs(1)).await);
        eventually("it is let go", || server.stats().staged_bytes == 0).await;

        let mut publications = vec![];
        for version in 2..=6 {
            publications.push(publish(&server, &mut publisher, version, 1000).await);
        }
        publications[1].withdraw(); // 3
        publications[4].withdraw(); // 6
        assert_eq!(client.list().await.unwrap()[0].id.version, Version(5));
        let mut every = client.subscribe_to(Request::every(topic("t")).window(9)).await.unwrap();
        assert_eq!(next(&mut every).await.0, 2);
        let Err(SubscriptionError::Gap(gap)) = every.next().await else { panic!("a gap") };
        assert_eq!((gap.after.as_ref().unwrap().version, gap.found.version), (Version(2), Version(4)));
        assert_eq!((next(&mut every).await.0, next(&mut every).await.0), (4, 5));
        publish(&server, &mut publisher, 7, 1000).await;
        let Err(SubscriptionError::Gap(gap)) = every.next().await else { panic!("a gap") };
        assert_eq!((gap.missing(), gap.found.version), (Some(1), Version(7)));
        assert_eq!(next(&mut every).await.0, 7);
    });
}

/// Goal: a topic that is taken back ends for everybody: idle, in the middle of a version, and in mode every; its name is
/// free, and who comes later finds the new one or nothing.
/// Method: withdraw the publisher, and open the name again.
#[test]
fn a_topic_taken_back() {
    simulate(5, async |sim| {
        let server = sim.server(server_config());
        slow_path(&sim);
        let mut publisher = open(&server, keeping(3));
        let client = sim.client(1, client_config()).await.unwrap();
        let mut idle = client
            .subscribe_to(Request::latest(topic("t")).from(Start::Next))
            .await
            .unwrap();
        client.list().await.unwrap();
        publish(&server, &mut publisher, 1, 1000).await;
        assert_eq!(next(&mut idle).await, (1, 0));
        let mut every = client.subscribe_to(Request::every(topic("t")).window(1)).await.unwrap();
        assert_eq!(next(&mut every).await.0, 1);
        publish(&server, &mut publisher, 2, 1 << 20).await;
        runs(&idle, 2).await;
        publisher.withdraw();
        assert_eq!(client.list().await.unwrap(), []);
        assert_eq!(end_reason(&mut every).await, EndReason::Withdrawn, "version 2 was not begun for it");
        assert_eq!(next(&mut idle).await, (2, 0), "what is under way is finished");
        assert_eq!(end_reason(&mut idle).await, EndReason::Withdrawn);
        eventually("nothing is kept", || server.stats().staged_bytes == 0).await;

        let mut late = client.subscribe(&topic("t")).await.unwrap();
        let asked = sim.elapsed();
        assert!(matches!(late.next().await.unwrap_err(), SubscriptionError::NotFound { .. }));
        assert!(sim.elapsed() - asked >= Duration::from_secs(10));
        let mut later = client.subscribe(&topic("t")).await.unwrap();
        let mut publisher = server.publisher(topic("t")).unwrap();
        publish(&server, &mut publisher, 1, 1000).await;
        assert_eq!(next(&mut later).await, (1, 0));
    });
}

/// Goal: a topic that ends gives everybody what they asked for first: readers of every version all of them.
/// Method: end it while a reader is far behind, and subscribe afterwards.
#[test]
fn an_end_comes_last() {
    simulate(6, async |sim| {
        let server = sim.server(server_config());
        slow_path(&sim);
        let mut publisher = open(&server, keeping(8));
        let client = sim.client(1, client_config()).await.unwrap();
        let mut behind = client.subscribe_to(Request::every(topic("t")).window(2)).await.unwrap();
        client.list().await.unwrap();
        for version in 1..=8 {
            publish(&server, &mut publisher, version, 100_000).await;
        }
        publisher.end();
        for version in 1..=8 {
            sleep(Duration::from_secs(1)).await;
            assert_eq!(next(&mut behind).await.0, version);
        }
        assert_eq!(end_reason(&mut behind).await, EndReason::TopicEnded);
        let mut latest = client.subscribe(&topic("t")).await.unwrap();
        assert_eq!(next(&mut latest).await, (8, 0));
        assert_eq!(end_reason(&mut latest).await, EndReason::TopicEnded);
        let mut next_one = client.subscribe_to(Request::every(topic("t")).from(Start::Next)).await.unwrap();
        assert_eq!(end_reason(&mut next_one).await, EndReason::TopicEnded);
    });
}

/// Goal: a topic without publishes ends after its time, is told so at both ends, and not before; a publisher that follows
/// is not bound by the options of the one before.
/// Method: publish in time, then not; open again, with and without.
#[test]
fn a_topic_that_expires() {
    simulate(7, async |sim| {
        let server = sim.server(server_config());
        let after = Duration::from_secs(20);
        let expiring = TopicOptions { expire_after: Some(after), ..keeping(3) };
        let mut publisher = open(&server, expiring.clone());
        let client = sim.client(1, client_config()).await.unwrap();
        let mut subscription = client.subscribe(&topic("t")).await.unwrap();
        for version in 1..=3 {
            sleep(after - Duration::from_secs(1)).await;
            publish(&server, &mut publisher, version, 1000).await;
            if version == 1 {
                drop(subscription); // Ten seconds for a topic to appear are over.
                subscription = client.subscribe(&topic("t")).await.unwrap();
            }
            assert_eq!(next(&mut subscription).await.0, version);
        }
        let last = sim.elapsed();
        assert_eq!(end_reason(&mut subscription).await, EndReason::Expired);
        let lived = sim.elapsed() - last;
        assert!(
            lived > after - Duration::from_secs(1) && lived < after + Duration::from_secs(1),
            "{lived:?}"
        );
        assert_eq!(client.list().await.unwrap(), []);
        let staged = tensors::stage(&server, vec![tensors::noise("noise", 10)], 4);
        let error = publisher.publish(staged, vec![]).await.unwrap_err();
        assert!(matches!(error, PublishError::Expired { expire_after_ms: 20_000, .. }), "{error}");
        assert_eq!(server.stats().staged_bytes, 0);

        // The name is free, though the handle is still there.
        let mut second = open(&server, expiring);
        publish(&server, &mut second, 1, 1000).await;
        drop((publisher, second));
        // In the same epoch, of which version 1 is retained: numbers go on.
        let mut third = open(&server, keeping(3));
        publish(&server, &mut third, 2, 1000).await;
        sleep(Duration::from_secs(100)).await;
        assert_eq!(client.list().await.unwrap().len(), 1, "the third publisher set no time");
        publish(&server, &mut third, 3, 1000).await;
        let mut subscription = client.subscribe(&topic("t")).await.unwrap();
        assert_eq!(next(&mut subscription).await.0, 3);
    });
}

/// Goal: a publish that is given up publishes nothing: no version, no number, no memory.
/// Method: drop it while it waits for a reader; then publish something else.
#[test]
fn a_publish_that_is_given_up() {
    simulate(8, async |sim| {
        let server = sim.server(server_config());
        let options = TopicOptions { when_full: WhenFull::Block, ..keeping(1) };
        let mut publisher = open(&server, options);
        let client = sim.client(1, client_config()).await.unwrap();
        let mut reader = client.subscribe_to(Request::every(topic("t"))).await.unwrap();
        client.list().await.unwrap();
        publish(&server, &mut publisher, 1, 1000).await;
        assert_eq!(next(&mut reader).await.0, 1);
        for _ in 0..3 {
            let staged = tensors::stage(&server, vec![tensors::noise("noise", 1 << 20)], 99);
            let publishing = publisher.publish(staged, tensors::metadata(99));
            assert!(tokio::time::timeout(Duration::from_secs(20), publishing).await.is_err());
        }
        assert_eq!(client.list().await.unwrap()[0].id.version, Version(1));
        assert!(server.stats().staged_bytes < 10_000);
        reader.acknowledge();
        publish(&server, &mut publisher, 2, 1000).await;
        assert_eq!(next(&mut reader).await.0, 2);
    });
}

/// Goal: commits are counted per version, from all subscribers; a staged version is released at once.
/// Method: three subscribers, one of which comes late; a version that nobody can commit any more.
#[test]
fn commits_and_releases() {
    simulate(9, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = open(&server, keeping(1));
        let client = sim.client(1, client_config()).await.unwrap();
        let mut one = client.subscribe(&topic("t")).await.unwrap();
        let mut two = client.subscribe_to(Request::every(topic("t"))).await.unwrap();
        client.list().await.unwrap();
        let mut first = publish(&server, &mut publisher, 1, 1000).await;
        assert!(first.is_released() && first.released(Duration::ZERO).await);
        assert!(first.committed(2, Duration::from_secs(1)).await);
        assert!(!first.committed(3, Duration::from_secs(60)).await, "a subscriber may still come");
        let mut three = client.subscribe(&topic("t")).await.unwrap();
        assert!(first.committed(3, Duration::from_secs(1)).await);
        for subscription in [&mut one, &mut two, &mut three] {
            assert_eq!(next(subscription).await.0, 1);
        }
        two.acknowledge();
        publish(&server, &mut publisher, 2, 1000).await;
        let asked = sim.elapsed();
        assert!(first.committed(3, Duration::from_secs(60)).await, "what was counted stays");
        assert!(!first.committed(4, Duration::from_secs(60)).await);
        assert!(sim.elapsed() - asked < Duration::from_secs(1), "nobody can commit it any more");
        assert_eq!(first.committed_count(), 3);
    });
}

/// Goal: topics and their publishers are independent: a publisher that waits holds up nobody else.
/// Method: one that is blocked by a reader, beside one whose topic is read by the same client.
#[test]
fn publishers_do_not_wait_for_each_other() {
    simulate(10, async |sim| {
        let server =
            sim.server(tensor_relay_server::Config { codec: CodecId::Zstd.into(), ..server_config() });
        let options = TopicOptions { when_full: WhenFull::Block, ..keeping(1) };
        let mut blocked = server.publisher_with(topic("blocked"), None, options.clone()).unwrap();
        let mut free = server.publisher_with(topic("free"), None, options).unwrap();
        let client = sim.client(1, client_config()).await.unwrap();
        let mut sleeper = client.subscribe_to(Request::every(topic("blocked"))).await.unwrap();
        let mut reader = client.subscribe_to(Request::every(topic("free"))).await.unwrap();
        client.list().await.unwrap();
        publish(&server, &mut blocked, 1, 100_000).await;
        let began = sim.elapsed();
        let blocking = async {
            publish(&server, &mut blocked, 2, 100_000).await;
            sim.elapsed() - began
        };
        let running = async {
            for version in 1..=50 {
                publish(&server, &mut free, version, 100_000).await;
                assert_eq!(next(&mut reader).await.0, version);
                reader.acknowledge();
            }
            let took = sim.elapsed() - began;
            sleep(Duration::from_secs(30)).await;
            assert_eq!(next(&mut sleeper).await.0, 1);
            sleeper.acknowledge();
            took
        };
        let (blocked, ran) = tokio::join!(blocking, running);
        assert!(ran < Duration::from_secs(2) && blocked > Duration::from_secs(30), "{ran:?} {blocked:?}");
        assert_eq!(next(&mut sleeper).await.0, 2);
    });
}

/// Goal: a user who holds as many snapshots as it may is told which, and goes on where it was when it drops one; in mode
/// every nothing is missed by that, in mode latest it is counted. A slice of a tensor counts like its snapshot.
/// Method: hold two of at most two; ask; drop; ask again.
#[test]
fn a_user_who_holds_too_many() {
    for every in [true, false] {
        simulate(11, async |sim| {
            let server = sim.server(server_config());
            let mut publisher = open(&server, keeping(10));
            let hold_timeout = Duration::from_secs(3);
            let device = None; // A slice of host memory is to be held.
            let config =
                tensor_relay_client::Config { versions_held_max: 2, hold_timeout, device, ..reconnecting() };
            let client = sim.client(1, config).await.unwrap();
            let request = if every { Request::every(topic("t")) } else { Request::latest(topic("t")) };
            let mut subscription = client.subscribe_to(request).await.unwrap();
            client.list().await.unwrap();
            publish(&server, &mut publisher, 1, 1000).await;
            let one = subscription.next().await.unwrap();
            publish(&server, &mut publisher, 2, 1000).await;
            let two = subscription.next().await.unwrap();
            for version in 3..=5 {
                publish(&server, &mut publisher, version, 1000).await;
            }
            let slice = one.tensor("noise").unwrap().slice(3..5);
            drop(one);
            for _ in 0..2 {
                let asked = sim.elapsed();
                let error = subscription.next().await.unwrap_err();
                let SubscriptionError::HoldingTooMany { held, max: 2, timeout_ms: 3_000, .. } = &error else {
                    panic!("{error}")
                };
                assert_eq!(held[..], [Version(1), Version(2)]);
                assert!(!error.is_final() && error.to_string().contains("versions 1, 2"), "{error}");
                let waited = sim.elapsed() - asked;
                assert!(waited >= hold_timeout && waited < hold_timeout + Duration::from_millis(10));
            }
            // One that is dropped while it is waited for.
            let dropping = async {
                sleep(Duration::from_secs(1)).await;
                drop(slice);
            };
            let (third, ()) = tokio::join!(subscription.next(), dropping);
            let third = third.unwrap();
            tensors::check(&third);
            tensors::check(&two);
            assert_eq!((third.id().version.0, third.skipped()), if every { (3, 0) } else { (5, 2) });
            drop((two, third));
            if every {
                assert_eq!((next(&mut subscription).await, next(&mut subscription).await), ((4, 0), (5, 0)));
            }
        });
    }
}
