//! Withdrawn versions; withdrawn, ended and expired topics; commits, releases and held snapshots.

use super::*;
use tokio::time::timeout;

/// Goal: no transfer of a withdrawn version begins; active ones finish.
/// Method: withdraw a version during its transfer, the newest one, and one between others.
#[test]
fn no_transfer_of_a_withdrawn_version_begins() {
    simulate(4, async |sim| {
        let server = sim.server(server_config());
        slow_path(&sim);
        let mut publisher = open(&server, retaining(10));
        let client = sim.client(1, client_config()).await.unwrap();
        let mut running = client.subscribe(&topic("t")).await.unwrap();
        client.list().await.unwrap();
        let mut one = publish(&server, &mut publisher, 1, 1 << 20).await;
        wait_for_transfer(&running, 1).await;
        one.withdraw();
        one.withdraw();
        assert_eq!(client.list().await.unwrap(), [], "no version is published");
        assert_eq!(next(&mut running).await, (1, 0));
        assert!(one.committed(1, Duration::from_secs(1)).await);
        eventually("version 1 is released", || server.stats().staged_bytes == 0).await;

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

/// Goal: a withdrawn topic ends for all subscribers, also for one that is receiving a version, after its transfer. The
/// name is free: later subscribers find no topic, or the new one.
/// Method: withdraw the topic, and publish it again later.
#[test]
fn a_withdrawn_topic_ends_for_all_subscribers() {
    simulate(5, async |sim| {
        let server = sim.server(server_config());
        slow_path(&sim);
        let mut publisher = open(&server, retaining(3));
        let client = sim.client(1, client_config()).await.unwrap();
        let mut receiving = client
            .subscribe_to(Request::latest(topic("t")).from(Start::Next))
            .await
            .unwrap();
        client.list().await.unwrap();
        publish(&server, &mut publisher, 1, 1000).await;
        assert_eq!(next(&mut receiving).await, (1, 0));
        let mut every = client.subscribe_to(Request::every(topic("t")).window(1)).await.unwrap();
        assert_eq!(next(&mut every).await.0, 1);
        publish(&server, &mut publisher, 2, 1 << 20).await;
        wait_for_transfer(&receiving, 2).await;
        publisher.withdraw();
        assert_eq!(client.list().await.unwrap(), []);
        assert_eq!(
            end_reason(&mut every).await,
            EndReason::Withdrawn,
            "its transfer of version 2 had not begun"
        );
        assert_eq!(next(&mut receiving).await, (2, 0), "active transfers finish");
        assert_eq!(end_reason(&mut receiving).await, EndReason::Withdrawn);
        eventually("all versions are released", || server.stats().staged_bytes == 0).await;

        let mut late = client.subscribe(&topic("t")).await.unwrap();
        let subscribed = sim.elapsed();
        assert!(matches!(late.next().await.unwrap_err(), SubscriptionError::NotFound { .. }));
        assert!(sim.elapsed() - subscribed >= Duration::from_secs(10));
        let mut later = client.subscribe(&topic("t")).await.unwrap();
        let mut publisher = server.publisher(topic("t")).unwrap();
        publish(&server, &mut publisher, 1, 1000).await;
        assert_eq!(next(&mut later).await, (1, 0));
    });
}

/// Goal: the end of a topic comes after all requested versions: for readers in mode `every` after all retained ones.
/// Method: end it while a reader is far behind, and subscribe afterwards.
#[test]
fn the_end_of_a_topic_comes_after_all_versions() {
    simulate(6, async |sim| {
        let server = sim.server(server_config());
        slow_path(&sim);
        let mut publisher = open(&server, retaining(8));
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

/// Goal: a topic without publishes ends after `expire_after`, and not before; subscriber and publisher get the reason.
/// A later publisher is not bound by the options of an earlier one.
/// Method: publish in time, then no more; open the topic again, with and without expiry.
#[test]
fn a_topic_without_publishes_expires() {
    simulate(7, async |sim| {
        let server = sim.server(server_config());
        let after = Duration::from_secs(20);
        let expiring = TopicOptions { expire_after: Some(after), ..retaining(3) };
        let mut publisher = open(&server, expiring.clone());
        let client = sim.client(1, client_config()).await.unwrap();
        let mut subscription = client.subscribe(&topic("t")).await.unwrap();
        for version in 1..=3 {
            sleep(after - Duration::from_secs(1)).await;
            publish(&server, &mut publisher, version, 1000).await;
            if version == 1 {
                drop(subscription); // Its wait for the topic has timed out after ten seconds.
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

        // The topic's name is free, although its first publisher still exists.
        let mut second = open(&server, expiring);
        publish(&server, &mut second, 1, 1000).await;
        drop((publisher, second));
        // In the same epoch, of which version 1 is retained, numbers continue.
        let mut third = open(&server, retaining(3));
        publish(&server, &mut third, 2, 1000).await;
        sleep(Duration::from_secs(100)).await;
        assert_eq!(client.list().await.unwrap().len(), 1, "the third publisher has no expiry");
        publish(&server, &mut third, 3, 1000).await;
        let mut subscription = client.subscribe(&topic("t")).await.unwrap();
        assert_eq!(next(&mut subscription).await.0, 3);
    });
}

/// Goal: a cancelled publish leaves no version, no used number and no memory.
/// Method: drop it while it waits for a reader; then publish another version.
#[test]
fn a_cancelled_publish_leaves_nothing() {
    simulate(8, async |sim| {
        let server = sim.server(server_config());
        let options = TopicOptions { when_full: WhenFull::Block, ..retaining(1) };
        let mut publisher = open(&server, options);
        let client = sim.client(1, client_config()).await.unwrap();
        let mut reader = client.subscribe_to(Request::every(topic("t"))).await.unwrap();
        client.list().await.unwrap();
        publish(&server, &mut publisher, 1, 1000).await;
        assert_eq!(next(&mut reader).await.0, 1);
        for _ in 0..3 {
            let staged = tensors::stage(&server, vec![tensors::noise("noise", 1 << 20)], 99);
            let publishing = publisher.publish(staged, tensors::metadata(99));
            assert!(timeout(Duration::from_secs(20), publishing).await.is_err());
        }
        assert_eq!(client.list().await.unwrap()[0].id.version, Version(1));
        assert!(server.stats().staged_bytes < 10_000);
        reader.acknowledge();
        publish(&server, &mut publisher, 2, 1000).await;
        assert_eq!(next(&mut reader).await.0, 2);
    });
}

/// Goal: the commits of each version are counted over all consumers; the memory of a staged version's producer is
/// released at once.
/// Method: three clients, one of which is late; then wait for another commit of a version that has been replaced.
#[test]
fn staged_tensors_are_released_at_once() {
    simulate(9, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = open(&server, retaining(1));
        let mut clients = vec![];
        for number in 1..4 {
            clients.push(sim.client(number, client_config()).await.unwrap());
        }
        let mut one = clients[0].subscribe(&topic("t")).await.unwrap();
        let mut two = clients[1].subscribe_to(Request::every(topic("t"))).await.unwrap();
        clients[1].list().await.unwrap();
        let mut first = publish(&server, &mut publisher, 1, 1000).await;
        assert!(first.is_released() && first.released(Duration::ZERO).await);
        assert!(first.committed(2, Duration::from_secs(1)).await);
        assert!(!first.committed(3, Duration::from_secs(60)).await, "a subscriber may still come");
        let mut three = clients[2].subscribe(&topic("t")).await.unwrap();
        assert!(first.committed(3, Duration::from_secs(1)).await);
        for subscription in [&mut one, &mut two, &mut three] {
            assert_eq!(next(subscription).await.0, 1);
        }
        two.acknowledge();
        publish(&server, &mut publisher, 2, 1000).await;
        let began = sim.elapsed();
        assert!(first.committed(3, Duration::from_secs(60)).await, "the count stays");
        assert!(!first.committed(4, Duration::from_secs(60)).await);
        assert!(
            sim.elapsed() - began < Duration::from_secs(1),
            "a replaced version can no longer be committed"
        );
        assert_eq!(first.committed_count(), 3);
    });
}

/// Goal: topics and their publishers are independent: a publisher that waits does not delay others.
/// Method: a publisher that is blocked by a reader, and one whose topic is read by the same client.
#[test]
fn publishers_do_not_wait_for_each_other() {
    simulate(10, async |sim| {
        let server =
            sim.server(tensor_relay_server::Config { codec: CodecId::Zstd.into(), ..server_config() });
        let options = TopicOptions { when_full: WhenFull::Block, ..retaining(1) };
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
        let free_publishing = async {
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
        let (blocked, free) = tokio::join!(blocking, free_publishing);
        assert!(free < Duration::from_secs(2) && blocked > Duration::from_secs(30), "{free:?} {blocked:?}");
        assert_eq!(next(&mut sleeper).await.0, 2);
    });
}

/// Goal: a user who calls `next` with a short timeout gets the error for holding too many snapshots after
/// `hold_timeout`, too; and `holding_limit_check` reports it at once.
/// Method: hold one snapshot, with a limit of one; call `next` with a timeout of a tenth of a second.
#[test]
fn polling_does_not_extend_the_hold_timeout() {
    simulate(12, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = open(&server, retaining(1));
        let (hold_timeout, poll) = (Duration::from_secs(3), Duration::from_millis(100));
        let config = tensor_relay_client::Config { versions_held_max: 1, hold_timeout, ..client_config() };
        let client = sim.client(1, config).await.unwrap();
        let mut subscription = client.subscribe(&topic("t")).await.unwrap();
        let check = subscription.holding_limit_check();
        publish(&server, &mut publisher, 1, 1000).await;
        let _held = subscription.next().await.unwrap();
        assert!(
            timeout(poll, subscription.next()).await.is_err() && check(poll).is_none(),
            "no version is held back"
        );
        publish(&server, &mut publisher, 2, 1000).await;
        eventually("version 2 is held back", || check(poll).is_some()).await;
        for _ in 0..2 {
            let began = sim.elapsed();
            let error = loop {
                if let Ok(outcome) = timeout(poll, subscription.next()).await {
                    break outcome.unwrap_err();
                }
            };
            assert!(matches!(error, SubscriptionError::HoldingTooMany { timeout_ms: 3_000, .. }), "{error}");
            let waited = sim.elapsed() - began;
            assert!(waited >= hold_timeout && waited < hold_timeout + poll, "{waited:?}");
        }
    });
}

/// Goal: a user who holds the maximum number of snapshots gets an error that names them, and can continue after
/// dropping one: in mode `every` without a gap, in mode `latest` with a count of skipped versions. A slice of a tensor
/// counts like its snapshot.
/// Method: hold two snapshots, with a limit of two; request the next; drop one; request it again.
#[test]
fn holding_too_many_snapshots_is_an_error() {
    for every in [true, false] {
        simulate(11, async |sim| {
            let server = sim.server(server_config());
            let mut publisher = open(&server, retaining(10));
            let hold_timeout = Duration::from_secs(3);
            let device = None; // The test holds a slice of host memory.
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
                let began = sim.elapsed();
                let error = subscription.next().await.unwrap_err();
                let SubscriptionError::HoldingTooMany { held, max: 2, timeout_ms: 3_000, .. } = &error else {
                    panic!("{error}")
                };
                assert_eq!(held[..], [Version(1), Version(2)]);
                assert!(!error.is_final() && error.to_string().contains("versions 1, 2"), "{error}");
                let waited = sim.elapsed() - began;
                assert!(waited >= hold_timeout && waited < hold_timeout + Duration::from_millis(10));
            }
            // Drop the first snapshot's slice while `next` waits.
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
