//! Clients with excessive requests, acknowledgements, reader names and unanswered messages.

use super::*;

/// Goal: an extreme window, place or start does no harm to the server. Method: the largest numbers in both modes; then
/// a good client receives the newest version.
#[test]
fn extreme_numbers_do_no_harm() {
    simulate(7, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = server.publisher_with(topic("t"), Some(EPOCH), retaining(3)).unwrap();
        publish(&server, &mut publisher, 1, 1000).await;
        let mut peer = Peer::welcomed_client(&sim, 2).await;
        let last = Version(u64::MAX);
        let starts = [
            Start::At(None, last),
            Start::At(Some(EPOCH), last),
            Start::At(None, Version(0)),
            Start::At(Some(Epoch(u64::MAX)), last),
        ];
        let mut id = 0;
        for start in starts {
            for mode in [Mode::Latest, Mode::Every] {
                for have in [None, Some((EPOCH, last)), Some((Epoch(u64::MAX), last))] {
                    id += 1;
                    let window = u32::MAX;
                    let digest = VersionDigest([7; 32]);
                    let have = have.map(|(epoch, version)| Have { epoch, version, digest });
                    let subscribe = Subscribe { start, mode, have, window, preempt: true, ..request(id) };
                    peer.send_to_server(ClientMessage::Subscribe(subscribe)).await;
                }
            }
        }
        sleep(Duration::from_secs(1)).await;
        for version in 2..=5 {
            let began = sim.elapsed();
            publish(&server, &mut publisher, version, 1000).await;
            assert!(sim.elapsed() - began <= Duration::from_secs(11), "the readers are evicted");
        }
        let client = sim.client(1, client_config()).await.unwrap();
        let snapshot = client.subscribe(&topic("t")).await.unwrap().next().await.unwrap();
        tensors::check(&snapshot);
        assert_eq!(snapshot.id().version, Version(5));
        assert!(peer.connection.is_open());
    });
}

/// Goal: acknowledgements release versions for their own reader only. Method: acknowledge versions that were not sent,
/// that never existed, and of other epochs; another reader's versions must stay; the same for a subscription in mode
/// latest, and for one that does not exist.
#[test]
fn acknowledgements_affect_only_their_reader() {
    simulate(8, async |sim| {
        let server = sim.server(server_config());
        let options = TopicOptions { when_full: WhenFull::Block, ..retaining(3) };
        let mut publisher = server.publisher_with(topic("t"), Some(EPOCH), options).unwrap();
        let client = sim.client(1, client_config()).await.unwrap();
        let mut good = client
            .subscribe_to(tensor_relay_client::Request::every(topic("t")).window(1))
            .await
            .unwrap();
        client.list().await.unwrap();
        for version in 1..=3 {
            publish(&server, &mut publisher, version, 100_000).await;
        }
        let mut peer = Peer::welcomed_client(&sim, 2).await;
        let every = Subscribe { mode: Mode::Every, start: Start::Oldest, credit: 0, ..request(1) };
        peer.send_to_server(ClientMessage::Subscribe(every)).await;
        peer.send_to_server(ClientMessage::Subscribe(Subscribe { credit: 0, ..request(2) }))
            .await;
        for subscription in [1, 2] {
            for (epoch, version) in
                [(EPOCH, 3), (EPOCH, 2), (EPOCH, 99), (EPOCH, u64::MAX), (Epoch(1), 1), (EPOCH, 0)]
            {
                let (subscription, version) = (SubscriptionId(subscription), Version(version));
                peer.send_to_server(ClientMessage::Acknowledge { subscription, epoch, version })
                    .await;
            }
        }
        sleep(Duration::from_secs(1)).await;
        assert!(peer.connection.is_open());
        let publishing = async {
            for version in 4..=6 {
                publish(&server, &mut publisher, version, 100_000).await;
            }
        };
        let reading = async {
            for version in 1..=6 {
                let snapshot = good.next().await.unwrap();
                tensors::check(&snapshot);
                assert_eq!(snapshot.id().version, Version(version));
                sleep(Duration::from_secs(1)).await;
                if version == 6 {
                    // The hostile reader's place is version 4, and it reads nothing: the publisher would wait for it.
                    peer.connection.close(0);
                }
            }
        };
        tokio::join!(publishing, reading);
    });
    expect_closed(CloseCode::ProtocolViolation, "subscription 9", async |sim| {
        let mut peer = Peer::welcomed_client(sim, 2).await;
        let (subscription, version) = (SubscriptionId(9), Version(1));
        peer.send_to_server(ClientMessage::Acknowledge { subscription, epoch: EPOCH, version })
            .await;
        peer
    });
}

/// Goal: a reader that takes over a name gets that name's place and nothing else; the first reader gets an error, and
/// may take the name back. Method: a hostile client repeatedly uses the name of a good one; a third reader is
/// unaffected.
#[test]
fn taking_over_a_reader_name_affects_only_that_reader() {
    simulate(9, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = server.publisher_with(topic("t"), Some(EPOCH), retaining(4)).unwrap();
        let client = sim.client(1, client_config()).await.unwrap();
        let name = ReaderName::new("r").unwrap();
        let request_every = tensor_relay_client::Request::every(topic("t"));
        let mut other = client.subscribe_to(request_every.clone()).await.unwrap();
        let mut peer = Peer::welcomed_client(&sim, 2).await;
        for round in 1..=5u32 {
            let named = request_every.clone().reader(name.clone());
            let mut good = client.subscribe_to(named).await.unwrap();
            client.list().await.unwrap();
            let reader = Some(name.clone());
            let every = Subscribe { mode: Mode::Every, start: Start::Oldest, reader, ..request(round) };
            peer.send_to_server(ClientMessage::Subscribe(every)).await;
            // Versions that the reader received before may still be queued.
            let error = loop {
                if let Err(error) = good.next().await {
                    break error;
                }
            };
            let SubscriptionError::Ended { reason, .. } = &error else { panic!("{error}") };
            assert!(error.is_final() && *reason == EndReason::Replaced);
            publish(&server, &mut publisher, u64::from(round), 1000).await;
            let snapshot = other.next().await.unwrap();
            assert_eq!(snapshot.id().version, Version(u64::from(round)));
        }
        // The hostile reader never reads, so it is evicted.
        other.acknowledge();
        assert_eq!(server.stats().evicted, 1);
    });
}

/// Goal: matching the maximum number of globs against the names of 100,000 tensors takes less than 20 s; one glob more
/// is refused. Method: 64 worst-case globs that match nothing, on worker threads, in real time, while a good client is
/// connected; then 65 globs.
#[test]
fn matching_slow_globs_takes_seconds_at_most() {
    simulate(10, async |sim| {
        let server = sim.server(tensor_relay_server::Config {
            workers: tensor_relay_transport::Workers::Threads,
            ..server_config()
        });
        let mut publisher = server.publisher_with(topic("t"), Some(EPOCH), retaining(1)).unwrap();
        let name = |number| format!("model.layers.{number:0>30}.weight");
        let specs: Vec<_> = (0..100_000).map(|number| tensors::noise(&name(number), 1)).collect();
        let staged = tensors::stage(&server, specs, 1);
        publisher.publish(staged, tensors::metadata(1)).await.unwrap();
        let mut small = server.publisher(topic("small")).unwrap();
        publish(&server, &mut small, 1, 1000).await;
        let client = sim.client(1, client_config()).await.unwrap();
        let mut peer = Peer::welcomed_client(&sim, 2).await;
        let globs = |count| (0..count).map(|n| Glob::new(&format!("**l*e*w**{n}")).unwrap());
        let selection = globs(64).collect();
        peer.send_to_server(ClientMessage::Subscribe(Subscribe { selection, ..request(1) }))
            .await;
        let began = std::time::Instant::now();
        assert!(matches!(peer.receive_from_server().await, ServerMessage::Announce(_)));
        assert!(matches!(peer.receive_from_server().await, ServerMessage::Complete { .. }));
        let duration = began.elapsed();
        assert!(duration < Duration::from_secs(20), "{duration:?}");
        let mut good = client.subscribe(&topic("small")).await.unwrap();
        tensors::check(&good.next().await.unwrap());
        let selection = globs(65).collect();
        peer.send_to_server(ClientMessage::Subscribe(Subscribe { selection, ..request(2) }))
            .await;
        let (code, text) = peer.wait_for_close().await;
        assert_eq!(code, Some(CloseCode::Malformed), "{text}");
        publish(&server, &mut small, 2, 1000).await;
        tensors::check(&good.next().await.unwrap());
    });
}

/// Goal: an unpublished name that a client requests does not become a topic. Method: a thousand subscriptions to topics
/// that are never published, ended again; a watch that ends with its session.
#[test]
fn unpublished_names_do_not_become_topics() {
    simulate(11, async |sim| {
        let server = sim.server(server_config());
        let mut peer = Peer::welcomed_client(&sim, 2).await;
        for id in 1..=1_000 {
            let subscribe = Subscribe { topic: topic(&format!("none/{id}")), ..request(id) };
            peer.send_to_server(ClientMessage::Subscribe(subscribe)).await;
            let (subscription, keep_place) = (SubscriptionId(id), true);
            peer.send_to_server(ClientMessage::Unsubscribe { subscription, keep_place })
                .await;
            if id % 32 == 0 {
                sleep(Duration::from_millis(100)).await;
            }
        }
        peer.send_to_server(watch(1, "**")).await;
        peer.send_to_server(ClientMessage::List).await;
        loop {
            match peer.receive_from_server().await {
                ServerMessage::Topics { topics, more: false } => break assert!(topics.is_empty()),
                ServerMessage::End { reason, .. } => assert_eq!(reason, EndReason::TooManySubscriptions),
                other => panic!("{other:?}"),
            }
        }
        drop(peer);
        eventually("the session has ended", || server.stats().sessions == 0).await;
    });
}

/// Goal: a client that does not answer `Abort` cannot hold the version's memory by sending other messages. Method: give
/// credit for one chunk of a version that is withdrawn, never answer the `Abort`, and keep acknowledging.
#[test]
fn an_unanswered_abort_does_not_hold_memory() {
    simulate(1, async |sim| {
        let stall_timeout = Duration::from_secs(5);
        let server = sim.server(tensor_relay_server::Config { stall_timeout, ..server_config() });
        let options =
            TopicOptions { release_timeout: Some(Duration::from_secs(1)), ..TopicOptions::default() };
        let mut publisher = server.publisher_with(topic("t"), Some(EPOCH), options).unwrap();
        let publication = publish(&server, &mut publisher, 1, 4 << 20).await;
        let mut peer = Peer::welcomed_client(&sim, 2).await;
        peer.send_to_server(subscribe(1, 1)).await;
        eventually("the version is being sent", || server.stats().transfers == 1).await;
        publication.withdraw();
        for _ in 0..30 {
            sleep(Duration::from_secs(1)).await;
            let (subscription, version) = (SubscriptionId(1), Version(1));
            peer.send_to_server(ClientMessage::Acknowledge { subscription, epoch: EPOCH, version })
                .await;
        }
        assert_eq!((server.stats().evicted, server.stats().transfers), (1, 0));
        assert_eq!(server.stats().staged_bytes, 0);
    });
}
