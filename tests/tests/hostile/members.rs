//! Clients that share, honest and lying, towards an origin (PROTOCOL.md §3.15).

use crate::raw::{Peer, hello, subscribe};
use std::{collections::BTreeMap, net::SocketAddr, sync::Arc, time::Duration};
use tensor_relay_protocol::{
    Announce, ChunkHeader, ClientMessage, CloseCode, EncodingEntry, EncodingHasher, Feature, FeatureSet,
    Grant, HEADER_BYTES, Held, Hello, LaneGrant, PeerAddress, PeerSecret, RangeSet, ServerMessage, Share,
    Site, Source, StreamHeader, SubscriptionId, TicketId, Token, Transport as PeerTransport, Verbs, Version,
    Welcome,
};
use tensor_relay_server::{Access, Config, PeerDialling, PeerNetwork, Publisher, Rules, Server};
use tensor_relay_tests::pair::{
    CHUNK_BYTES, Sim, publish, rules, server_config, simulate, token, token_with, topic, transport,
};
use tensor_relay_transport::{Connector, Lane, Listener, Transport, control};
use tokio::{sync::watch, time::timeout};

/// The chunks of the shared version.
const CHUNKS: u32 = 16;

/// The port at which a member listens.
const PORT: u16 = 4_800;

/// Longer than the origin takes to dial a port in vain, in all rounds.
const PATIENCE: Duration = Duration::from_secs(40);

/// The configuration of an origin.
fn origin(sim: &Sim, networks: &[&str]) -> Config {
    let networks: Vec<PeerNetwork> = networks.iter().map(|network| network.parse().unwrap()).collect();
    let connector = Connector::over(Arc::new(sim.server_host()), sim.tuning.clone());
    Config { peers: Some(PeerDialling::new(connector, &networks)), ..server_config() }
}

/// A raw client that shares.
struct Member {
    peer: Peer,
    session: u64,
    grant: LaneGrant,
    key: [u8; 32],
}

impl Member {
    /// A client with this number and token, and the key derived from the number, before it shares.
    async fn connect(sim: &Sim, number: u8, token: Token) -> Self {
        let mut peer = Peer::client(sim, number).await;
        let features = FeatureSet::default().with(Feature::Peers);
        let hello = Hello { token: Some(token), features, ..hello() };
        peer.send_to_server(ClientMessage::Hello(hello)).await;
        let ServerMessage::Welcome(Welcome { session, lanes, features, .. }) =
            peer.receive_from_server().await
        else {
            panic!("it is welcome")
        };
        assert!(features.contains(Feature::Peers));
        let key = sim.with_key_of(number.into()).identity().fingerprint().0;
        Self { peer, session, grant: lanes.unwrap().grant, key }
    }

    /// Says that it listens at these addresses.
    async fn share(&mut self, addresses: &[SocketAddr]) {
        let transport = match transport() {
            Transport::Tcp => PeerTransport::Tcp,
            _ => PeerTransport::Quic,
        };
        let addresses = addresses
            .iter()
            .map(|address| PeerAddress { transport, address: *address })
            .collect();
        let share = Share { addresses, key: Some(self.key), site: Site::default() };
        self.peer.send_to_server(ClientMessage::Share(share)).await;
    }

    async fn subscribe(&mut self, credit: u32) {
        self.peer.send_to_server(subscribe(1, credit)).await;
        let announce = self.peer.receive_from_server().await;
        assert!(matches!(announce, ServerMessage::Announce(Announce { shared: true, .. })), "{announce:?}");
    }

    /// The next sources that name anybody; `None` if there are none within the time.
    async fn named(&mut self) -> Option<Vec<Source>> {
        let named = async {
            loop {
                match self.peer.receive_from_server().await {
                    ServerMessage::Sources { sources, .. } if !sources.is_empty() => return sources,
                    ServerMessage::Sources { .. } | ServerMessage::Encodings { .. } => {}
                    ServerMessage::Complete { .. } => {}
                    other => panic!("{other:?}"),
                }
            }
        };
        timeout(PATIENCE, named).await.ok()
    }
}

/// The port of a member, with the key of its number.
fn listen(sim: &Sim, number: u8, key_of: u8) -> Listener {
    let (host, address) = (Arc::new(sim.client_host(number)), address_of(sim, number));
    let identity = sim.with_key_of(key_of.into()).identity();
    Listener::bind_on(host, transport(), address, &identity, sim.tuning.clone()).unwrap()
}

fn address_of(_: &Sim, number: u8) -> SocketAddr {
    (std::net::Ipv4Addr::new(10, 0, 1, number), PORT).into()
}

/// What a port does with a `Check`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    /// The proof of its own session.
    Proof,
    /// The proof of another session, as of a member that tells the address of somebody else.
    OtherProof,
    /// Another message.
    OtherMessage,
    /// Nothing.
    Silence,
    /// The end of the connection.
    Close,
}

/// Answers the connections of the origin, for a member with this session.
async fn answer(listener: Listener, answer: Answer, (session, grant): (u64, LaneGrant), key: [u8; 32]) {
    let mut kept: Vec<(Lane, _)> = vec![];
    while let Some(arrival) = listener.accept().await {
        let Ok(lane) = arrival.accept().await else { continue };
        let (sender, mut receiver) = control::accept(&lane, PATIENCE).await.unwrap();
        let first = receiver.next().await.unwrap();
        let ClientMessage::Check { session: asked, nonce } = first else { panic!("{first:?}") };
        assert_eq!(asked, session);
        let secret = match answer {
            Answer::OtherProof => PeerSecret::of(&LaneGrant::new([7; 32])),
            _ => PeerSecret::of(&grant),
        };
        match answer {
            Answer::Silence => {}
            Answer::Close => lane.close(CloseCode::Unauthorised, ""),
            Answer::OtherMessage => sender.send(ServerMessage::Joined).await.unwrap(),
            _ => {
                let proof = secret.proof(&nonce, &key);
                sender.send(ServerMessage::Checked { proof }).await.unwrap();
            }
        }
        kept.push((lane, (sender, receiver)));
    }
}

/// Starts an origin with a version of [`CHUNKS`] chunks.
async fn serve(sim: &Sim, access: Access, networks: &[&str]) -> (Server, Publisher) {
    let server = sim.server_with(access, origin(sim, networks));
    let mut publisher = server.publisher(topic("t")).unwrap();
    publish(&server, &mut publisher, 1, u64::from(CHUNKS * CHUNK_BYTES)).await;
    (server, publisher)
}

/// Goal: a port that proves that it is its session's is named to others, with a grant for them alone. Method: check the
/// grant with the secret of the holder's session.
#[test]
fn a_proven_port_is_named_with_a_grant() {
    simulate(1, async |sim| {
        let (_server, publisher) = serve(&sim, Access::new(rules()), &[]).await;
        let mut holder = Member::connect(&sim, 2, token()).await;
        let port = answer(listen(&sim, 2, 2), Answer::Proof, (holder.session, holder.grant), holder.key);
        let named = async {
            // An unspecified address stands for the one of the session.
            holder.share(&[(std::net::Ipv4Addr::UNSPECIFIED, PORT).into()]).await;
            holder.subscribe(4).await;
            let mut taker = Member::connect(&sim, 3, token()).await;
            taker.share(&[]).await;
            taker.subscribe(4).await;
            let sources = taker.named().await.expect("the holder is named");
            let [source] = &sources[..] else { panic!("{sources:?}") };
            assert_eq!((source.key, source.addresses.len()), (holder.key, 1));
            assert_eq!(source.addresses[0].address, address_of(&sim, 2));
            let version = (publisher.epoch(), Version(1));
            let expected = PeerSecret::of(&holder.grant).grant(&topic("t"), version, &taker.key);
            assert!(source.grant == expected, "the grant is for this holder and taker");
            assert_eq!(holder.named().await.map(|sources| sources.len()), None, "a taker is named to nobody");
        };
        tokio::select! {
            () = named => {}
            () = port => panic!("the port stays open"),
        }
    });
}

/// Goal: nobody is told of a port that does not prove that it is its session's. Method: each kind of liar.
#[test]
fn unproven_ports_are_named_to_nobody() {
    let answers = [Answer::OtherProof, Answer::OtherMessage, Answer::Silence, Answer::Close];
    for (key_of, answered) in answers.map(|answer| (2, answer)).into_iter().chain([(9, Answer::Proof)]) {
        simulate(1, async |sim| {
            let (_server, _publisher) = serve(&sim, Access::new(rules()), &[]).await;
            let mut liar = Member::connect(&sim, 2, token()).await;
            let port = answer(listen(&sim, 2, key_of), answered, (liar.session, liar.grant), liar.key);
            let address = address_of(&sim, 2);
            let asked = async {
                liar.share(&[address]).await;
                assert_named_to_nobody(&sim, &mut liar).await;
            };
            tokio::select! {
                () = asked => {}
                () = port => panic!("the port stays open"),
            }
        });
    }
}

/// Goal: the origin connects neither where nobody listens for long, nor to addresses that are not the client's.
#[test]
fn other_addresses_are_not_dialled() {
    for (number, networks, is_named) in [(2, &[][..], false), (5, &[], false), (5, &["10.0.1.0/24"], true)] {
        simulate(1, async |sim| {
            let (_server, _publisher) = serve(&sim, Access::new(rules()), networks).await;
            let mut member = Member::connect(&sim, 2, token()).await;
            let (secret, key) = ((member.session, member.grant), member.key);
            // It listens at the address of host 5 alone.
            let port = answer(listen(&sim, 5, 2), Answer::Proof, secret, key);
            let asked = async {
                member.share(&[address_of(&sim, number)]).await;
                match is_named {
                    false => assert_named_to_nobody(&sim, &mut member).await,
                    true => {
                        let mut taker = subscribed_beside(&sim, &mut member).await;
                        let sources = taker.named().await.expect("it is named");
                        assert_eq!(sources[0].addresses[0].address, address_of(&sim, 5));
                    }
                }
            };
            tokio::select! {
                () = asked => {}
                () = port => panic!("the port stays open"),
            }
        });
    }
}

/// Subscribes `member`, and another one that only takes, which is returned.
async fn subscribed_beside(sim: &Sim, member: &mut Member) -> Member {
    member.subscribe(4).await;
    subscribed(sim, 3).await
}

async fn assert_named_to_nobody(sim: &Sim, member: &mut Member) {
    let mut taker = subscribed_beside(sim, member).await;
    assert!(taker.named().await.is_none());
}

/// Goal: when the right of a client ends, the holders that were named to it are told within 10 s; whether it is connected
/// or not.
#[test]
fn rights_that_end_are_revoked_at_holders() {
    for stays in [true, false] {
        simulate(1, async |sim| {
            let sender = watch::Sender::new(Arc::new(rules()));
            let (_server, _publisher) = serve(&sim, Access::following(sender.subscribe()), &[]).await;
            let mut holder = Member::connect(&sim, 2, token()).await;
            let port = answer(listen(&sim, 2, 2), Answer::Proof, (holder.session, holder.grant), holder.key);
            let revoked = async {
                holder.share(&[address_of(&sim, 2)]).await;
                holder.subscribe(4).await;
                let right = token_with(8, vec![Grant::everywhere(Verbs::CONSUME)]);
                let mut taker = Member::connect(&sim, 3, right).await;
                taker.share(&[]).await;
                taker.subscribe(4).await;
                assert!(taker.named().await.is_some());
                if !stays {
                    taker.peer.connection.close(0);
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
                let revoked = [TicketId([8; 8])].into();
                sender.send_replace(Arc::new(Rules { revoked, ..rules() }));
                assert_eq!(next_revocation(&mut holder.peer).await, (taker.key, false));
            };
            tokio::select! {
                () = revoked => {}
                () = port => panic!("the port stays open"),
            }
        });
    }
}

/// Goal: a version is shared if it was announced so, and otherwise not, whatever the client says meanwhile. Method: a client
/// that says that it shares at about the time of the announcement.
#[test]
fn a_client_that_shares_too_late_takes_part_in_the_next_version() {
    let mut announced = vec![];
    for after_us in (0..4_000).step_by(250) {
        simulate(1, async |sim| {
            let (server, mut publisher) = serve(&sim, Access::new(rules()), &[]).await;
            let mut member = Member::connect(&sim, 2, token()).await;
            member.peer.send_to_server(subscribe(1, CHUNKS)).await;
            tokio::time::sleep(Duration::from_micros(after_us)).await;
            member.share(&[]).await;
            let is_shared = next_announced(&mut member.peer).await;
            tokio::time::sleep(Duration::from_secs(2)).await;
            let swarm = server.status_reader().read().unwrap().topics.remove(0).swarm;
            assert_eq!(swarm.members_count, u64::from(is_shared), "after {after_us} us");
            announced.push(is_shared);
            let (subscription, version) = (SubscriptionId(1), Version(1));
            let committed =
                ClientMessage::Committed { subscription, epoch: publisher.epoch(), version, kept: false };
            member.peer.send_to_server(committed).await;
            publish(&server, &mut publisher, 2, u64::from(CHUNKS * CHUNK_BYTES)).await;
            assert!(next_announced(&mut member.peer).await, "it has said so by now");
        });
    }
    assert!(announced.contains(&true) && announced.contains(&false), "{announced:?}");
}

/// Waits for the next announcement; returns whether it is of a shared version.
async fn next_announced(peer: &mut Peer) -> bool {
    loop {
        if let ServerMessage::Announce(announce) = peer.receive_from_server().await {
            return announce.shared;
        }
    }
}

/// Goal: a peer that sent other bytes, as a client says, is named to that client no more, and to others as ever. Method: one
/// of two takers says so; also of somebody who was not named to it, which nobody notices.
#[test]
fn a_reported_peer_is_not_named_to_the_reporter() {
    simulate(1, async |sim| {
        let (_server, publisher) = serve(&sim, Access::new(rules()), &[]).await;
        let mut holder = Member::connect(&sim, 2, token()).await;
        let port = answer(listen(&sim, 2, 2), Answer::Proof, (holder.session, holder.grant), holder.key);
        let reported = async {
            holder.share(&[address_of(&sim, 2)]).await;
            holder.subscribe(0).await;
            let mut reporter = subscribed(&sim, 3).await;
            assert_eq!(reporter.named().await.map(|sources| sources.len()), Some(1));
            for key in [[9; 32], holder.key, holder.key] {
                let (subscription, epoch, version) = (SubscriptionId(1), publisher.epoch(), Version(1));
                let report = ClientMessage::BadPeer { subscription, epoch, version, key };
                reporter.peer.send_to_server(report).await;
            }
            let named = async {
                loop {
                    if let ServerMessage::Sources { sources, .. } = reporter.peer.receive_from_server().await
                    {
                        return sources;
                    }
                }
            };
            assert_eq!(timeout(PATIENCE, named).await.expect("it is told"), []);
            let mut other = subscribed(&sim, 4).await;
            assert_eq!(other.named().await.map(|sources| sources.len()), Some(1));
            let subscription = SubscriptionId(9);
            let (epoch, version) = (publisher.epoch(), Version(1));
            let of_nothing = ClientMessage::BadPeer { subscription, epoch, version, key: holder.key };
            other.peer.send_to_server(of_nothing).await;
            assert_eq!(other.peer.wait_for_close().await.0, Some(CloseCode::ProtocolViolation));
        };
        tokio::select! {
            () = reported => {}
            () = port => panic!("the port stays open"),
        }
    });
}

/// A client with this number that only takes.
async fn subscribed(sim: &Sim, number: u8) -> Member {
    let mut taker = Member::connect(sim, number, token()).await;
    taker.share(&[]).await;
    taker.subscribe(0).await;
    taker
}

/// Goal: a holder is told of rights that end, also if the taker was named it for an older version than the one that it
/// receives now; and of rights that come back. Method: a taker stays with version 1, when the holder has version 2; its ticket
/// is revoked, and then not any more.
#[test]
fn a_holder_of_an_older_version_is_told_of_rights_that_end_and_come_back() {
    simulate(1, async |sim| {
        let sender = watch::Sender::new(Arc::new(rules()));
        let (server, mut publisher) = serve(&sim, Access::following(sender.subscribe()), &[]).await;
        let mut holder = Member::connect(&sim, 2, token()).await;
        let port = answer(listen(&sim, 2, 2), Answer::Proof, (holder.session, holder.grant), holder.key);
        let right = || token_with(8, vec![Grant::everywhere(Verbs::CONSUME)]);
        let told = async {
            holder.share(&[address_of(&sim, 2)]).await;
            holder.subscribe(CHUNKS).await;
            let mut taker = Member::connect(&sim, 3, right()).await;
            taker.share(&[]).await;
            taker.subscribe(0).await;
            assert!(taker.named().await.is_some());
            let (subscription, version) = (SubscriptionId(1), Version(1));
            let committed =
                ClientMessage::Committed { subscription, epoch: publisher.epoch(), version, kept: false };
            holder.peer.send_to_server(committed).await;
            publish(&server, &mut publisher, 2, u64::from(CHUNKS * CHUNK_BYTES)).await;
            assert!(next_announced(&mut holder.peer).await);
            sender.send_replace(Arc::new(Rules { revoked: [TicketId([8; 8])].into(), ..rules() }));
            assert_eq!(next_revocation(&mut holder.peer).await, (taker.key, false));
            let mut late = subscribed(&sim, 4).await;
            assert_eq!(next_revocation(&mut late.peer).await, (taker.key, false), "it may be named to it");
            sender.send_replace(Arc::new(rules()));
            let mut again = Member::connect(&sim, 3, right()).await;
            again.share(&[]).await;
            again.subscribe(0).await;
            for member in [&mut holder, &mut late] {
                assert_eq!(next_revocation(&mut member.peer).await, (taker.key, true));
            }
        };
        tokio::select! {
            () = told => {}
            () = port => panic!("the port stays open"),
        }
    });
}

/// Goal: a holder is told of a right that comes back between two of its shared versions. Method: the right is lost while the
/// holder has version 1, and comes back while it has version 2, which is too small to be shared; the taker has version 3 before
/// the holder.
#[test]
fn a_right_that_comes_back_between_two_shared_versions_is_restored() {
    simulate(1, async |sim| {
        let sender = watch::Sender::new(Arc::new(rules()));
        let (server, mut publisher) = serve(&sim, Access::following(sender.subscribe()), &[]).await;
        let epoch = publisher.epoch();
        let committed = |version| {
            let (subscription, version) = (SubscriptionId(1), Version(version));
            ClientMessage::Committed { subscription, epoch, version, kept: false }
        };
        let mut holder = Member::connect(&sim, 2, token()).await;
        let port = answer(listen(&sim, 2, 2), Answer::Proof, (holder.session, holder.grant), holder.key);
        let right = || token_with(8, vec![Grant::everywhere(Verbs::CONSUME)]);
        let told = async {
            holder.share(&[address_of(&sim, 2)]).await;
            holder.subscribe(3 * CHUNKS).await;
            let mut taker = Member::connect(&sim, 3, right()).await;
            taker.share(&[]).await;
            taker.subscribe(0).await;
            assert!(taker.named().await.is_some());
            sender.send_replace(Arc::new(Rules { revoked: [TicketId([8; 8])].into(), ..rules() }));
            assert_eq!(next_revocation(&mut holder.peer).await, (taker.key, false));
            holder.peer.send_to_server(committed(1)).await;
            publish(&server, &mut publisher, 2, u64::from(CHUNK_BYTES)).await;
            assert!(!next_announced(&mut holder.peer).await, "it is small");
            sender.send_replace(Arc::new(rules()));
            publish(&server, &mut publisher, 3, u64::from(CHUNKS * CHUNK_BYTES)).await;
            let mut again = Member::connect(&sim, 3, right()).await;
            again.share(&[]).await;
            again.subscribe(0).await;
            tokio::time::sleep(Duration::from_secs(1)).await;
            holder.peer.send_to_server(committed(2)).await;
            assert_eq!(next_revocation(&mut holder.peer).await, (taker.key, true));
        };
        tokio::select! {
            () = told => {}
            () = port => panic!("the port stays open"),
        }
    });
}

/// The next `Revoke`, within ten seconds: whose right it is about, and whether it was restored.
async fn next_revocation(peer: &mut Peer) -> ([u8; 32], bool) {
    let told = async {
        loop {
            if let ServerMessage::Revoke { taker, restored, .. } = peer.receive_from_server().await {
                return (taker, restored);
            }
        }
    };
    timeout(Duration::from_secs(10), told).await.expect("within 10 s")
}

/// Goal: what only a member had that left is pushed to those that stay. Method: two holders that are sent a part each; one
/// leaves; the other one is sent everything.
#[test]
fn what_a_member_had_is_pushed_again_when_it_leaves() {
    simulate(1, async |sim| {
        let (_server, _publisher) = serve(&sim, Access::new(rules()), &[]).await;
        let mut members = vec![];
        for number in [2, 3] {
            members.push(Member::connect(&sim, number, token()).await);
        }
        let ports: Vec<_> = members
            .iter()
            .zip([2, 3])
            .map(|(member, number)| {
                let secret = (member.session, member.grant);
                tokio::spawn(answer(listen(&sim, number, number), Answer::Proof, secret, member.key))
            })
            .collect();
        for (member, number) in members.iter_mut().zip([2, 3]) {
            member.share(&[address_of(&sim, number)]).await;
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        for member in &mut members {
            member.subscribe(4).await;
        }
        let [mut stays, leaves] = <[Member; 2]>::try_from(members).ok().unwrap();
        let mut received = RangeSet::new();
        for _ in 0..2 {
            received.insert(next_chunk(&stays.peer).await);
        }
        leaves.peer.connection.close(0);
        // Each is credited when it arrived, as by an honest client.
        while received.len() < CHUNKS {
            stays
                .peer
                .send_to_server(ClientMessage::Credit { subscription: SubscriptionId(1), chunks: 1 })
                .await;
            let chunk = timeout(PATIENCE, next_chunk(&stays.peer)).await.expect("it is pushed");
            assert!(received.insert(chunk), "chunk {chunk} is pushed once");
        }
        ports.iter().for_each(|port| port.abort());
    });
}

/// The next chunk that is sent.
async fn next_chunk(peer: &Peer) -> u32 {
    next_stream(peer).await.0.chunk.0
}

/// The next chunk that is sent, and its encoded bytes.
async fn next_stream(peer: &Peer) -> (ChunkHeader, Vec<u8>) {
    loop {
        let mut bytes = peer.connection.accept_data().await.unwrap().read_to_end().await;
        let encoded = bytes.split_off(HEADER_BYTES);
        let header: [u8; HEADER_BYTES] = bytes.try_into().unwrap();
        if let StreamHeader::Chunk(header) = StreamHeader::decode(&header).unwrap() {
            return (header, encoded);
        }
    }
}

/// Goal: the origin vouches for exactly the bytes that it sends, once for each chunk, also to those that come later.
#[test]
fn what_is_sent_is_vouched_for() {
    simulate(1, async |sim| {
        let (_server, _publisher) = serve(&sim, Access::new(rules()), &[]).await;
        let mut first = Member::connect(&sim, 2, token()).await;
        first.share(&[]).await;
        first.subscribe(CHUNKS).await;
        let mut sent = BTreeMap::new();
        while sent.len() < CHUNKS as usize {
            let (header, bytes) = next_stream(&first.peer).await;
            let mut hasher = EncodingHasher::new(&header);
            hasher.update(&bytes);
            let entry = EncodingEntry {
                chunk: header.chunk,
                codec: header.codec,
                base: header.base,
                hash: hasher.finish(),
            };
            assert!(sent.insert(header.chunk.0, entry).is_none());
        }
        let mut second = Member::connect(&sim, 3, token()).await;
        second.share(&[]).await;
        second.subscribe(0).await;
        for member in [&mut first, &mut second] {
            let mut told = BTreeMap::new();
            while told.len() < CHUNKS as usize {
                if let ServerMessage::Encodings { entries, .. } = member.peer.receive_from_server().await {
                    for entry in entries {
                        assert!(told.insert(entry.chunk.0, entry).is_none(), "{entry:?} is named once");
                    }
                }
            }
            assert_eq!(told, sent);
        }
    });
}

/// Goal: a client that says far too often what it holds delays nothing else in its session. Method: a list is asked for
/// behind so many messages that to handle them takes 15 s.
#[test]
fn what_a_client_holds_delays_nothing_else() {
    simulate(1, async |sim| {
        let (_server, publisher) = serve(&sim, Access::new(rules()), &[]).await;
        let mut member = subscribed(&sim, 2).await;
        for chunk in (0..CHUNKS).cycle().take(400) {
            let (subscription, epoch, version) = (SubscriptionId(1), publisher.epoch(), Version(1));
            let (added, withdrawn) = (RangeSet::from_range(chunk..chunk + 1), RangeSet::new());
            let held = Held { subscription, epoch, version, added, withdrawn };
            member.peer.send_to_server(ClientMessage::Held(held)).await;
        }
        member.peer.send_to_server(ClientMessage::List).await;
        let listed = async {
            while !matches!(member.peer.receive_from_server().await, ServerMessage::Topics { .. }) {}
        };
        timeout(Duration::from_secs(5), listed).await.expect("nothing waits");
    });
}

/// Goal: members that come together are named together. Method: a taker, and then eight holders within a moment.
#[test]
fn sources_are_named_together() {
    simulate(1, async |sim| {
        let (_server, _publisher) = serve(&sim, Access::new(rules()), &[]).await;
        let mut taker = Member::connect(&sim, 100, token()).await;
        taker.share(&[]).await;
        taker.subscribe(0).await;
        let (mut holders, mut ports) = (vec![], vec![]);
        for number in 2..10 {
            let mut holder = Member::connect(&sim, number, token()).await;
            let secret = (holder.session, holder.grant);
            let port = answer(listen(&sim, number, number), Answer::Proof, secret, holder.key);
            ports.push(tokio::spawn(port));
            holder.share(&[address_of(&sim, number)]).await;
            holder.subscribe(0).await;
            holders.push(holder);
        }
        let mut lists = vec![];
        while lists.last() != Some(&holders.len()) {
            lists.push(taker.named().await.expect("all are named").len());
        }
        assert!(lists.len() <= 5, "{lists:?}");
        ports.iter().for_each(|port| port.abort());
    });
}

/// Goal: a server that does not let clients share offers nothing of it, and to a client that does not ask it says nothing.
#[test]
fn sharing_is_offered_to_those_that_ask_and_if_it_is_on() {
    for (is_on, asks, expected) in [(true, true, true), (true, false, false), (false, true, false)] {
        simulate(1, async |sim| {
            let config = if is_on { origin(&sim, &[]) } else { server_config() };
            let _server = sim.server(config);
            let mut peer = Peer::client(&sim, 2).await;
            let features = FeatureSet::default();
            let features = if asks { features.with(Feature::Peers) } else { features };
            peer.send_to_server(ClientMessage::Hello(Hello { features, ..hello() })).await;
            let ServerMessage::Welcome(welcome) = peer.receive_from_server().await else { panic!() };
            assert_eq!(welcome.features.contains(Feature::Peers), expected);
            if !expected {
                let share = Share { addresses: vec![], key: Some([1; 32]), site: Site::default() };
                peer.send_to_server(ClientMessage::Share(share)).await;
                assert_eq!(peer.wait_for_close().await.0, Some(CloseCode::ProtocolViolation));
            }
        });
    }
}

/// Goal: what members say of chunks, versions and subscriptions that they do not have harms nobody.
#[test]
fn what_is_held_of_nothing_is_passed_over() {
    simulate(1, async |sim| {
        let (server, publisher) = serve(&sim, Access::new(rules()), &[]).await;
        let mut member = Member::connect(&sim, 2, token()).await;
        member.share(&[]).await;
        member.subscribe(0).await;
        let version = publisher.next_id();
        let held = |subscription, version| {
            let added = RangeSet::from_range(0..u32::MAX);
            let withdrawn = RangeSet::new();
            ClientMessage::Held(Held { subscription, epoch: publisher.epoch(), version, added, withdrawn })
        };
        member.peer.send_to_server(held(SubscriptionId(1), version.version)).await;
        member.peer.send_to_server(held(SubscriptionId(1), Version(1))).await;
        member.peer.send_to_server(ClientMessage::List).await;
        loop {
            match member.peer.receive_from_server().await {
                ServerMessage::Topics { .. } => break,
                ServerMessage::Sources { .. } | ServerMessage::Encodings { .. } => {}
                ServerMessage::Complete { .. } => {}
                other => panic!("{other:?}"),
            }
        }
        tokio::time::sleep(Duration::from_secs(1)).await; // The subscription handles it.
        let swarm = server.status_reader().read().unwrap().topics.remove(0).swarm;
        assert_eq!((swarm.members_count, swarm.members[0].held_chunks), (1, CHUNKS));
        assert_eq!(
            swarm.from_peers_bytes,
            u64::from(CHUNKS * CHUNK_BYTES),
            "it was sent nothing by the origin"
        );
        member.peer.send_to_server(held(SubscriptionId(9), version.version)).await;
        assert_eq!(member.peer.wait_for_close().await.0, Some(CloseCode::ProtocolViolation));
    });
}
