//! The feature `get` (PROTOCOL.md §3.12), message by message: a server against unusual requests, and a client against
//! servers that do not offer it or answer wrongly.

use crate::{
    raw::{Peer, subscribe},
    script::{EPOCH, Script, VERSION},
};
use std::{ops::RangeInclusive, time::Duration};
use tensor_relay_client::{Client, GetError, Request, SubscriptionError};
use tensor_relay_protocol::{
    AbortReason, Announce, ClientMessage, EndReason, Epoch, Glob, ManifestDigest, Mode, RangeSet,
    ServerMessage, Start, StreamHeader, Subscribe, SubscriptionId, Version, VersionDigest, VersionId,
};
use tensor_relay_server::{Publisher, Server};
use tensor_relay_tests::{
    pair::{Sim, client_config, publish, reconnecting, retaining, server_config, simulate, topic},
    tensors,
};

/// A client that speaks the protocol by hand.
struct Requester {
    peer: Peer,
    requests: u32,
}

/// A server that retains four versions of the topic `t`, with the publisher and a client.
async fn begin(sim: &Sim) -> (Server, Publisher, Requester) {
    let server = sim.server(server_config());
    let publisher = server.publisher_with(topic("t"), Some(EPOCH), retaining(4)).unwrap();
    let peer = Peer::welcomed_client(sim, 2).await;
    (server, publisher, Requester { peer, requests: 0 })
}

async fn publish_all(server: &Server, publisher: &mut Publisher, versions: RangeInclusive<u64>) {
    for version in versions {
        publish(server, publisher, version, 1000).await;
    }
}

impl Requester {
    /// Subscribes with `request`, under a new number, which is returned.
    async fn request(&mut self, request: Subscribe) -> SubscriptionId {
        self.requests += 1;
        let subscription = SubscriptionId(self.requests);
        let message = ClientMessage::Subscribe(Subscribe { subscription, ..request });
        self.peer.send_to_server(message).await;
        subscription
    }

    /// Waits until the server has processed all messages and sent what they need; returns the number of subscriptions
    /// to `t`.
    async fn subscriptions(&mut self) -> u64 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        self.peer.send_to_server(ClientMessage::List).await;
        match self.peer.receive_from_server().await {
            ServerMessage::Topics { topics, .. } => topics[0].subscribers,
            other => panic!("nothing else was requested: {other:?}"),
        }
    }

    /// Receives the announcement of a version: its number and its manifest.
    async fn announced(&mut self) -> (Version, ManifestDigest) {
        match self.peer.receive_from_server().await {
            ServerMessage::Announce(announce) => (announce.id.version, announce.manifest),
            other => panic!("an announcement was expected: {other:?}"),
        }
    }

    /// Receives `Complete`, and returns its digest.
    async fn completed(&mut self) -> VersionDigest {
        match self.peer.receive_from_server().await {
            ServerMessage::Complete { digest, .. } => digest,
            other => panic!("Complete was expected: {other:?}"),
        }
    }

    async fn commit(&mut self, subscription: SubscriptionId, version: Version) {
        let committed = ClientMessage::Committed { subscription, epoch: EPOCH, version, kept: false };
        self.peer.send_to_server(committed).await;
    }

    /// Receives and commits a version; returns its number.
    async fn receive(&mut self, subscription: SubscriptionId) -> u64 {
        let (version, _) = self.announced().await;
        self.completed().await;
        self.commit(subscription, version).await;
        version.0
    }

    /// Gives up the next version; returns its number.
    async fn give_up(&mut self, subscription: SubscriptionId) -> u64 {
        let (version, _) = self.announced().await;
        self.completed().await;
        let reason = AbortReason::OverBudget;
        let abort = ClientMessage::Abort { subscription, epoch: EPOCH, version, reason };
        self.peer.send_to_server(abort).await;
        self.peer
            .send_to_server(ClientMessage::Credit { subscription, chunks: 4 })
            .await;
        version.0
    }

    async fn assert_ends(&mut self, subscription: SubscriptionId, reason: EndReason) {
        let end = self.peer.receive_from_server().await;
        assert_eq!(end, ServerMessage::End { subscription, reason });
    }
}

/// A request for versions of `t` with credit for four chunks.
fn wanted(mode: Mode, start: Start) -> Subscribe {
    let ClientMessage::Subscribe(latest) = subscribe(1, 4) else { panic!("it subscribes") };
    Subscribe { mode, start, ..latest }
}

fn once(mode: Mode, start: Start) -> Subscribe {
    Subscribe { once: true, ..wanted(mode, start) }
}

fn exactly(version: u64) -> Start {
    Start::Exactly(None, Version(version))
}

/// Goal: `once` ends with `End{done}` after the first commit, and the server announces nothing more (§3.12 (1)).
/// Method: in both modes, for versions that are retained, one that is published later, and one of an ended topic.
#[test]
fn once_ends_with_the_first_commit() {
    for mode in [Mode::Latest, Mode::Every] {
        simulate(1, async |sim| {
            let (server, mut publisher, mut client) = begin(&sim).await;
            publish_all(&server, &mut publisher, 1..=2).await;
            for (start, version) in [(Start::Newest, 2), (exactly(1), 1), (exactly(2), 2)] {
                let subscription = client.request(once(mode, start)).await;
                assert_eq!(client.receive(subscription).await, version);
                client.assert_ends(subscription, EndReason::Done).await;
            }
            let next = client.request(once(mode, Start::Next)).await;
            assert_eq!(client.subscriptions().await, 1, "it waits");
            publish_all(&server, &mut publisher, 3..=3).await;
            assert_eq!(client.receive(next).await, 3);
            client.assert_ends(next, EndReason::Done).await;
            // Also in mode `every`, no reader is left that a publisher would wait for (7).
            publish_all(&server, &mut publisher, 4..=9).await;
            assert_eq!((client.subscriptions().await, server.stats().evicted), (0, 0));
            publisher.end();
            let last = client.request(once(mode, Start::Newest)).await;
            assert_eq!(client.receive(last).await, 9);
            client.assert_ends(last, EndReason::Done).await;
        });
    }
}

/// Goal: a version that was given up is not the one requested, unless there is no other (§3.12 (4)). Method: give up
/// the first version, with and without `start` 5.
#[test]
fn once_continues_after_a_version_that_was_given_up() {
    for (mode, first, next) in [(Mode::Latest, 3, 4), (Mode::Every, 1, 2)] {
        simulate(1, async |sim| {
            let (server, mut publisher, mut client) = begin(&sim).await;
            publish_all(&server, &mut publisher, 1..=3).await;
            let subscription = client.request(once(mode, Start::Oldest)).await;
            assert_eq!(client.give_up(subscription).await, first);
            if mode == Mode::Latest {
                assert_eq!(client.subscriptions().await, 1, "it waits");
                publish_all(&server, &mut publisher, 4..=4).await;
            }
            assert_eq!(client.receive(subscription).await, next);
            client.assert_ends(subscription, EndReason::Done).await;
            let subscription = client.request(once(mode, exactly(2))).await;
            assert_eq!(client.give_up(subscription).await, 2);
            client.assert_ends(subscription, EndReason::Done).await;
            assert_eq!(client.subscriptions().await, 0);
        });
    }
}

/// Goal: a version by its number is that version or none, in both modes (§3.12 (2)). Method: each retained version, and
/// each reason for which there is none; then requests of topics that do not exist or have ended.
#[test]
fn a_version_that_is_not_retained_is_not_found() {
    for mode in [Mode::Latest, Mode::Every] {
        simulate(1, async |sim| {
            let (server, mut publisher, mut client) = begin(&sim).await;
            let first = client.request(wanted(mode, exactly(1))).await;
            client.assert_ends(first, EndReason::NotFound).await;
            publish_all(&server, &mut publisher, 1..=6).await;
            for version in 3..=6 {
                let start = Start::Exactly(Some(EPOCH), Version(version));
                let subscription = client.request(once(mode, start)).await;
                assert_eq!(client.receive(subscription).await, version);
                client.assert_ends(subscription, EndReason::Done).await;
            }
            let other_epoch = Start::Exactly(Some(Epoch(EPOCH.0 + 1)), Version(4));
            for start in [exactly(0), exactly(2), exactly(7), exactly(u64::MAX), other_epoch] {
                for request in [once(mode, start), wanted(mode, start)] {
                    let subscription = client.request(request).await;
                    client.assert_ends(subscription, EndReason::NotFound).await;
                }
            }
            let missing = Subscribe { topic: topic("missing"), ..once(mode, exactly(1)) };
            let subscription = client.request(missing).await;
            client.assert_ends(subscription, EndReason::NotFound).await;
            publisher.end();
            for (version, is_retained) in [(7, false), (6, true)] {
                let subscription = client.request(once(mode, exactly(version))).await;
                if is_retained {
                    assert_eq!(client.receive(subscription).await, version);
                }
                let reason = if is_retained { EndReason::Done } else { EndReason::NotFound };
                client.assert_ends(subscription, reason).await;
            }
        });
    }
}

/// Goal: `preempt` does not replace a version that was requested by its number (§3.12 (2)). Method: an older version,
/// and a publish while it is under way.
#[test]
fn a_version_by_its_number_is_not_preempted() {
    simulate(1, async |sim| {
        let (server, mut publisher, mut client) = begin(&sim).await;
        publish_all(&server, &mut publisher, 1..=2).await;
        let request = Subscribe { preempt: true, ..once(Mode::Latest, exactly(1)) };
        let subscription = client.request(request).await;
        let (version, _) = client.announced().await;
        publish_all(&server, &mut publisher, 3..=3).await;
        client.completed().await;
        assert_eq!(client.subscriptions().await, 1, "it was not aborted");
        client.commit(subscription, version).await;
        client.assert_ends(subscription, EndReason::Done).await;
    });
}

/// Goal: a description is a manifest without chunks, whatever else is requested, and needs no credit (§3.12 (3)).
/// Method: requests without credit, some with a selection; the manifest's is the only stream of each.
#[test]
fn a_description_has_no_chunks() {
    simulate(1, async |sim| {
        let (server, mut publisher, mut client) = begin(&sim).await;
        publish_all(&server, &mut publisher, 1..=2).await;
        for mode in [Mode::Latest, Mode::Every] {
            let describe = Subscribe { describe: true, credit: 0, ..once(mode, exactly(1)) };
            let selection = vec![Glob::new("noise").unwrap()];
            let within = RangeSet::from_range(0..1);
            for request in [
                describe.clone(),
                Subscribe { credit: 4, ..describe.clone() },
                Subscribe { credit: 4, selection, within, ..describe },
            ] {
                let subscription = client.request(request).await;
                let (version, manifest) = client.announced().await;
                assert_eq!(client.completed().await, VersionDigest::of(manifest, []));
                client.commit(subscription, version).await;
                client.assert_ends(subscription, EndReason::Done).await;
                let stream = client.peer.connection.accept_data().await.unwrap().read_to_end().await;
                let header = StreamHeader::decode(stream[..64].try_into().unwrap()).unwrap();
                assert!(matches!(header, StreamHeader::Manifest(header) if header.digest == manifest));
            }
        }
        assert_eq!(client.subscriptions().await, 0);
        let idle = tokio::time::timeout(Duration::from_secs(1), client.peer.connection.accept_data());
        assert!(idle.await.is_err(), "no chunk was sent");
    });
}

/// Requests the script's version by its number.
fn script_version() -> Request {
    Request::exactly(topic("t"), Some(EPOCH), VERSION)
}

/// Runs `user` with a client that reconnects, and `script` with what it subscribes to.
fn with_script(user: impl AsyncFnOnce(&Client), script: impl AsyncFnOnce(Script, Subscribe)) {
    simulate(1, async |sim| {
        let user = async {
            let client = sim.client(1, reconnecting()).await.unwrap();
            user(&client).await;
        };
        let server = async {
            let (peer, subscribe) = Peer::server(&sim).await;
            script(Script::new((peer, subscribe.clone())), subscribe).await;
        };
        tokio::join!(user, server);
    });
}

async fn get_error(client: &Client, request: Request) -> SubscriptionError {
    match client.get(request).await {
        Err(GetError::Subscription(error)) => error,
        other => panic!("{other:?}"),
    }
}

/// Goal: a client of a server without the feature says who must be updated, and its session continues (§3.11 (2)).
/// Method: each request that needs the feature, and then one that needs none.
#[test]
fn a_client_sends_no_request_for_a_feature_that_is_not_offered() {
    simulate(1, async |sim| {
        let user = async {
            let client = sim.client(1, client_config()).await.unwrap();
            let exactly = Request::latest(topic("t")).from(Start::Exactly(None, VERSION));
            let described = Request::latest(topic("t")).describe();
            for request in [Request::newest(topic("t")), script_version(), exactly, described] {
                let error = get_error(&client, request).await;
                assert!(matches!(error, SubscriptionError::NotSupported { feature: "get", .. }), "{error}");
                assert!(
                    error.to_string().contains("(hostile)") && error.to_string().contains("update"),
                    "{error}"
                );
            }
            tensors::check(&client.get(Request::latest(topic("t"))).await.unwrap());
        };
        let server = async {
            let (peer, subscribe) = Peer::server_without_features(&sim).await;
            assert!(!subscribe.once && !subscribe.describe && subscribe.start == Start::Newest);
            let mut script = Script::new((peer, subscribe));
            script.send_version().await;
            script.wait_for_committed().await;
        };
        tokio::join!(user, server);
    });
}

/// Goal: the commit ends the subscription for the client: it passes over what comes for it, and after a lost connection
/// does not request it again (§3.12 (1)). Method: the user keeps the subscription; an announcement after the commit, and
/// another connection, on which the client lists the topics.
#[test]
fn a_client_does_not_wait_for_the_end() {
    with_script(
        async |client| {
            let mut subscription = client.subscribe_to(script_version()).await.unwrap();
            tensors::check(&subscription.next().await.unwrap());
            tokio::time::sleep(Duration::from_secs(5)).await;
            assert_eq!(client.reconnects(), 1);
            assert!(client.list().await.unwrap().is_empty());
            let end = subscription.next().await.unwrap_err();
            assert!(matches!(end, SubscriptionError::Ended { reason: EndReason::Done, .. }), "{end}");
        },
        async |mut script, subscribe| {
            assert!(subscribe.once && subscribe.start == Start::Exactly(Some(EPOCH), VERSION));
            script.send_version().await;
            script.wait_for_committed().await;
            let id = VersionId { version: Version(VERSION.0 + 1), ..script.announcement().id };
            script.announce(Announce { id, ..script.announcement() }).await;
            tokio::time::sleep(Duration::from_secs(1)).await;
            let (mut peer, first) = script.peer.reconnect_with_any_message().await;
            assert_eq!(first, ClientMessage::List);
            peer.send_to_client(ServerMessage::Topics { topics: vec![], more: false }).await;
            peer.wait_for_close().await;
        },
    );
}

/// Goal: no other version is received in place of the one that was requested, however the server answers (§3.12 (8)).
/// Method: an announcement of a later version and of another epoch, each when the version is requested at once and when
/// it is awaited; the client unsubscribes before it has asked for memory.
#[test]
fn another_version_is_not_received_in_its_place() {
    for (epoch, version) in [(EPOCH, Version(VERSION.0 + 1)), (Epoch(EPOCH.0 + 1), VERSION)] {
        for request in [script_version(), script_version().awaited()] {
            with_script(
                async |client| {
                    let error = get_error(client, request).await;
                    let SubscriptionError::VersionNotFound { version: VERSION, detail, .. } = error else {
                        panic!("{error}")
                    };
                    assert!(detail.contains(&format!("version {version}")), "{detail}");
                    assert_eq!(client.memory().snapshot_bytes, 0);
                },
                async |mut script, _| {
                    let id = VersionId { topic: topic("t"), epoch, version };
                    script.announce(Announce { id, ..script.announcement() }).await;
                    let subscription = script.subscription;
                    assert_eq!(
                        script.peer.receive_from_client().await,
                        ClientMessage::Unsubscribe { subscription, keep_place: false }
                    );
                },
            );
        }
    }
}

/// Goal: every way in which a version by its number does not come is told (§3.12 (2) and (4)). Method: `End{not found}`;
/// `End{done}` after an aborted transfer; and the same answers to a request that names no version.
#[test]
fn the_end_says_why_no_version_came() {
    with_script(
        async |client| {
            let error = get_error(client, script_version()).await.to_string();
            assert!(error.starts_with("version 3 of t is not kept: it was replaced or withdrawn"), "{error}");
        },
        async |script, _| end(script, EndReason::NotFound).await,
    );
    with_script(
        async |client| {
            let error = get_error(client, script_version()).await.to_string();
            assert!(
                error.starts_with("version 3 of t is not kept: the server aborted its transfer"),
                "{error}"
            );
        },
        async |mut script, _| {
            script.begin_version().await;
            let (subscription, reason) = (script.subscription, AbortReason::Withdrawn);
            let abort = ServerMessage::Abort { subscription, epoch: EPOCH, version: VERSION, reason };
            script.peer.send_to_client(abort).await;
            end(script, EndReason::Done).await;
        },
    );
    for reason in [EndReason::NotFound, EndReason::Done] {
        with_script(
            async |client| {
                let error = get_error(client, Request::newest(topic("t"))).await;
                assert!(matches!(error, SubscriptionError::Ended { reason: found, .. } if found == reason));
            },
            async |script, _| end(script, reason).await,
        );
    }
}

async fn end(mut script: Script, reason: EndReason) {
    let subscription = script.subscription;
    script.peer.send_to_client(ServerMessage::End { subscription, reason }).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
}
