//! Outages that end a session, requests during an outage, and what is sent again after one.

use super::*;

/// Goal: a client that cannot reconnect ends after the reconnect timeout; the error has both reasons.
/// Method: cut the path; afterwards request a list, a subscription and a watch.
#[test]
fn a_client_ends_after_the_reconnect_timeout() {
    simulate(5, async |sim| {
        let server = sim.server(server_config());
        slow_path(&sim);
        let mut publisher = open(&server, 7);
        let (client, mut subscription) = follow(&sim).await;
        let mut watch = client.watch(&Glob::new("none").unwrap()).await.unwrap();
        publish(&server, &mut publisher, 1, BYTES).await;
        wait_until_verified(&subscription, 1, BYTES / 4).await;
        sim.cut(1);
        let cut = sim.elapsed();
        let error = subscription.next().await.unwrap_err();
        let took = sim.elapsed() - cut;
        let idle = Duration::from_millis(sim.tuning.idle_timeout_ms.into());
        let expected = idle + Duration::from_secs(60);
        assert!(
            took > expected - Duration::from_secs(4) && took < expected + Duration::from_secs(2),
            "{took:?}"
        );
        let SubscriptionError::Disconnected { source, .. } = &error else { panic!("{error}") };
        let ClientError::NotReconnected { lost, last: Some(_), timeout_ms: 60_000 } = &**source else {
            panic!("{source}")
        };
        assert!(matches!(**lost, ClientError::Lane(_)), "{lost}");
        assert!(error.is_final());
        assert_eq!(subscription.next().await.unwrap_err().to_string(), error.to_string());
        assert_eq!(watch.next().await, None);
        for error in [
            client.list().await.unwrap_err(),
            client.subscribe(&topic("t")).await.unwrap_err(),
            client.watch(&Glob::new("*").unwrap()).await.unwrap_err(),
        ] {
            assert!(matches!(error, ClientError::Ended(_)), "{error}");
        }
        assert_eq!(client.reconnects(), 0);
        client.close().await;
        eventually("the server has closed the session", || server.stats().sessions == 0).await;
    });
}

/// Goal: while another server answers at the address, the client keeps trying; the session ends after the reconnect
/// timeout, with an error that names the key. Method: a server with another key takes the address of the first, for ever
/// or for 20 s.
#[test]
fn another_key_after_a_restart_is_not_final() {
    simulate(6, async |sim| {
        let server = sim.server(server_config());
        let (client, mut subscription) = follow(&sim).await;
        publish(&server, &mut open(&server, 7), 1, 1000).await;
        subscription.next().await.unwrap();
        drop(server);
        let began = sim.elapsed();
        let imposter = sim.with_key_of(99).server_again(server_config()).await;
        sleep(Duration::from_secs(20)).await;
        drop(imposter);
        let server = sim.server_again(server_config()).await;
        publish(&server, &mut open(&server, 8), 1, 1000).await;
        assert_eq!(subscription.next().await.unwrap().id().epoch, Epoch(8));
        drop(server);
        let imposter = sim.with_key_of(99).server_again(server_config()).await;
        let error = subscription.next().await.unwrap_err();
        assert!(sim.elapsed() - began > Duration::from_secs(80), "{:?}", sim.elapsed() - began);
        let SubscriptionError::Disconnected { source, .. } = &error else { panic!("{error}") };
        let ClientError::NotReconnected { last: Some(last), .. } = &**source else { panic!("{source}") };
        assert!(matches!(**last, ClientError::Connect(ConnectError::WrongKey { .. })), "{last}");
        assert!(matches!(client.list().await.unwrap_err(), ClientError::Ended(_)));
        eventually("no session remains", || imposter.stats().sessions == 0).await;
    });
}

/// Goal: requests during an outage are sent over the next connection, except cancelled ones.
/// Method: subscribe, watch and list during an outage; cancel some of these requests, and some earlier ones.
#[test]
fn requests_during_an_outage_are_sent_after_it() {
    simulate(7, async |sim| {
        let server = sim.server(server_config());
        let mut publishers = vec![];
        for name in ["a", "b", "c"] {
            let mut publisher = server.publisher(topic(name)).unwrap();
            publish(&server, &mut publisher, 1, 1000).await;
            publishers.push(publisher);
        }
        let client = sim.client(1, reconnecting()).await.unwrap();
        let mut kept = client.subscribe(&topic("a")).await.unwrap();
        let dropped = client.subscribe(&topic("b")).await.unwrap();
        let unwatched = client.watch(&Glob::new("**").unwrap()).await.unwrap();
        tensors::check(&kept.next().await.unwrap());
        sim.cut(1);
        sleep(OUTAGE_DURATION).await;
        publish(&server, &mut publishers[0], 2, 1000).await;

        drop((dropped, unwatched));
        let mut new = client.subscribe(&topic("c")).await.unwrap();
        drop(client.subscribe(&topic("b")).await.unwrap());
        let mut watch = client.watch(&Glob::new("?").unwrap()).await.unwrap();
        drop(client.watch(&Glob::new("b").unwrap()).await.unwrap());
        let (listed, ()) = tokio::join!(client.list(), async {
            sleep(Duration::from_secs(1)).await;
            sim.mend(1);
        });
        let listed = listed.unwrap();
        assert!(listed.iter().map(|entry| entry.subscribers).eq([1, 0, 1]), "{listed:?}");
        tensors::check(&new.next().await.unwrap());
        let snapshot = kept.next().await.unwrap();
        assert_eq!((snapshot.id().version, snapshot.skipped()), (Version(2), 0));
        for name in ["a", "b", "c"] {
            assert_eq!(watch.next().await.unwrap(), topic(name));
        }
        assert_eq!(client.reconnects(), 1);
    });
}

/// Goal: nothing waits for ever for a version that is withdrawn during an outage. Method: cut the path in the middle of
/// a topic's only version, and withdraw it.
#[test]
fn a_version_withdrawn_during_an_outage_is_not_waited_for() {
    simulate(9, async |sim| {
        let server = sim.server(server_config());
        slow_path(&sim);
        let mut publisher = open(&server, 7);
        let publication = publish(&server, &mut publisher, 1, BYTES).await;
        let (_client, mut subscription) = follow(&sim).await;
        wait_until_verified(&subscription, 1, BYTES / 4).await;
        sim.cut(1);
        publication.withdraw();
        sleep(OUTAGE_DURATION).await;
        sim.mend(1);
        let error = subscription.next().await.unwrap_err();
        assert!(matches!(error, SubscriptionError::NotFound { .. }), "{error}");
    });
}

/// Goal: a client that is closed or dropped during an outage ends at once.
/// Method: close or drop the client while it tries to reconnect.
#[test]
fn closing_during_an_outage_ends_at_once() {
    for close in [true, false] {
        simulate(8, async |sim| {
            let server = sim.server(server_config());
            let (client, mut subscription) = follow(&sim).await;
            publish(&server, &mut open(&server, 7), 1, 1000).await;
            subscription.next().await.unwrap();
            sim.cut(1);
            sleep(OUTAGE_DURATION).await;
            let began = sim.elapsed();
            match close {
                true => client.close().await,
                false => drop(client),
            }
            let error = subscription.next().await.unwrap_err();
            let SubscriptionError::Disconnected { source, .. } = &error else { panic!("{error}") };
            assert!(source.to_string().contains("closed"), "{source}");
            assert!(sim.elapsed() - began < Duration::from_millis(100), "{:?}", sim.elapsed() - began);
        });
    }
}

/// Goal: encoded chunks survive a lost connection as raw chunks do, also those that are being decoded.
/// Method: tensors that compress, and cuts at random moments; decoding on the caller's thread and on workers.
#[test]
fn encoded_chunks_survive_lost_connections() {
    for seed in seeds(20) {
        simulate(seed, async |sim| {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            let config = tensor_relay_server::Config { codec: CodecId::Zstd.into(), ..server_config() };
            let server = sim.server(config);
            slow_path(&sim);
            let mut publisher = open(&server, 7);
            let workers = [Workers::Inline, Workers::Threads][(seed % 2) as usize];
            let config = tensor_relay_client::Config { workers, ..reconnecting() };
            let client = sim.client(1, config).await.unwrap();
            let mut subscription = client.subscribe(&topic("t")).await.unwrap();
            client.list().await.unwrap();
            let specs = vec![
                tensors::smooth("a", 3 << 20),
                tensors::noise("b", 1 << 20),
                tensors::smooth("c", 300_000),
            ];
            for version in 1..=2 {
                let staged = tensors::stage(&server, specs.clone(), version);
                publisher.publish(staged, tensors::metadata(version)).await.unwrap();
                sleep(Duration::from_millis(rng.random_range(0..700))).await;
                sim.cut(1);
                sleep(OUTAGE_DURATION).await;
                sim.mend(1);
                let snapshot = subscription.next().await.unwrap();
                tensors::check(&snapshot);
                assert_eq!(snapshot.id().version, Version(version));
                assert!(snapshot.receipt().wire_bytes < 3 << 20, "{:?}", snapshot.receipt());
            }
        });
    }
}

/// Goal: a manifest that the client holds is not sent again over another connection.
/// Method: a manifest almost as large as the payload; lose the connection between versions and during one; count bytes.
#[test]
fn manifests_are_not_sent_twice() {
    simulate(9, async |sim| {
        // Raw: a codec would compress the padding after each tensor.
        let server =
            sim.server(tensor_relay_server::Config { codec: CodecId::Raw.into(), ..server_config() });
        slow_path(&sim);
        let mut publisher = open(&server, 7);
        let (client, mut subscription) = follow(&sim).await;
        let name = |number| format!("{number:0>200}");
        let specs: Vec<_> = (0..4_000).map(|number| tensors::noise(&name(number), 150)).collect();
        let mut sent = vec![];
        for version in 1..=4 {
            let before = sim.server_sent();
            let staged = tensors::stage(&server, specs.clone(), version);
            assert!(staged.manifest().encoded().len() > 800_000);
            publisher.publish(staged, tensors::metadata(version)).await.unwrap();
            if version == 3 {
                wait_until_verified(&subscription, 3, 200_000).await;
                sim.cut(1);
                sleep(OUTAGE_DURATION).await;
                sim.mend(1);
            }
            let snapshot = subscription.next().await.unwrap();
            tensors::check(&snapshot);
            assert_eq!(u64::from(snapshot.receipt().resumed), u64::from(version == 3));
            sent.push(sim.server_sent() - before);
            if version == 1 {
                sim.cut(1);
                sleep(OUTAGE_DURATION).await;
                sim.mend(1);
                eventually("the client is connected again", || client.reconnects() == 1).await;
            }
        }
        let payload = 4_000 * 256;
        assert!(sent[0] > payload + 800_000, "{sent:?}");
        assert!(sent[1] < payload * 11 / 10, "{sent:?}");
        assert!(sent[2] < payload * 11 / 10 + 3 * LOST_BYTES, "{sent:?}");
        assert!(sent[3] < payload * 11 / 10, "{sent:?}");
    });
}

/// Goal: if a client does not reconnect, a lost connection ends its subscription at once; if it does, a topic that ends
/// during the outage ends its subscription after the reconnect.
/// Method: two clients, one of them without a reconnect timeout; a topic that ends during an outage.
#[test]
fn subscriptions_end_after_lost_connections() {
    simulate(10, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = open(&server, 7);
        let (_client, mut subscription) = follow(&sim).await;
        let not_reconnecting = sim.client(2, client_config()).await.unwrap();
        let mut ending = not_reconnecting.subscribe(&topic("t")).await.unwrap();
        publish(&server, &mut publisher, 1, 1000).await;
        subscription.next().await.unwrap();
        ending.next().await.unwrap();
        sim.cut(1);
        sim.cut(2);
        let error = ending.next().await.unwrap_err();
        let SubscriptionError::Disconnected { source, .. } = &error else { panic!("{error}") };
        assert!(matches!(**source, ClientError::Lane(_)), "{source}");
        sleep(OUTAGE_DURATION).await;
        publish(&server, &mut publisher, 2, 1000).await;
        publisher.end();
        sim.mend(1);
        assert_eq!(subscription.next().await.unwrap().id().version, Version(2));
        let error = subscription.next().await.unwrap_err();
        assert!(matches!(error, SubscriptionError::Ended { reason: EndReason::TopicEnded, .. }), "{error}");
    });
}

/// Goal: the wait for a topic begins when there is a connection, since a client without a connection cannot know
/// whether the topic exists.
/// Method: subscribe right before and during an outage that is longer than the wait, and publish the topic during the
/// outage.
#[test]
fn the_wait_for_a_topic_begins_with_a_connection() {
    simulate(11, async |sim| {
        let server = sim.server(server_config());
        // Longer than the idle timeout.
        let wait = Duration::from_secs(12);
        let config = tensor_relay_client::Config { topic_timeout: wait, ..reconnecting() };
        let client = sim.client(1, config).await.unwrap();
        let mut before = client.subscribe(&topic("t")).await.unwrap();
        let mut never = client.subscribe(&topic("never")).await.unwrap();
        sim.cut(1);
        let cut = sim.elapsed();
        let mending = async {
            sleep(OUTAGE_DURATION).await;
            let mut during = client.subscribe(&topic("t")).await.unwrap();
            sleep(OUTAGE_DURATION).await;
            publish(&server, &mut open(&server, 7), 1, 1000).await;
            sim.mend(1);
            tensors::check(&during.next().await.unwrap());
        };
        let (snapshot, error, ()) = tokio::join!(before.next(), never.next(), mending);
        tensors::check(&snapshot.unwrap());
        assert!(matches!(error.unwrap_err(), SubscriptionError::NotFound { .. }));
        let found = sim.elapsed() - cut;
        assert!(found > 2 * OUTAGE_DURATION + wait && found < Duration::from_secs(50), "{found:?}");
    });
}
