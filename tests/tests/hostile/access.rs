//! Access control: a client without a valid credential gets no answer, and one with a credential learns nothing beyond
//! its grants.

use crate::raw::{Connection, Peer, client_tls, hello};
use rustls::{
    NamedGroup,
    client::{
        ClientSessionMemoryCache, ClientSessionStore, Resumption, Tls12ClientSessionValue,
        Tls13ClientSessionValue,
    },
    crypto::aws_lc_rs,
    pki_types::ServerName,
};
use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};
use tensor_relay_protocol::{
    ClientMessage, CloseCode, EndReason, Glob, Grant, Hello, LaneGrant, LaneId, Secret, SecretId,
    ServerMessage, Subscribe, SubscriptionId, TicketId, Token, Verb, Verbs, WatchId,
};
use tensor_relay_server::{Access, Rules};
use tensor_relay_tests::pair::{
    eventually, publish, retaining, rules, server_config, simulate, token_with, topic, transport,
};
use tokio::sync::watch;

/// A token that grants `verbs` on `topics`.
fn granting(topics: &str, verbs: impl IntoIterator<Item = Verb>) -> Token {
    token_with(3, vec![Grant { topics: Glob::new(topics).unwrap(), verbs: Verbs::of(verbs) }])
}

/// No token, and invalid tokens of every kind.
fn invalid_tokens() -> Vec<Option<Token>> {
    let good = granting("**", Verb::ALL);
    let claims = good.decode_unverified().unwrap();
    let seal_with = |id, key| Some(Secret::new(SecretId(id), key).seal(&claims));
    let mut changed = good.as_str().to_owned();
    changed.replace_range(20..21, if &changed[20..21] == "A" { "B" } else { "A" });
    vec![
        None,
        seal_with(1, [8; 32]),
        seal_with(2, [7; 32]),
        Some(Token::new(&changed).unwrap()),
        Some(Token::new(&good.as_str()[..60]).unwrap()),
        Some(Token::new("A").unwrap()),
        Some(token_with(5, claims.grants.clone())), // Revoked below.
        {
            let expired = tensor_relay_protocol::Claims { expires_s: Some(1), ..claims.clone() };
            Some(rules().secrets[0].seal(&expired))
        },
    ]
}

/// Goal: a client without a valid credential gets neither data nor a reason, whatever it requests. Method: each invalid
/// token, immediately followed by every request; a lane with a guessed grant.
#[test]
fn a_client_without_a_valid_token_gets_no_answer() {
    simulate(1, async |sim| {
        let access = Access::new(Rules { revoked: [TicketId([5; 8])].into(), ..rules() });
        let server = sim.server_with(access, server_config());
        let mut publisher = server.publisher(topic("t")).unwrap();
        publish(&server, &mut publisher, 1, 1000).await;
        for (number, token) in invalid_tokens().into_iter().enumerate() {
            let mut peer = Peer::client(&sim, number as u8 + 1).await;
            peer.send_to_server(ClientMessage::Hello(Hello { token, ..hello() })).await;
            for request in requests("t") {
                peer.send_to_server(request).await;
            }
            assert_eq!(
                peer.wait_for_close().await,
                (Some(CloseCode::Unauthorised), String::new()),
                "{number}"
            );
            peer.assert_received_nothing().await;
        }
        let mut lane = Peer::client(&sim, 100).await;
        let grant = LaneGrant::new([0; 32]);
        let instance = tensor_relay_protocol::InstanceId([0; 16]);
        lane.send_to_server(ClientMessage::Join { session: 1, lane: LaneId(1), grant, instance })
            .await;
        assert_ne!(lane.wait_for_close().await.0, None);
        lane.assert_received_nothing().await;
        assert_eq!(server.stats().codecs.total().chunks, 0);
    });
}

fn requests(name: &str) -> [ClientMessage; 3] {
    [
        ClientMessage::List,
        ClientMessage::Subscribe(Subscribe::latest(SubscriptionId(1), topic(name), 8)),
        ClientMessage::Watch { watch: WatchId(1), glob: Glob::new("**").unwrap() },
    ]
}

/// Goal: for every request, a forbidden topic looks the same whether it exists or not. Method: tickets with several
/// sets of verbs for topics `mine/*`; the answers for such a topic, for another topic, and for ones that do not exist.
#[test]
fn ungranted_topics_look_nonexistent() {
    simulate(2, async |sim| {
        let server = sim.server(server_config());
        let mut publishers = vec![];
        for name in ["mine/a", "other/a"] {
            let mut publisher = server.publisher_with(topic(name), None, retaining(2)).unwrap();
            publish(&server, &mut publisher, 1, 1000).await;
            publishers.push(publisher);
        }
        let sets =
            [&[][..], &[Verb::List], &[Verb::Subscribe], &[Verb::List, Verb::Subscribe], &[Verb::Publish]];
        for (number, verbs) in sets.iter().enumerate() {
            let mut peer = Peer::client(&sim, number as u8 + 1).await;
            let token = Some(granting("mine/*", verbs.iter().copied()));
            peer.send_to_server(ClientMessage::Hello(Hello { token, ..hello() })).await;
            assert!(matches!(peer.receive_from_server().await, ServerMessage::Welcome(_)));
            let listed = if verbs.contains(&Verb::List) { vec![topic("mine/a")] } else { vec![] };

            peer.send_to_server(ClientMessage::List).await;
            let ServerMessage::Topics { topics, .. } = peer.receive_from_server().await else { panic!() };
            let names: Vec<_> = topics.into_iter().map(|entry| entry.id.topic).collect();
            assert_eq!(names, listed, "{verbs:?}");

            let watch = WatchId(1);
            peer.send_to_server(ClientMessage::Watch { watch, glob: Glob::new("**").unwrap() })
                .await;
            if !listed.is_empty() {
                assert_eq!(peer.receive_from_server().await, ServerMessage::Found { watch, topics: listed });
            }
            for (id, name) in [(1, "other/a"), (2, "none"), (3, "mine")] {
                let subscription = SubscriptionId(id);
                peer.send_to_server(ClientMessage::Subscribe(Subscribe::latest(
                    subscription,
                    topic(name),
                    8,
                )))
                .await;
                let end = ServerMessage::End { subscription, reason: EndReason::Forbidden };
                assert_eq!(peer.receive_from_server().await, end, "{verbs:?} {name}");
            }
            let subscription = SubscriptionId(4);
            peer.send_to_server(ClientMessage::Subscribe(Subscribe::latest(
                subscription,
                topic("mine/a"),
                8,
            )))
            .await;
            match peer.receive_from_server().await {
                ServerMessage::Announce(announce) => {
                    assert!(verbs.contains(&Verb::Subscribe) && announce.id.topic == topic("mine/a"));
                }
                other => {
                    assert!(!verbs.contains(&Verb::Subscribe));
                    assert_eq!(other, ServerMessage::End { subscription, reason: EndReason::Forbidden });
                }
            }
        }
    });
}

/// Goal: new topics are announced only to clients that may list them. Method: two watches of everything, by a client
/// that may list some topics and by one that may list none; topics of either kind appear.
#[test]
fn new_topics_are_announced_only_to_clients_that_may_list_them() {
    simulate(3, async |sim| {
        let server = sim.server(server_config());
        let (mut listing, mut forbidden) = (Peer::client(&sim, 1).await, Peer::client(&sim, 2).await);
        for (peer, verbs) in [(&mut listing, Verb::List), (&mut forbidden, Verb::Subscribe)] {
            let token = Some(granting("mine/*", [verbs]));
            peer.send_to_server(ClientMessage::Hello(Hello { token, ..hello() })).await;
            assert!(matches!(peer.receive_from_server().await, ServerMessage::Welcome(_)));
            peer.send_to_server(ClientMessage::Watch { watch: WatchId(1), glob: Glob::new("**").unwrap() })
                .await;
            peer.send_to_server(ClientMessage::List).await;
            let ServerMessage::Topics { topics, .. } = peer.receive_from_server().await else { panic!() };
            assert_eq!(topics, []);
        }
        let mut publishers = vec![];
        for name in ["other/a", "mine/a", "other/b", "mine/b"] {
            let mut publisher = server.publisher(topic(name)).unwrap();
            publish(&server, &mut publisher, 1, 1000).await;
            publishers.push(publisher);
        }
        let mut found = vec![];
        while found.len() < 2 {
            let ServerMessage::Found { topics, .. } = listing.receive_from_server().await else { panic!() };
            found.extend(topics);
        }
        assert_eq!(found, [topic("mine/a"), topic("mine/b")]);
        for (peer, listed) in [(&mut listing, 2), (&mut forbidden, 0)] {
            peer.send_to_server(ClientMessage::List).await; // `Found` of earlier topics arrives before the answer.
            let ServerMessage::Topics { topics, .. } = peer.receive_from_server().await else { panic!() };
            assert_eq!(topics.len(), listed);
        }
    });
}

/// Goal: a client that does not read is closed as soon after its revocation as others. Method: request long lists, read
/// nothing, and revoke the ticket; the session ends well before its write deadline.
#[test]
fn a_revoked_client_that_does_not_read_is_closed() {
    simulate(4, async |sim| {
        let sender = watch::Sender::new(Arc::new(rules()));
        let server = sim.server_with(Access::following(sender.subscribe()), server_config());
        let mut publishers = vec![];
        for number in 0..300 {
            let name = format!("{number}/{}", "x".repeat(200));
            let mut publisher = server.publisher(topic(&name)).unwrap();
            publish(&server, &mut publisher, 1, 100).await;
            publishers.push(publisher);
        }
        let mut peer = Peer::client(&sim, 1).await;
        let token = Some(granting("**", [Verb::List]));
        peer.send_to_server(ClientMessage::Hello(Hello { token, ..hello() })).await;
        assert!(matches!(peer.receive_from_server().await, ServerMessage::Welcome(_)));
        for _ in 0..2_000 {
            peer.send_to_server(ClientMessage::List).await;
        }
        tokio::time::sleep(std::time::Duration::from_secs(2)).await;
        assert_eq!(server.stats().sessions, 1);
        let before = sim.elapsed();
        sender.send_replace(Arc::new(Rules { revoked: [TicketId([3; 8])].into(), ..rules() }));
        eventually("the session has ended", || server.stats().sessions == 0).await;
        assert!(sim.elapsed() - before < std::time::Duration::from_secs(3), "{:?}", sim.elapsed() - before);
    });
}

/// Goal: a server issues no TLS session tickets, so every connection needs a full handshake. Method: a client that
/// would store and use session tickets connects twice.
#[test]
fn no_tls_session_is_resumed() {
    simulate(5, async |sim| {
        let _server = sim.server(server_config());
        let store = Arc::new(CountingStore::default());
        let mut tls = client_tls(aws_lc_rs::default_provider());
        tls.resumption = Resumption::store(Arc::clone(&store) as Arc<dyn ClientSessionStore>);
        tls.enable_early_data = true;
        for number in [1, 2] {
            let connection = Connection::open_over(transport(), &sim, number, tls.clone()).await;
            tokio::time::sleep(std::time::Duration::from_secs(1)).await;
            connection.close(0);
        }
        assert!(store.lookups.load(Ordering::Relaxed) >= 2, "the client looked for tickets");
        assert_eq!(store.stored.load(Ordering::Relaxed), 0, "the server sent no ticket");
    });
}

/// Stores and counts TLS session tickets.
#[derive(Debug)]
struct CountingStore {
    cache: ClientSessionMemoryCache,
    lookups: AtomicUsize,
    stored: AtomicUsize,
}

impl Default for CountingStore {
    fn default() -> Self {
        Self {
            cache: ClientSessionMemoryCache::new(8),
            lookups: AtomicUsize::new(0),
            stored: AtomicUsize::new(0),
        }
    }
}

impl ClientSessionStore for CountingStore {
    fn set_kx_hint(&self, name: ServerName<'static>, group: NamedGroup) {
        self.cache.set_kx_hint(name, group);
    }

    fn kx_hint(&self, name: &ServerName<'_>) -> Option<NamedGroup> {
        self.cache.kx_hint(name)
    }

    fn set_tls12_session(&self, _: ServerName<'static>, _: Tls12ClientSessionValue) {}

    fn tls12_session(&self, _: &ServerName<'_>) -> Option<Tls12ClientSessionValue> {
        None
    }

    fn remove_tls12_session(&self, _: &ServerName<'static>) {}

    fn insert_tls13_ticket(&self, name: ServerName<'static>, value: Tls13ClientSessionValue) {
        self.stored.fetch_add(1, Ordering::Relaxed);
        self.cache.insert_tls13_ticket(name, value);
    }

    fn take_tls13_ticket(&self, name: &ServerName<'static>) -> Option<Tls13ClientSessionValue> {
        self.lookups.fetch_add(1, Ordering::Relaxed);
        self.cache.take_tls13_ticket(name)
    }
}
