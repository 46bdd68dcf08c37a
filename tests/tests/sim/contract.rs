//! The promises to publishers: which versions are retained, for which readers a publisher waits, and when versions are
//! released.

mod ends;

use crate::slow_path;
use std::time::Duration;
use tensor_relay_client::{EndReason, Request, Start, Subscription, SubscriptionError, Version};
use tensor_relay_protocol::{CodecId, Epoch};
use tensor_relay_server::{Keep, PublishError, Publisher, Server, TopicOptions, WhenFull};
use tensor_relay_tests::{
    pair::{
        client_config, eventually, publish, reconnecting, retaining, seeds, server_config, simulate, topic,
    },
    tensors,
};
use tokio::time::sleep;

fn open(server: &Server, options: TopicOptions) -> Publisher {
    server.publisher_with(topic("t"), Some(Epoch(3)), options).unwrap()
}

/// Receives the next version, and returns its number and that of skipped versions.
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

/// Waits until the transfer of `version` runs.
async fn wait_for_transfer(subscription: &Subscription, version: u64) {
    let has_begun = || {
        let progress = subscription.progress();
        progress.version == version && progress.verified_bytes > 0
    };
    eventually("the transfer runs", has_begun).await;
}

/// Goal: late readers receive exactly the retained versions: those within the publisher's bounds on number and bytes,
/// and always the newest.
/// Method: bounds of both kinds; check the server's memory, and what late readers receive.
#[test]
fn late_readers_get_the_retained_versions() {
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

/// Goal: a subscriber in mode `latest` never waits for old versions and never delays the publisher: versions rise, and
/// skipped ones are counted exactly.
/// Method: publish at ten times the path's rate, to a prompt user and a slow one, with and without preemption.
#[test]
fn latest_counts_skipped_versions() {
    for seed in seeds(6) {
        simulate(seed, async |sim| {
            const VERSIONS: u64 = 60;
            let server = sim.server(server_config());
            slow_path(&sim);
            let mut publisher = open(&server, retaining(1 + seed as u32 % 3));
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
                assert!(sim.elapsed() - began < Duration::from_secs(6), "the publisher does not wait");
            };
            let follow = async |subscription: &mut Subscription, pause_ms| {
                let (mut last, mut count) = (0, 0);
                while last < VERSIONS {
                    let (version, skipped) = next(subscription).await;
                    assert_eq!(version, last + 1 + skipped);
                    (last, count) = (version, count + 1);
                    sleep(Duration::from_millis(pause_ms)).await;
                }
                count
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

/// Goal: a preempting subscriber receives the newest version within a few round trips, whenever it is published: also
/// at the moment when the old one is complete.
/// Method: publish the second version at every millisecond of the first one's transfer.
#[test]
fn a_version_may_be_preempted_at_any_moment() {
    for moment in 1..seeds(140).end {
        simulate(moment, async |sim| {
            let server = sim.server(server_config());
            slow_path(&sim);
            let mut publisher = open(&server, retaining(1));
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
            // The preemption, its reply, the announcement and the transfer take some round trips.
            let took = sim.elapsed() - published;
            assert!(took < Duration::from_millis(300), "{took:?} at {moment} ms");
            publish(&server, &mut publisher, 3, 100_000).await;
            assert_eq!(next(&mut subscription).await, (3, 0));
            assert_eq!(server.stats().sessions, 1);
        });
    }
}

/// Goal: transfers of a version that has left retention may take `release_timeout`; then they are cut off, and their
/// subscribers are notified and receive the next version. No subscriber is evicted.
/// Method: in both modes, replace a version at once whose transfer takes longer.
#[test]
fn slow_transfers_of_a_replaced_version_are_cut_off() {
    for every in [false, true] {
        simulate(2, async |sim| {
            let server = sim.server(server_config());
            slow_path(&sim);
            let options = TopicOptions {
                release_timeout: Some(Duration::from_millis(500)),
                publish_timeout: Duration::from_secs(60),
                ..retaining(1)
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
            wait_for_transfer(&subscription, 2).await;
            if every {
                // The publisher would wait for a reader in mode `every`, but not if the version is withdrawn.
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
            eventually("version 2 is released", || server.stats().staged_bytes < 10_000).await;
            assert_eq!(server.stats().evicted, 0);
        });
    }
}

/// Goal: a transfer may be cut off at any moment, also when the version is complete and its commit is in flight.
/// Method: release timeouts of each millisecond of the transfer.
#[test]
fn a_transfer_may_be_cut_off_at_any_moment() {
    for moment in 0..seeds(140).end {
        simulate(moment, async |sim| {
            let server = sim.server(server_config());
            slow_path(&sim);
            let release_timeout = Some(Duration::from_millis(moment));
            let mut publisher = open(&server, TopicOptions { release_timeout, ..retaining(1) });
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

/// Goal: a client that is lost when its transfer is cut off costs no processor time, and no memory after its deadlines.
/// Method: cut the client's path, and replace the version. A busy loop would stop the simulated clock.
#[test]
fn cutting_off_a_lost_client_costs_nothing() {
    simulate(3, async |sim| {
        let server = sim.server(server_config());
        slow_path(&sim);
        let release_timeout = Some(Duration::from_millis(100));
        let mut publisher = open(&server, TopicOptions { release_timeout, ..retaining(1) });
        let client = sim.client(1, client_config()).await.unwrap();
        let subscription = client.subscribe(&topic("t")).await.unwrap();
        client.list().await.unwrap();
        publish(&server, &mut publisher, 1, 8 << 20).await;
        wait_for_transfer(&subscription, 1).await;
        sim.cut(1);
        publish(&server, &mut publisher, 2, 1000).await;
        sleep(Duration::from_secs(15)).await;
        eventually("version 1 is released", || server.stats().staged_bytes < 10_000).await;
        assert_eq!(server.stats().sessions, 0);
    });
}
