//! Members of a swarm: clients that take a version from its origin and from each other (PROTOCOL.md §3.15).

use crate::slow_path;
use bytes::Bytes;
use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};
use tensor_relay_client::{
    Client, Config, Connector, Membership, PeerAddress, PeerState, ReceiptSources, Snapshot, Subscription,
    Version,
};
use tensor_relay_device::HostSource;
use tensor_relay_protocol::{
    ChunkHeader, EncodingEntry, EndReason, Epoch, Grant, RangeSet, Site, TicketId, Topic,
    Transport as AddressKind, Verbs,
};
use tensor_relay_server::{Access, ForwardOptions, Listener, PeerDialling, Publisher, Rules, Server};
use tensor_relay_tests::{
    pair::{
        SERVER_PORT, Sim, client_config, eventually, publish, reconnecting, retaining, rules, server_config,
        simulate, token_with, topic, transport,
    },
    tensors,
};
use tensor_relay_transport::{
    Transport,
    forwarding::{Forward, Forwarded, Origin, ReceivedVersion},
};
use tokio::{sync::watch, time::timeout};

/// Sixty-four chunks.
const BYTES: u64 = 4 << 20;

/// What a member does with what it receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// It offers it.
    Sharing,
    /// It only takes: it is behind NAT.
    Taking,
    /// It offers other bytes.
    Lying,
}

/// A client of the origin and, unless it only takes, a server at a port of its own.
struct Member {
    client: Client,
    subscription: Subscription,
    /// It runs until it is dropped.
    _server: Option<Server>,
}

impl Member {
    async fn join(sim: &Sim, number: u8, kind: Kind) -> Self {
        let (server, sharing) = membership(sim, number, kind);
        let config = Config { sharing: Some(sharing), ..reconnecting() };
        let client = sim.client(number, config).await.unwrap();
        let subscription = client.subscribe(&topic("t")).await.unwrap();
        client.list().await.unwrap();
        Self { client, subscription, _server: server }
    }

    /// Receives the next version, and checks every byte.
    async fn next(&mut self, version: u64) -> ReceiptSources {
        let snapshot = next(&mut self.subscription).await;
        assert_eq!(snapshot.id().version, Version(version));
        snapshot.receipt().sources
    }
}

async fn next(subscription: &mut Subscription) -> Snapshot {
    let snapshot = timeout(Duration::from_secs(60), subscription.next()).await.unwrap().unwrap();
    tensors::check(&snapshot);
    snapshot
}

/// Where the member with this number listens.
fn address(number: u8) -> SocketAddr {
    (Ipv4Addr::new(10, 0, 1, number), SERVER_PORT).into()
}

fn membership(sim: &Sim, number: u8, kind: Kind) -> (Option<Server>, Membership) {
    let identity = Arc::new(sim.with_key_of(1_000 + u64::from(number)).identity());
    if kind == Kind::Taking {
        return (None, Membership { identity, addresses: vec![], site: Site::default(), forward: None });
    }
    let address = address(number);
    let host = Arc::new(sim.client_host(number));
    let listener = Listener::bind_on(host, transport(), address, &identity, sim.tuning.clone()).unwrap();
    let server = Server::start(listener, Access::new(Rules::default()), server_config());
    // What is received onto a device is kept on the host to be sent again, by default in part.
    let keeps_all = kind == Kind::Lying || client_config().device.is_some();
    let kept_bytes = keeps_all.then_some(u64::MAX);
    let forward = server.forward(ForwardOptions { key: identity.fingerprint(), kept_bytes, rate: None });
    let forward = match kind {
        Kind::Lying => Arc::new(Liar(forward)),
        _ => forward,
    };
    let kind = match transport() {
        Transport::Tcp => AddressKind::Tcp,
        _ => AddressKind::Quic,
    };
    let addresses = vec![PeerAddress { transport: kind, address }];
    (Some(server), Membership { identity, addresses, site: Site::default(), forward: Some(forward) })
}

/// Offers other bytes than it receives.
#[derive(Debug)]
struct Liar(Arc<dyn Forward>);

impl Forward for Liar {
    fn set_origin(&self, origin: Origin) {
        self.0.set_origin(origin);
    }

    fn begin(&self, version: ReceivedVersion) -> Option<Arc<dyn Forwarded>> {
        // Without memory, every chunk is sent as it is kept; what is in memory is compared with its hash.
        let forwarded = self.0.begin(ReceivedVersion { memory: None, ..version })?;
        Some(Arc::new(LyingVersion(forwarded)))
    }

    fn revoke(&self, topic: &Topic, taker: [u8; 32], restored: bool) {
        self.0.revoke(topic, taker, restored);
    }

    fn end(&self, topic: &Topic, reason: EndReason) {
        self.0.end(topic, reason);
    }
}

#[derive(Debug)]
struct LyingVersion(Arc<dyn Forwarded>);

impl Forwarded for LyingVersion {
    fn keep(&self, header: &ChunkHeader, encoded: &[u8]) -> Option<Bytes> {
        let mut other = encoded.to_vec();
        if let Some(last) = other.last_mut() {
            *last ^= 1;
        }
        self.0.keep(header, &other)
    }

    fn handle_verified(&self, header: &ChunkHeader, encoding: Option<Bytes>) -> bool {
        self.0.handle_verified(header, encoding)
    }

    fn handle_encodings(&self, entries: &[EncodingEntry]) {
        self.0.handle_encodings(entries);
    }

    fn offered(&self) -> RangeSet {
        self.0.offered()
    }

    fn handle_committed(&self, whole: Option<HostSource>) {
        self.0.handle_committed(whole);
    }
}

/// An origin, and members of its swarm.
struct Swarm {
    server: Server,
    publisher: Publisher,
    members: Vec<Member>,
}

impl Swarm {
    async fn of(sim: &Sim, kinds: &[Kind]) -> Self {
        Self::with_access(sim, Access::new(rules()), kinds).await
    }

    async fn with_access(sim: &Sim, access: Access, kinds: &[Kind]) -> Self {
        slow_path(sim);
        let connector = Connector::over(Arc::new(sim.server_host()), sim.tuning.clone());
        let peers = Some(PeerDialling::new(connector, &[]));
        let config = tensor_relay_server::Config { peers, ..server_config() };
        let server = sim.server_with(access, config);
        let publisher = server.publisher_with(topic("t"), Some(Epoch(3)), retaining(2)).unwrap();
        let mut members = vec![];
        for (number, kind) in (1..).zip(kinds) {
            members.push(Member::join(sim, number, *kind).await);
        }
        Self { server, publisher, members }
    }

    async fn publish(&mut self, version: u64) {
        publish(&self.server, &mut self.publisher, version, BYTES).await;
    }

    /// Receives a version at all members.
    async fn next(&mut self, version: u64) -> Vec<ReceiptSources> {
        let mut sources = vec![];
        for member in &mut self.members {
            sources.push(member.next(version).await);
        }
        sources
    }
}

/// The bytes of all members that came from the origin.
fn of_origin(sources: &[ReceiptSources]) -> u64 {
    sources.iter().map(|sources| sources.origin_bytes).sum()
}

/// Goal: the origin sends a version about once, whatever the number of members, and they have every byte. Method: three
/// members, three versions; a fourth that joins later.
#[test]
fn members_take_most_chunks_from_each_other() {
    simulate(1, async |sim| {
        let mut swarm = Swarm::of(&sim, &[Kind::Sharing; 3]).await;
        for version in 1..=3 {
            swarm.publish(version).await;
            let sources = swarm.next(version).await;
            assert!(of_origin(&sources) < BYTES * 3 / 2, "{version}: {sources:?}");
            assert!(sources.iter().all(|it| it.peer_bytes > 0 && it.peers > 0), "{version}: {sources:?}");
        }
        let mut late = Member::join(&sim, 9, Kind::Sharing).await;
        let sources = late.next(3).await;
        assert!(sources.origin_bytes < BYTES / 5, "{sources:?}");
        assert_eq!(sources.origin_bytes + sources.peer_bytes, BYTES);
    });
}

/// Goal: a member behind NAT takes from others, and serves nobody.
#[test]
fn a_member_without_an_address_only_takes() {
    simulate(1, async |sim| {
        let mut swarm = Swarm::of(&sim, &[Kind::Sharing, Kind::Sharing, Kind::Taking]).await;
        for version in 1..=2 {
            swarm.publish(version).await;
            let sources = swarm.next(version).await;
            assert!(sources[2].peer_bytes > 0, "{version}: {sources:?}");
            assert!(of_origin(&sources) < BYTES * 2, "{version}: {sources:?}");
        }
        let taker = swarm.members[2].client.peers();
        assert_eq!(taker.iter().filter(|peer| peer.state == PeerState::Connected).count(), 2, "{taker:?}");
    });
}

/// Goal: what a liar sends is discarded, the liar is not used any more, and the version has every byte. Method: one of three
/// members offers other bytes; the others say whom they do not use.
#[test]
fn a_liar_is_barred_and_costs_little() {
    simulate(1, async |sim| {
        let mut swarm = Swarm::of(&sim, &[Kind::Sharing, Kind::Lying, Kind::Sharing]).await;
        for version in 1..=3 {
            swarm.publish(version).await;
            swarm.next(version).await;
        }
        let honest = [&swarm.members[0].client, &swarm.members[2].client];
        for client in honest {
            let peers = client.peers();
            let barred: Vec<_> = peers.iter().filter(|peer| peer.state == PeerState::Barred).collect();
            assert_eq!(barred.len(), 1, "{peers:?}");
            assert_eq!(barred[0].addresses[0].address, address(2));
        }
    });
}

/// Goal: the loss of a member delays the others by seconds at most, and costs no byte. Method: the path of one member to
/// everybody is cut in the middle of a version.
#[test]
fn a_member_that_is_killed_leaves_the_others_whole() {
    simulate(1, async |sim| {
        let mut swarm = Swarm::of(&sim, &[Kind::Sharing; 3]).await;
        swarm.publish(1).await;
        swarm.next(1).await;
        swarm.publish(2).await;
        let killed = swarm.members.pop().unwrap();
        eventually("the version is under way", || {
            swarm
                .members
                .iter()
                .all(|member| member.subscription.progress().verified_bytes > BYTES / 8)
        })
        .await;
        for other in [sim.server_host(), sim.client_host(1), sim.client_host(2)] {
            sim.net.partition(&other, &sim.client_host(3));
        }
        let cut_at = sim.elapsed();
        swarm.next(2).await;
        let took = sim.elapsed() - cut_at;
        assert!(took < Duration::from_secs(15), "{took:?}");
        drop(killed);
        swarm.publish(3).await;
        let sources = swarm.next(3).await;
        assert!(sources.iter().all(|sources| sources.peer_bytes > 0), "{sources:?}");
    });
}

/// Goal: once every chunk is at a member, they need no origin. Method: the origin is cut off when it has sent everything;
/// a slow member receives the rest from the others.
#[test]
fn a_version_that_was_sent_once_needs_no_origin() {
    simulate(1, async |sim| {
        let mut swarm = Swarm::of(&sim, &[Kind::Sharing; 3]).await;
        swarm.publish(1).await;
        swarm.next(1).await;
        swarm.publish(2).await;
        let first = swarm.members[0].next(2).await;
        assert!(first.peer_bytes > 0);
        for number in 1..=3 {
            sim.cut(number);
            sim.net.reset_streams(&sim.server_host(), &sim.client_host(number));
        }
        for member in &mut swarm.members[1..] {
            let snapshot = next(&mut member.subscription).await;
            assert_eq!(snapshot.id().version, Version(2));
        }
        (1..=3).for_each(|number| sim.mend(number));
        swarm.publish(3).await;
        for member in &mut swarm.members {
            let snapshot = next(&mut member.subscription).await;
            assert_eq!(snapshot.id().version, Version(3));
        }
    });
}

/// Goal: deltas are passed on as deltas. Method: versions that differ little, in mode latest, whose bytes are counted.
#[test]
fn deltas_are_passed_on() {
    simulate(1, async |sim| {
        let mut swarm = Swarm::of(&sim, &[Kind::Sharing; 3]).await;
        for version in 1..=5 {
            let staged = tensors::stage(&swarm.server, vec![tensors::steady("weights", BYTES)], version);
            swarm.publisher.publish(staged, tensors::metadata(version)).await.unwrap();
            for member in &mut swarm.members {
                let snapshot = next(&mut member.subscription).await;
                let receipt = snapshot.receipt();
                assert_eq!(snapshot.id().version, Version(version));
                if version > 2 {
                    assert!(receipt.wire_bytes < BYTES / 10, "{version}: {receipt:?}");
                }
            }
        }
    });
}

/// Goal: a client whose right comes back takes from others again, of the same holders and the same version. Method: its
/// ticket is revoked, until the holders know, and then not any more; it has a new session, with the same key.
#[test]
fn a_right_that_comes_back_is_back_at_the_holders() {
    simulate(1, async |sim| {
        let sender = watch::Sender::new(Arc::new(rules()));
        let access = Access::following(sender.subscribe());
        let mut swarm = Swarm::with_access(&sim, access, &[Kind::Sharing; 2]).await;
        swarm.publish(1).await;
        swarm.next(1).await;
        let ticket = sim
            .bare_ticket()
            .with_token(token_with(8, vec![Grant::everywhere(Verbs::CONSUME)]));
        let (_, sharing) = membership(&sim, 9, Kind::Taking);
        let take = async || {
            let config = Config { sharing: Some(sharing.clone()), ..reconnecting() };
            let client = Client::connect_with(&sim.connector(9), &ticket, config).await.unwrap();
            let mut subscription = client.subscribe(&topic("t")).await.unwrap();
            next(&mut subscription).await.receipt().sources
        };
        let first = take().await;
        assert!(first.peer_bytes > BYTES / 2, "{first:?}");
        sender.send_replace(Arc::new(Rules { revoked: [TicketId([8; 8])].into(), ..rules() }));
        tokio::time::sleep(Duration::from_secs(10)).await;
        sender.send_replace(Arc::new(rules()));
        let again = take().await;
        assert!(again.peer_bytes > BYTES / 2, "{again:?}");
    });
}

/// Goal: with sharing off nothing is different: no message of the feature, and no connection.
#[test]
fn clients_that_do_not_share_receive_from_the_origin_alone() {
    simulate(1, async |sim| {
        let mut swarm = Swarm::of(&sim, &[Kind::Sharing; 2]).await;
        let client = sim.client(3, reconnecting()).await.unwrap();
        let mut subscription = client.subscribe(&topic("t")).await.unwrap();
        client.list().await.unwrap();
        swarm.publish(1).await;
        let sources = next(&mut subscription).await.receipt().sources;
        assert_eq!((sources.origin_bytes, sources.peer_bytes, sources.peers), (BYTES, 0, 0));
        assert!(client.peers().is_empty());
        swarm.next(1).await;
    });
}
