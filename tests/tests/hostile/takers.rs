//! Takers of a member's port, honest and hostile (PROTOCOL.md §3.15).

use std::{
    ops::Range,
    sync::{Arc, Weak},
    time::Duration,
};
use tensor_relay_device::{Capacity, HostMemory, HostSink, SlotPool};
use tensor_relay_protocol::{
    AbortReason, ChunkHash, ChunkHeader, ChunkIndex, ClientMessage, CloseCode, CodecId, CodecSet, Context,
    Dtype, EncodingEntry, EncodingHash, EncodingHasher, EndReason, Epoch, Feature, FeatureSet, Held, Hello,
    LaneGrant, Limits, Manifest, PeerSecret, RangeSet, RelayPath, ServerMessage, Start, StreamHeader,
    Subscribe, SubscriptionId, Version, VersionId, codec,
};
use tensor_relay_server::{Access, ForwardOptions, Rules, Server};
use tensor_relay_tests::{
    pair::{Sim, eventually, server_config, simulate, topic},
    tensors,
};
use tensor_relay_transport::{
    DataIn, Fingerprint, Identity, Lane, LaneError, Progress, Workers, control,
    control::ControlError,
    forwarding::{Forward, Forwarded, Origin, ReceivedMemory, ReceivedVersion},
    ingress::{Base, Ingress, ReceiveError},
};

const CHUNK_BYTES: u32 = 64 << 10;
const CHUNKS: u32 = 4;
const EPOCH: Epoch = Epoch(5);
const SESSION: u64 = 7;
const TIMEOUT: Duration = Duration::from_secs(10);

fn lanes(byte: u8) -> LaneGrant {
    LaneGrant::new([byte; 32])
}

/// A member's server, which a client feeds.
struct Member {
    server: Server,
    forward: Arc<dyn Forward>,
}

impl Member {
    fn start(sim: &Sim) -> Self {
        let server = sim.server_with(Access::new(Rules::default()), server_config());
        let options =
            ForwardOptions { key: sim.identity().fingerprint(), kept_bytes: Some(1 << 20), rate: None };
        let forward = server.forward(options);
        forward.set_origin(Origin::Session(SESSION, lanes(1)));
        Self { server, forward }
    }

    /// Begins a version.
    fn begin(&self, version: u64) -> Content {
        let specs = vec![tensors::weights("weights", u64::from(CHUNKS * CHUNK_BYTES) / 2)];
        let manifest = Arc::new(Manifest::layout(specs, vec![], CHUNK_BYTES, &Limits::default()).unwrap());
        let mut payload = vec![0; manifest.payload_bytes() as usize];
        tensors::write_content("weights", version, &mut payload);
        let memory = Arc::new(Memory(payload));
        let id = VersionId { topic: topic("t"), epoch: EPOCH, version: Version(version) };
        let forwarded = self.forward.begin(ReceivedVersion {
            id,
            manifest: Arc::clone(&manifest),
            metadata: tensors::metadata(version),
            shared: true,
            relays: RelayPath::default(),
            memory: Some(Arc::clone(&memory) as Arc<dyn ReceivedMemory>),
        });
        Content { version, manifest, memory, forwarded: forwarded.unwrap() }
    }
}

/// The memory of a version that is received.
#[derive(Debug)]
struct Memory(Vec<u8>);

impl ReceivedMemory for Memory {
    fn copy(&self, range: Range<u64>, out: &mut [u8]) -> bool {
        out.copy_from_slice(&self.0[range.start as usize..range.end as usize]);
        true
    }
}

/// A version that arrives at a member.
struct Content {
    version: u64,
    manifest: Arc<Manifest>,
    memory: Arc<Memory>,
    forwarded: Arc<dyn Forwarded>,
}

impl Content {
    fn raw(&self, chunk: u32) -> &[u8] {
        let (range, _) = self.manifest.chunk(ChunkIndex(chunk));
        &self.memory.0[range.start as usize..range.end as usize]
    }

    /// The base for deltas: the same with few other bytes.
    fn base(&self, chunk: u32) -> Vec<u8> {
        let mut base = self.raw(chunk).to_vec();
        base.iter_mut().step_by(997).for_each(|byte| *byte ^= 0x55);
        base
    }

    /// A chunk in `codec`, as the origin sends it.
    fn encode(&self, chunk: u32, codec_id: CodecId) -> (ChunkHeader, Vec<u8>) {
        let (raw, base) = (self.raw(chunk), self.base(chunk));
        let context = Context { dtype: Dtype::Bf16, base: codec_id.needs_base().then_some(&base[..]) };
        let mut encoded = vec![0; 2 * raw.len()];
        let written = codec(codec_id).encode(context, raw, &mut encoded).unwrap();
        encoded.truncate(written);
        let header = ChunkHeader {
            subscription: SubscriptionId(99),
            epoch: EPOCH,
            version: Version(self.version),
            chunk: ChunkIndex(chunk),
            codec: codec_id,
            raw_bytes: raw.len() as u32,
            encoded_bytes: written as u32,
            hash: ChunkHash::of(raw),
            base: codec_id.needs_base().then_some(Version(1)),
        };
        (header, encoded)
    }

    /// Handles the arrival of a chunk in `codec`, with the origin's entry; returns that.
    fn arrive(&self, chunk: u32, codec: CodecId) -> EncodingEntry {
        let (header, encoded) = self.encode(chunk, codec);
        let hash = hash_of(&header, &encoded);
        let entry = EncodingEntry { chunk: header.chunk, codec, base: header.base, hash };
        let kept = self.forwarded.keep(&header, &encoded);
        assert!(self.forwarded.handle_verified(&header, kept));
        self.forwarded.handle_encodings(&[entry]);
        entry
    }

    fn arrive_all(&self) {
        for chunk in 0..CHUNKS {
            self.arrive(chunk, CodecId::Raw);
        }
    }
}

fn hash_of(header: &ChunkHeader, encoded: &[u8]) -> EncodingHash {
    let mut hasher = EncodingHasher::new(header);
    hasher.update(encoded);
    hasher.finish()
}

fn hello() -> Hello {
    Hello {
        revision_min: 1,
        revision_max: 1,
        agent: "a taker".into(),
        codecs: CodecSet::all(),
        token: None,
        features: FeatureSet::OF_CLIENT.with(Feature::Peers),
    }
}

fn subscribe(id: u32, version: u64, grant: LaneGrant) -> Subscribe {
    Subscribe {
        start: Start::Exactly(Some(EPOCH), Version(version)),
        once: true,
        grant: Some(grant),
        ..Subscribe::latest(SubscriptionId(id), topic("t"), 0)
    }
}

fn chunks(chunks: Range<u32>) -> RangeSet {
    RangeSet::from_range(chunks)
}

/// A connection to a member's port.
struct Taker {
    key: [u8; 32],
    lane: Lane,
    sender: control::Sender<ClientMessage>,
    receiver: control::Receiver<ServerMessage>,
}

impl Taker {
    /// Connects from the host with this number, with a certificate.
    async fn connect(sim: &Sim, number: u8, identity: &Arc<Identity>) -> Self {
        let (ticket, keys) = (sim.bare_ticket(), [sim.identity().fingerprint()]);
        let connector = sim.connector(number).with_identity(Arc::clone(identity));
        let lane = connector.connect(ticket.addresses(), &keys).await.unwrap();
        let (sender, receiver) = control::open(&lane, TIMEOUT).await.unwrap();
        let Fingerprint(key) = identity.fingerprint();
        Self { key, lane, sender, receiver }
    }

    /// Connects with a key of its own, and is welcomed.
    async fn welcomed(sim: &Sim, number: u8) -> Self {
        Self::welcomed_as(sim, number, &Arc::new(Identity::ephemeral().unwrap())).await
    }

    async fn welcomed_as(sim: &Sim, number: u8, identity: &Arc<Identity>) -> Self {
        let mut taker = Self::connect(sim, number, identity).await;
        taker.send(ClientMessage::Hello(hello())).await;
        let ServerMessage::Welcome(welcome) = taker.receive().await else { panic!("it is welcomed") };
        assert!(welcome.features.contains(Feature::Peers));
        taker
    }

    /// Its grant for a version, by the session with this byte.
    fn grant(&self, byte: u8, version: u64) -> LaneGrant {
        PeerSecret::of(&lanes(byte)).grant(&topic("t"), (EPOCH, Version(version)), &self.key)
    }

    async fn send(&self, message: ClientMessage) {
        let _ = self.sender.send(message).await; // It may have been disconnected, as it should.
    }

    async fn take(&self, id: u32, version: u64) {
        self.send(ClientMessage::Subscribe(subscribe(id, version, self.grant(1, version))))
            .await;
    }

    async fn request(&self, id: u32, version: u64, chunks: RangeSet, hashes: bool) {
        let (subscription, epoch, version) = (SubscriptionId(id), EPOCH, Version(version));
        self.send(ClientMessage::Request { subscription, epoch, version, chunks, hashes, again: false })
            .await;
    }

    async fn receive(&mut self) -> ServerMessage {
        self.receiver.next().await.unwrap()
    }

    async fn receive_held(&mut self) -> Held {
        match self.receive().await {
            ServerMessage::Held(held) => held,
            other => panic!("{other:?}"),
        }
    }

    /// Takes a version that is on offer, and asks for nothing yet; returns what is held.
    async fn begin(&mut self, id: u32, version: u64) -> RangeSet {
        self.take(id, version).await;
        let announce = self.receive().await;
        assert!(matches!(&announce, ServerMessage::Announce(it) if it.shared), "{announce:?}");
        let (manifest, _) = self.receive_header().await;
        assert!(matches!(manifest, StreamHeader::Manifest(_)));
        self.receive_held().await.added
    }

    async fn receive_header(&mut self) -> (StreamHeader, DataIn) {
        let mut stream = self.lane.accept_data().await.unwrap();
        (stream.read_header().await.unwrap(), stream)
    }

    /// Receives a chunk of `content`, whose encoding is to be the `expected` one.
    async fn receive_chunk(
        &mut self,
        content: &Content,
        expected: EncodingHash,
    ) -> Result<(ChunkHeader, Vec<u8>), ReceiveError> {
        let (header, stream) = self.receive_header().await;
        let StreamHeader::Chunk(header) = header else { panic!("{header:?}") };
        let slots = SlotPool::new(Capacity { slots: 1, slot_bytes: 2 * CHUNK_BYTES as usize }).unwrap();
        let (ingress, memory) = (Ingress::new(slots, Workers::Inline), HostMemory::new(u64::MAX));
        let sink = HostSink::new(memory.allocate(header.raw_bytes as usize).unwrap());
        let (range, progress): (_, Progress) = (0..header.raw_bytes.into(), Arc::new(|_| ()));
        let expected = Some(expected);
        let gathered = ingress.gather_chunk(stream, &header, range, &sink, &progress, expected).await?;
        let mut base = memory.allocate(header.raw_bytes as usize).unwrap();
        base.copy_from_slice(&content.base(header.chunk.0));
        let base = header.base.map(|_| Base { memory: base, keep: false });
        let (verified, _) = ingress.finish_chunk(gathered, Dtype::Bf16, &sink, base, None).await?;
        assert_eq!(verified.hash(), header.hash);
        Ok((header, sink.commit().unwrap()[0].to_vec()))
    }

    /// Waits until the member closes the connection, and returns the code.
    async fn closed(&mut self) -> CloseCode {
        loop {
            match self.receiver.next().await {
                Ok(_) => {}
                Err(ControlError::Lane(LaneError::ClosedByPeer { code: Some(code), .. })) => return code,
                Err(other) => panic!("{other:?}"),
            }
        }
    }
}

/// Goal: a taker gets a version while it arrives, each chunk exactly as the origin encoded it. Method: take it before it
/// begins, then let chunks arrive in four codecs, and compare the bytes with the origin's entries.
#[test]
fn a_taker_gets_chunks_as_they_arrive_and_as_they_came() {
    simulate(1, async |sim| {
        let member = Member::start(&sim);
        let mut taker = Taker::welcomed(&sim, 2).await;
        taker.take(1, 2).await;
        tokio::time::sleep(Duration::from_secs(8)).await; // Longer than it may stay without a grant.
        let content = member.begin(2);
        let announce = taker.receive().await;
        assert!(
            matches!(&announce, ServerMessage::Announce(it) if it.shared && !it.may_be_base),
            "{announce:?}"
        );
        let (manifest, _) = taker.receive_header().await;
        assert!(matches!(manifest, StreamHeader::Manifest(it) if it.digest == content.manifest.digest()));
        assert!(taker.receive_held().await.added.is_empty(), "it is told at once, if nothing is here");
        let codecs = [CodecId::Raw, CodecId::Zstd, CodecId::BitPlanes, CodecId::Sparse];
        for (chunk, codec) in (0..).zip(codecs) {
            let entry = content.arrive(chunk, codec);
            let held = taker.receive_held().await;
            assert_eq!((held.added, held.withdrawn), (chunks(chunk..chunk + 1), RangeSet::new()));
            taker.request(1, 2, chunks(chunk..chunk + 1), false).await;
            let (header, bytes) = taker.receive_chunk(&content, entry.hash).await.unwrap();
            assert_eq!((header.subscription, header.codec), (SubscriptionId(1), codec));
            assert!(bytes == content.raw(chunk), "{codec:?}");
        }
        content.forwarded.handle_committed(None);
        let complete = taker.receive().await;
        assert!(matches!(complete, ServerMessage::Complete { .. }), "{complete:?}");
        assert_eq!(member.server.stats().committed, 0, "takers are no subscribers");
        let mut other = Taker::welcomed(&sim, 3).await;
        assert_eq!(other.begin(1, 2).await, chunks(0..CHUNKS));
        other.request(1, 2, chunks(0..CHUNKS), false).await;
        for _ in 0..CHUNKS {
            let refused = other.receive_chunk(&content, EncodingHash([0; 32])).await;
            assert!(matches!(refused, Err(ReceiveError::OtherEncoding { .. })), "{refused:?}");
        }
    });
}

/// Goal: a taker never delays the receiver: its memory is free at once when a version is given up, whatever takers do.
/// Method: a taker that requests everything and reads nothing.
#[test]
fn a_version_that_is_given_up_is_free_at_once() {
    simulate(1, async |sim| {
        let member = Member::start(&sim);
        let content = member.begin(2);
        content.arrive_all();
        let mut taker = Taker::welcomed(&sim, 2).await;
        assert_eq!(taker.begin(1, 2).await, chunks(0..CHUNKS));
        taker.request(1, 2, chunks(0..CHUNKS), false).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        let memory: Weak<Memory> = Arc::downgrade(&content.memory);
        drop(content);
        assert!(memory.upgrade().is_none(), "nobody holds it");
        loop {
            match taker.receive().await {
                ServerMessage::Abort { reason, .. } => break assert_eq!(reason, AbortReason::Withdrawn),
                ServerMessage::Held(_) | ServerMessage::Complete { .. } => {}
                other => panic!("{other:?}"),
            }
        }
        let newer = member.begin(3);
        newer.arrive_all();
        taker.take(2, 3).await;
        loop {
            match taker.receive().await {
                ServerMessage::Announce(announce) => break assert_eq!(announce.id.version, Version(3)),
                ServerMessage::Held(_) | ServerMessage::Complete { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    });
}

/// Goal: a chunk that its user has overwritten is not sent, but withdrawn.
#[test]
fn what_is_overwritten_is_withdrawn() {
    simulate(1, async |sim| {
        let member = Member::start(&sim);
        let content = member.begin(2);
        content.arrive_all();
        let (mut header, _) = content.encode(1, CodecId::Raw);
        header.hash = ChunkHash::of(b"what was there before");
        let other = member.begin(3);
        header.version = Version(3);
        assert!(other.forwarded.handle_verified(&header, None));
        other.forwarded.handle_encodings(&[EncodingEntry {
            chunk: ChunkIndex(1),
            codec: CodecId::Raw,
            base: None,
            hash: EncodingHash([0; 32]),
        }]);
        let mut taker = Taker::welcomed(&sim, 2).await;
        assert_eq!(taker.begin(1, 3).await, chunks(1..2));
        taker.request(1, 3, chunks(1..2), false).await;
        assert_eq!(taker.receive_held().await.withdrawn, chunks(1..2));
    });
}

/// Goal: a grant is of use to one taker, for one version of one topic. Method: stolen, replayed and made up ones.
#[test]
fn other_grants_are_refused() {
    simulate(1, async |sim| {
        let member = Member::start(&sim);
        let content = member.begin(2);
        content.arrive_all();
        for attack in 0..5 {
            let (owner, mut thief) = (Taker::welcomed(&sim, 2).await, Taker::welcomed(&sim, 3).await);
            let wanted = match attack {
                0 => subscribe(1, 2, owner.grant(1, 2)), // Stolen.
                1 => subscribe(1, 2, thief.grant(1, 3)), // Of another version.
                2 => subscribe(1, 2, thief.grant(2, 2)), // By another origin.
                3 => Subscribe { topic: topic("u"), ..subscribe(1, 2, thief.grant(1, 2)) },
                _ => subscribe(1, 2, lanes(0)),
            };
            thief.send(ClientMessage::Subscribe(wanted)).await;
            assert_eq!(thief.closed().await, CloseCode::Unauthorised, "{attack}");
        }
        let mut anonymous = {
            let (ticket, keys) = (sim.bare_ticket(), [sim.identity().fingerprint()]);
            let lane = sim.connector(4).connect(ticket.addresses(), &keys).await.unwrap();
            let (sender, receiver) = control::open(&lane, TIMEOUT).await.unwrap();
            Taker { key: [0; 32], lane, sender, receiver }
        };
        anonymous.send(ClientMessage::Hello(hello())).await;
        assert_eq!(anonymous.closed().await, CloseCode::Unauthorised, "without a certificate");
    });
}

/// Goal: a taker loses what it was granted when it is revoked, and when the origin or the member ended the session, at once,
/// but not while the origin is lost. Method: each during a take.
#[test]
fn grants_end() {
    for cause in 0..4 {
        simulate(1, async |sim| {
            let member = Member::start(&sim);
            let content = member.begin(2);
            content.arrive_all();
            let mut taker = Taker::welcomed(&sim, 2).await;
            taker.begin(1, 2).await;
            let began = sim.elapsed();
            match cause {
                0 => member.forward.revoke(&topic("t"), taker.key, false),
                1 => member.forward.set_origin(Origin::Ended),
                2 => member.forward.end(&topic("t"), EndReason::Forbidden),
                _ => member.forward.set_origin(Origin::Lost),
            }
            if cause == 3 {
                assert_eq!(taker.begin(2, 2).await, chunks(0..CHUNKS));
                taker.request(1, 2, chunks(0..CHUNKS), false).await;
                let complete = taker.receive().await;
                return assert!(matches!(complete, ServerMessage::Complete { .. }), "{complete:?}");
            }
            let ended = loop {
                match taker.receive().await {
                    ServerMessage::Held(_) => {} // Everything is withdrawn.
                    other => break other,
                }
            };
            let (subscription, reason) = (SubscriptionId(1), EndReason::Forbidden);
            assert_eq!(ended, ServerMessage::End { subscription, reason }, "{cause}");
            assert!(sim.elapsed() - began < Duration::from_secs(1));
            taker.take(2, 2).await;
            match cause {
                0 => {
                    let (subscription, reason) = (SubscriptionId(2), EndReason::Forbidden);
                    assert_eq!(taker.receive().await, ServerMessage::End { subscription, reason });
                }
                1 => assert_eq!(taker.closed().await, CloseCode::Unauthorised),
                _ => {} // The session lives, and so does its grant.
            }
        });
    }
}

/// Goal: those who show no grant keep out nobody for longer than five seconds, and are disconnected. Method: connections
/// from two hosts, more than there are places, and then an honest taker.
#[test]
fn connections_without_a_grant_are_few_and_short() {
    simulate(1, async |sim| {
        let member = Member::start(&sim);
        let content = member.begin(2);
        content.arrive_all();
        let mut silent = vec![];
        for number in 0..24 {
            silent.push(Taker::welcomed(&sim, 2 + number % 2).await);
        }
        let mut honest = Taker::welcomed(&sim, 9).await;
        assert_eq!(honest.begin(1, 2).await, chunks(0..CHUNKS));
        let mut codes = vec![];
        for mut taker in silent {
            codes.push(taker.closed().await);
        }
        let evicted = codes.iter().filter(|code| **code == CloseCode::TooBusy).count();
        let late = codes.iter().filter(|code| **code == CloseCode::TimedOut).count();
        assert_eq!((evicted, late), (9, 15), "{codes:?}");
        eventually("only the honest one remains", || member.server.stats().sessions == 1).await;
    });
}

/// Goal: one taker has four connections, and others have places all the same; an idle one is disconnected.
#[test]
fn takers_have_bounded_connections() {
    simulate(1, async |sim| {
        let member = Member::start(&sim);
        let content = member.begin(2);
        content.arrive_all();
        let identity = Arc::new(Identity::ephemeral().unwrap());
        let mut takers = vec![];
        for _ in 0..4 {
            let mut taker = Taker::welcomed_as(&sim, 2, &identity).await;
            taker.begin(1, 2).await;
            takers.push(taker);
        }
        let mut fifth = Taker::welcomed_as(&sim, 2, &identity).await;
        fifth.take(1, 2).await;
        assert_eq!(fifth.closed().await, CloseCode::TooBusy);
        Taker::welcomed(&sim, 2).await.begin(1, 2).await;
        for id in 2..=9 {
            takers[0].take(id, 2).await;
        }
        let ended = loop {
            if let ServerMessage::End { subscription, reason } = takers[0].receive().await {
                break (subscription, reason);
            }
        };
        assert_eq!(ended, (SubscriptionId(9), EndReason::TooManySubscriptions));
        let (mut idle, began) = (takers.pop().unwrap(), sim.elapsed());
        idle.send(ClientMessage::Unsubscribe { subscription: SubscriptionId(1), keep_place: false })
            .await;
        assert_eq!(idle.closed().await, CloseCode::Done);
        assert!((59..=62).contains(&(sim.elapsed() - began).as_secs()));
    });
}

/// Goal: a taker has nothing but what it was granted, and breaks no rule unpunished.
#[test]
fn a_taker_may_only_take() {
    simulate(1, async |sim| {
        let member = Member::start(&sim);
        let content = member.begin(2);
        content.arrive_all();
        let mut taker = Taker::welcomed(&sim, 2).await;
        taker.send(ClientMessage::List).await;
        let listed = taker.receive().await;
        assert!(matches!(&listed, ServerMessage::Topics { topics, .. } if topics.is_empty()), "{listed:?}");
        taker
            .send(ClientMessage::Subscribe(Subscribe { grant: None, ..subscribe(1, 2, lanes(1)) }))
            .await;
        let (subscription, reason) = (SubscriptionId(1), EndReason::Forbidden);
        assert_eq!(taker.receive().await, ServerMessage::End { subscription, reason });
        taker.begin(2, 2).await;
        taker.request(2, 2, RangeSet::new(), true).await;
        let (subscription, reason) = (SubscriptionId(2), EndReason::NotSupported);
        assert_eq!(
            taker.receive().await,
            ServerMessage::End { subscription, reason },
            "hashes come from the origin"
        );
        let wanted = Subscribe { credit: 4, ..subscribe(3, 2, taker.grant(1, 2)) };
        taker.send(ClientMessage::Subscribe(wanted)).await;
        assert_eq!(taker.closed().await, CloseCode::ProtocolViolation);
    });
}

/// Goal: an origin that dials back gets a proof for its session and this port, and others get nothing. Method: check the
/// proof; another session; a message after it; other first messages.
#[test]
fn a_check_is_answered_once_and_for_the_session_that_lives() {
    simulate(1, async |sim| {
        let member = Member::start(&sim);
        let identity = Arc::new(Identity::ephemeral().unwrap());
        let nonce = [9; 32];
        let mut origin = Taker::connect(&sim, 2, &identity).await;
        origin.send(ClientMessage::Check { session: SESSION, nonce }).await;
        let proof = PeerSecret::of(&lanes(1)).proof(&nonce, &sim.identity().fingerprint().0);
        assert_eq!(origin.receive().await, ServerMessage::Checked { proof });
        origin.send(ClientMessage::Check { session: SESSION, nonce }).await;
        assert_eq!(origin.closed().await, CloseCode::ProtocolViolation);
        member.forward.set_origin(Origin::Lost);
        let (subscription, version) = (SubscriptionId(1), Version(2));
        let held =
            Held { subscription, epoch: EPOCH, version, added: chunks(0..1), withdrawn: RangeSet::new() };
        for (first, code) in [
            (ClientMessage::Check { session: SESSION, nonce }, CloseCode::Unauthorised),
            (ClientMessage::Check { session: SESSION + 1, nonce }, CloseCode::Unauthorised),
            (ClientMessage::Held(held), CloseCode::ProtocolViolation),
            (ClientMessage::Subscribe(subscribe(1, 2, lanes(1))), CloseCode::ProtocolViolation),
        ] {
            let mut other = Taker::connect(&sim, 3, &identity).await;
            other.send(first).await;
            assert_eq!(other.closed().await, code);
        }
        drop(member);
    });
}
