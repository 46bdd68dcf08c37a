//! Clients that ask, acknowledge, take names and owe answers beyond reason.

use super::*;

/// Goal: a window, a place and a beginning beyond reason cost the server nothing.
/// Method: the largest numbers there are, in both modes; then the next version for a good client.
#[test]
fn numbers_beyond_reason() {
    simulate(7, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = server.publisher_with(topic("t"), Some(EPOCH), keeping(3)).unwrap();
        publish(&server, &mut publisher, 1, 1000).await;
        let mut peer = Peer::greeted_client(&sim, 2).await;
        let most = Version(u64::MAX);
        let starts = [
            Start::At(None, most),
            Start::At(Some(EPOCH), most),
            Start::At(None, Version(0)),
            Start::At(Some(Epoch(u64::MAX)), most),
        ];
        let mut id = 0;
        for start in starts {
            for mode in [Mode::Latest, Mode::Every] {
                for have in [None, Some((EPOCH, most)), Some((Epoch(u64::MAX), most))] {
                    id += 1;
                    let window = u32::MAX;
                    let digest = VersionDigest([7; 32]);
                    let have = have.map(|(epoch, version)| Have { epoch, version, digest });
                    let subscribe = Subscribe { start, mode, have, window, preempt: true, ..request(id) };
                    peer.say_to_server(ClientMessage::Subscribe(subscribe)).await;
                }
            }
        }
        sleep(Duration::from_secs(1)).await;
        for version in 2..=5 {
            let began = sim.elapsed();
            publish(&server, &mut publisher, version, 1000).await;
            assert!(sim.elapsed() - began <= Duration::from_secs(11), "they are evicted in the end");
        }
        let client = sim.client(1, client_config()).await.unwrap();
        let snapshot = client.subscribe(&topic("t")).await.unwrap().next().await.unwrap();
        tensors::check(&snapshot);
        assert_eq!(snapshot.id().version, Version(5));
        assert_eq!(peer.connection.close_reason(), None);
    });
}

/// Goal: acknowledgements free what the client has, and can free nothing for anybody else.
/// Method: a reader that acknowledges versions that it was never sent, that never were, and of other epochs; another
/// reader, whose versions must stay; and one in mode latest, and one that does not exist.
#[test]
fn acknowledgements_of_what_was_not_sent() {
    simulate(8, async |sim| {
        let server = sim.server(server_config());
        let options = TopicOptions { when_full: WhenFull::Block, ..keeping(3) };
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
        let mut peer = Peer::greeted_client(&sim, 2).await;
        let every = Subscribe { mode: Mode::Every, start: Start::Oldest, credit: 0, ..request(1) };
        peer.say_to_server(ClientMessage::Subscribe(every)).await;
        peer.say_to_server(ClientMessage::Subscribe(Subscribe { credit: 0, ..request(2) }))
            .await;
        for subscription in [1, 2] {
            for (epoch, version) in
                [(EPOCH, 3), (EPOCH, 2), (EPOCH, 99), (EPOCH, u64::MAX), (Epoch(1), 1), (EPOCH, 0)]
            {
                let (subscription, version) = (SubscriptionId(subscription), Version(version));
                peer.say_to_server(ClientMessage::Acknowledge { subscription, epoch, version })
                    .await;
            }
        }
        sleep(Duration::from_secs(1)).await;
        assert_eq!(peer.connection.close_reason(), None);
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
                    // It stands at version 4 and reads nothing: it is what the publisher waits for, if anything.
                    peer.connection.close(0u32.into(), b"");
                }
            }
        };
        tokio::join!(publishing, reading);
    });
    expect_closed(CloseCode::Misbehaved, "subscription 9", async |sim| {
        let mut peer = Peer::greeted_client(sim, 2).await;
        let (subscription, version) = (SubscriptionId(9), Version(1));
        peer.say_to_server(ClientMessage::Acknowledge { subscription, epoch: EPOCH, version })
            .await;
        peer
    });
}

/// Goal: who takes a name over takes that name's place and nothing else; the first reader is told, and may take it back.
/// Method: a hostile client with the name of a good one, again and again; a third reader beside them.
#[test]
fn a_name_that_is_fought_over() {
    simulate(9, async |sim| {
        let server = sim.server(server_config());
        let mut publisher = server.publisher_with(topic("t"), Some(EPOCH), keeping(4)).unwrap();
        let client = sim.client(1, client_config()).await.unwrap();
        let name = ReaderName::new("r").unwrap();
        let request_every = tensor_relay_client::Request::every(topic("t"));
        let mut beside = client.subscribe_to(request_every.clone()).await.unwrap();
        let mut peer = Peer::greeted_client(&sim, 2).await;
        for round in 1..=5u32 {
            let named = request_every.clone().reader(name.clone());
            let mut good = client.subscribe_to(named).await.unwrap();
            client.list().await.unwrap();
            let reader = Some(name.clone());
            let every = Subscribe { mode: Mode::Every, start: Start::Oldest, reader, ..request(round) };
            peer.say_to_server(ClientMessage::Subscribe(every)).await;
            // What it got before it may still be there.
            let error = loop {
                if let Err(error) = good.next().await {
                    break error;
                }
            };
            let SubscriptionError::Ended { reason, .. } = &error else { panic!("{error}") };
            assert!(error.is_final() && *reason == EndReason::Replaced);
            publish(&server, &mut publisher, u64::from(round), 1000).await;
            let snapshot = beside.next().await.unwrap();
            assert_eq!(snapshot.id().version, Version(u64::from(round)));
        }
        // It never reads and never leaves, so it is evicted like anybody else.
        beside.acknowledge();
        assert_eq!(server.stats().evicted, 1);
    });
}

/// Goal: as many globs as a client may send, over as many tensors as a version may well have, take seconds at most; one
/// glob more is refused.
/// Method: the longest way to find nothing, on threads, beside a good client, by the clock on the wall; then 65 globs.
#[test]
fn globs_that_take_long() {
    simulate(10, async |sim| {
        let server = sim.server(tensor_relay_server::Config {
            workers: tensor_relay_transport::Workers::Threads,
            ..server_config()
        });
        let mut publisher = server.publisher_with(topic("t"), Some(EPOCH), keeping(1)).unwrap();
        let name = |number| format!("model.layers.{number:0>30}.weight");
        let specs: Vec<_> = (0..100_000).map(|number| tensors::noise(&name(number), 1)).collect();
        let staged = tensors::stage(&server, specs, 1);
        publisher.publish(staged, tensors::metadata(1)).await.unwrap();
        let mut small = server.publisher(topic("small")).unwrap();
        publish(&server, &mut small, 1, 1000).await;
        let client = sim.client(1, client_config()).await.unwrap();
        let mut peer = Peer::greeted_client(&sim, 2).await;
        let globs = |count| (0..count).map(|n| Glob::new(&format!("**l*e*w**{n}")).unwrap());
        let selection = globs(64).collect();
        peer.say_to_server(ClientMessage::Subscribe(Subscribe { selection, ..request(1) }))
            .await;
        let began = std::time::Instant::now();
        assert!(matches!(peer.hear_server().await, ServerMessage::Announce(_)));
        assert!(matches!(peer.hear_server().await, ServerMessage::Complete { .. }));
        let took = began.elapsed();
        assert!(took < Duration::from_secs(20), "{took:?}");
        let mut good = client.subscribe(&topic("small")).await.unwrap();
        tensors::check(&good.next().await.unwrap());
        let selection = globs(65).collect();
        peer.say_to_server(ClientMessage::Subscribe(Subscribe { selection, ..request(2) }))
            .await;
        let (code, text) = peer.closed_because().await;
        assert_eq!(code, Some(CloseCode::Malformed), "{text}");
        publish(&server, &mut small, 2, 1000).await;
        tensors::check(&good.next().await.unwrap());
    });
}

/// Goal: a server that many clients watch while topics come and go keeps nothing of them.
/// Method: a thousand subscriptions to topics that never come, dropped again; watches that end with their sessions.
#[test]
fn names_that_are_only_asked_for() {
    simulate(11, async |sim| {
        let server = sim.server(server_config());
        let mut peer = Peer::greeted_client(&sim, 2).await;
        for id in 1..=1_000 {
            let subscribe = Subscribe { topic: topic(&format!("none/{id}")), ..request(id) };
            peer.say_to_server(ClientMessage::Subscribe(subscribe)).await;
            let (subscription, keep_place) = (SubscriptionId(id), true);
            peer.say_to_server(ClientMessage::Unsubscribe { subscription, keep_place })
                .await;
            if id % 32 == 0 {
                sleep(Duration::from_millis(100)).await;
            }
        }
        peer.say_to_server(watch(1, "**")).await;
        peer.say_to_server(ClientMessage::List).await;
        loop {
            match peer.hear_server().await {
                ServerMessage::Topics { topics, more: false } => break assert!(topics.is_empty()),
                ServerMessage::End { reason, .. } => assert_eq!(reason, EndReason::TooManySubscriptions),
                other => panic!("{other:?}"),
            }
        }
        drop(peer);
        eventually("it is forgotten", || server.stats().sessions == 0).await;
    });
}

/// Goal: a client that owes the last word on a version that was given up cannot hold its memory by talking of other things.
/// Method: take one chunk of a version that is withdrawn, never answer the `Abort`, and acknowledge on and on.
#[test]
fn a_last_word_that_never_comes() {
    simulate(1, async |sim| {
        let stall_timeout = Duration::from_secs(5);
        let server = sim.server(tensor_relay_server::Config { stall_timeout, ..server_config() });
        let options =
            TopicOptions { release_timeout: Some(Duration::from_secs(1)), ..TopicOptions::default() };
        let mut publisher = server.publisher_with(topic("t"), Some(EPOCH), options).unwrap();
        let publication = publish(&server, &mut publisher, 1, 4 << 20).await;
        let mut peer = Peer::greeted_client(&sim, 2).await;
        peer.say_to_server(subscribe(1, 1)).await;
        eventually("it is being sent", || server.stats().transfers == 1).await;
        publication.withdraw();
        for _ in 0..30 {
            sleep(Duration::from_secs(1)).await;
            let (subscription, version) = (SubscriptionId(1), Version(1));
            peer.say_to_server(ClientMessage::Acknowledge { subscription, epoch: EPOCH, version })
                .await;
        }
        assert_eq!((server.stats().evicted, server.stats().transfers), (1, 0));
        assert_eq!(server.stats().staged_bytes, 0);
    });
}
