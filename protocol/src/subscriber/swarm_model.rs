//! A property test of a subscriber that receives a shared version: any events of its origin and of honest, lying and silent
//! peers, compared with a model of what each of them owes.

use super::{
    fixtures::{
        EPOCH, SUBSCRIPTION, announce, codecs, digest, hash, header, manifest, now, request, verified,
    },
    *,
};
use crate::{
    Announce, ChunkHeader, ChunkIndex, CodecId, EncodingEntry, EncodingHash, Held, LaneGrant, Mode, Source,
};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const CHUNKS: u32 = 11;
const CREDIT: u32 = 3;
const FURTHER: u32 = 2;
const VERSION: (Epoch, Version) = (EPOCH, Version(1));
const STALL_TIMEOUT: Duration = Duration::from_secs(30);

/// The peers' ways, by their keys.
const HONEST: [u8; 2] = [0, 1];
const LIAR: u8 = 2;
const SILENT: u8 = 3;
const KEYS: u8 = 4;

/// One event. A `usize` selects one of several candidates: it is an index modulo their number.
#[derive(Debug, Clone, Copy)]
enum Step {
    /// The origin names the encodings of the chunks with these bits.
    Entries(u32),
    /// The origin names the peers with these bits, and says whether it pushes no more.
    Sources(u8, bool),
    /// The driver connects to a peer, which announces the version.
    Connect(u8),
    /// A peer can send the chunks with these bits, and no longer those with the others.
    Held(u8, u32),
    /// The origin begins a chunk that it pushes.
    Push(usize),
    /// The origin begins a chunk that it was asked for.
    Answer(usize),
    /// A peer begins a chunk that it was asked for; a liar in this way.
    Send(u8, usize, u8),
    /// The header of a begun chunk arrives.
    Header(usize),
    /// All bytes of a chunk have arrived.
    End(usize),
    Hashes(u32),
    /// A lane of the origin is retired, with all streams on it.
    Retire,
    /// The connection to a peer is lost.
    Lose(u8),
    /// The connection to the origin is lost, and another one opened.
    Reconnect,
    /// Another one has announced the version.
    Announce,
    Complete,
    Tick,
}

fn any_step() -> impl Strategy<Value = Step> {
    let (key, which, bits) = (0..KEYS, 0usize..64, any::<u32>());
    prop_oneof![
        4 => bits.prop_map(Step::Entries),
        3 => (0u8..16, any::<bool>()).prop_map(|(keys, is_seeded)| Step::Sources(keys, is_seeded)),
        4 => key.clone().prop_map(Step::Connect),
        6 => (key.clone(), bits).prop_map(|(key, chunks)| Step::Held(key, chunks)),
        4 => which.clone().prop_map(Step::Push),
        4 => which.clone().prop_map(Step::Answer),
        10 => (key.clone(), which.clone(), 0u8..6).prop_map(|(key, which, lie)| Step::Send(key, which, lie)),
        12 => which.clone().prop_map(Step::Header),
        12 => which.prop_map(Step::End),
        2 => (1u32..5).prop_map(Step::Hashes),
        1 => Just(Step::Retire),
        1 => key.prop_map(Step::Lose),
        1 => Just(Step::Reconnect),
        2 => Just(Step::Announce),
        1 => Just(Step::Complete),
        3 => Just(Step::Tick),
    ]
}

/// A chunk's stream, and what is wrong with it.
#[derive(Debug, Clone, Copy)]
struct Stream {
    token: StreamToken,
    source: SubscriptionId,
    chunk: u32,
    lie: Lie,
    has_arrived: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lie {
    None,
    /// The header has another codec.
    Codec,
    /// The header has another size.
    Size,
    /// The header has another hash.
    Hash,
    /// The encoding is another one.
    Encoding,
    /// The encoding is the one that the origin named, and decodes to nothing.
    Content,
}

/// What a peer owes.
#[derive(Debug)]
struct Peer {
    key: u8,
    owed: BTreeSet<u32>,
    held: BTreeSet<u32>,
}

struct World {
    subscriber: Subscriber,
    now: Instant,
    received_bytes: u64,
    // The origin.
    is_announced: bool,
    credit: u32,
    begun: BTreeSet<u32>,
    requested: BTreeSet<u32>,
    /// How much of the list of hashes was sent, once it was asked for.
    listed: Option<u32>,
    named: BTreeSet<u32>,
    is_complete: bool,
    was_retired: bool,
    // The peers.
    peers: BTreeMap<SubscriptionId, Peer>,
    usable: BTreeSet<u8>,
    barred: BTreeSet<u8>,
    next_source: u32,
    // The network and the memory.
    streams: Vec<Stream>,
    next_stream: u64,
    writing: BTreeMap<StreamToken, u32>,
    held: BTreeSet<u32>,
    is_committed: bool,
}

fn all() -> BTreeSet<u32> {
    (0..CHUNKS).collect()
}

fn bits(bits: u32) -> RangeSet {
    (0..CHUNKS)
        .filter(|chunk| bits & 1 << chunk != 0)
        .map(|chunk| chunk..chunk + 1)
        .collect()
}

/// The shared encoding of a chunk. Every fourth one cannot be decoded here.
fn entry(chunk: u32) -> EncodingEntry {
    let (codec, base) =
        if chunk % 4 == 3 { (CodecId::Sparse, Some(Version(7))) } else { (CodecId::Raw, None) };
    EncodingEntry { chunk: ChunkIndex(chunk), codec, base, hash: EncodingHash([chunk as u8; 32]) }
}

impl World {
    fn new() -> Self {
        let began = now();
        let mut world = Self {
            subscriber: Subscriber::new(request(Mode::Latest, CREDIT), codecs(), STALL_TIMEOUT, began),
            now: began,
            received_bytes: 0,
            is_announced: false,
            credit: 0,
            begun: BTreeSet::new(),
            requested: BTreeSet::new(),
            listed: None,
            named: BTreeSet::new(),
            is_complete: false,
            was_retired: false,
            peers: BTreeMap::new(),
            usable: BTreeSet::new(),
            barred: BTreeSet::new(),
            next_source: 100,
            streams: vec![],
            next_stream: 0,
            writing: BTreeMap::new(),
            held: BTreeSet::new(),
            is_committed: false,
        };
        world.subscriber.set_further_allowance(FURTHER);
        world.subscriber.subscribe(None);
        world.act();
        world.announce();
        world.subscriber.handle_manifest(Manifest::clone(&manifest(CHUNKS))).unwrap();
        world.act();
        world
    }

    fn announce(&mut self) {
        if !std::mem::replace(&mut self.is_announced, true) && !self.is_committed {
            let announced = Announce { shared: true, ..announce(1, &manifest(CHUNKS)) };
            self.begun = self.held.clone(); // What `partial` names is not pushed.
            self.subscriber
                .handle_announce(announced, self.now, self.received_bytes)
                .unwrap();
        }
    }

    /// Executes and checks all actions.
    fn act(&mut self) {
        while let Some(action) = self.subscriber.poll() {
            match action {
                Action::Send(message) => self.handle_message(message),
                Action::Place { .. } => self.subscriber.handle_placed(None).unwrap(),
                // A second stream that ended with its lane while it waited: reading it fails.
                Action::Receive { stream, .. } if !self.streams.iter().any(|other| other.token == stream) => {
                    self.subscriber.handle_lost(stream);
                }
                Action::Receive { stream, header, encoding, .. } => {
                    let chunk = header.chunk.0;
                    assert!(
                        !self.held.contains(&chunk) && !self.writing.values().any(|other| *other == chunk)
                    );
                    let expected = (header.subscription != SUBSCRIPTION).then(|| entry(chunk).hash);
                    assert_eq!(encoding, expected, "what peers send is checked, and only that");
                    self.writing.insert(stream, chunk);
                }
                Action::Peers(sources) => {
                    self.usable = sources.iter().map(|source| source.key[0]).collect();
                }
                Action::PeerLied(source) => {
                    let key = self.peers[&source].key;
                    assert_eq!(key, LIAR, "{source:?} is honest");
                    self.barred.insert(key);
                    self.lose(source);
                }
                Action::CloseSource(source) => {
                    assert!(self.peers.contains_key(&source));
                    self.lose(source);
                }
                Action::Discard(stream) => self.streams.retain(|other| other.token != stream),
                Action::Commit(_) => {
                    assert_eq!(self.held, all(), "a committed version is whole");
                    self.is_committed = true;
                    self.writing.clear();
                    self.streams.clear();
                    self.subscriber.handle_committed(false);
                }
                other => panic!("{other:?}"),
            }
        }
        let is_current = self.is_announced && !self.is_committed;
        assert!(
            !is_current || self.subscriber.arrivals.credit() >= self.credit,
            "pushes are never violations"
        );
    }

    fn handle_message(&mut self, message: ClientMessage) {
        match message {
            ClientMessage::Subscribe(subscribe) if subscribe.subscription == SUBSCRIPTION => {
                self.credit = subscribe.credit;
                self.is_announced = false;
            }
            ClientMessage::Subscribe(subscribe) => assert!(subscribe.grant.is_some()),
            ClientMessage::Credit { subscription: SUBSCRIPTION, chunks } => {
                self.credit += chunks;
                assert!(self.credit <= CREDIT, "{}", self.credit);
            }
            ClientMessage::Credit { chunks, .. } => assert_eq!(chunks, 0),
            ClientMessage::Request { subscription: SUBSCRIPTION, chunks, hashes, again, .. } => {
                let before = self.requested.len();
                let is_sent = |chunk: &u32| again || !self.begun.contains(chunk);
                self.requested.extend(chunks.iter().filter(is_sent));
                self.listed = if hashes { Some(0) } else { self.listed };
                // What a retired lane lost is requested again, whatever was pushed since.
                self.check_window(self.requested.len() > before && !self.was_retired);
            }
            ClientMessage::Request { subscription, chunks, .. } => {
                let peer = self.peers.get_mut(&subscription).expect("a peer that is connected");
                let before = peer.owed.len();
                for chunk in chunks.iter() {
                    assert!(peer.held.contains(&chunk) && self.named.contains(&chunk) && chunk % 4 != 3);
                    assert!(!self.held.contains(&chunk), "{chunk} is verified");
                    peer.owed.insert(chunk);
                }
                let is_more = peer.owed.len() > before;
                self.check_window(is_more);
            }
            ClientMessage::Committed { .. } => self.credit = 0,
            ClientMessage::Unsubscribe { subscription, .. } => {
                self.peers.remove(&subscription);
                self.streams
                    .retain(|stream| stream.source != subscription || stream.has_arrived);
            }
            other => panic!("{other:?}"),
        }
    }

    /// Checks that what is owed and arriving stays within the allowance, if more was requested.
    fn check_window(&self, is_more: bool) {
        let owed: usize = self.peers.values().map(|peer| peer.owed.len()).sum();
        let outstanding = owed + self.requested.len() + self.writing.len();
        let is_within = outstanding <= (CREDIT + FURTHER) as usize;
        assert!(is_within || !is_more, "{outstanding} are outstanding");
    }

    fn peer(&self, key: u8) -> Option<SubscriptionId> {
        self.peers.iter().find(|(_, peer)| peer.key == key).map(|(id, _)| *id)
    }

    fn step(&mut self, step: Step) {
        if self.is_committed {
            return;
        }
        self.subscriber.set_time(self.now);
        match step {
            Step::Entries(chunks) if self.is_announced => {
                let entries: Vec<_> = bits(chunks).iter().map(entry).collect();
                self.named.extend(bits(chunks).iter());
                self.subscriber.handle_encodings(VERSION, &entries).unwrap();
            }
            Step::Sources(keys, is_seeded) if self.is_announced => self.name_sources(keys, is_seeded),
            Step::Connect(key) => self.connect(key),
            Step::Held(key, chunks) => self.tell_held(key, chunks),
            Step::Push(which) => self.push(which),
            Step::Answer(which) => {
                if let Some(chunk) = self.requested.iter().nth(which % self.requested.len().max(1)).copied() {
                    self.requested.remove(&chunk);
                    self.begin(SUBSCRIPTION, chunk, Lie::None);
                }
            }
            Step::Send(key, which, lie) => self.send(key, which, lie),
            Step::Header(which) => self.deliver_header(which),
            Step::End(which) => self.end(which),
            Step::Hashes(count) => self.list(count),
            Step::Retire => self.retire(),
            Step::Lose(key) => {
                if let Some(source) = self.peer(key) {
                    self.lose(source);
                }
            }
            Step::Reconnect => self.reconnect(),
            Step::Announce => self.announce(),
            Step::Tick => self.tick(),
            Step::Complete => self.complete(),
            _ => {}
        }
        self.act();
    }

    fn name_sources(&mut self, keys: u8, is_seeded: bool) {
        let named = (0..KEYS).filter(|key| keys & 1 << key != 0);
        let sources = named.map(|key| Source {
            addresses: vec![],
            key: [key; 32],
            grant: LaneGrant::new([key; 32]),
            chunks: RangeSet::new(),
            is_near: false,
        });
        self.subscriber.handle_sources(VERSION, sources.collect(), is_seeded).unwrap();
    }

    fn connect(&mut self, key: u8) {
        let is_usable = self.usable.contains(&key) && !self.barred.contains(&key);
        if !is_usable || self.peer(key).is_some() || !self.subscriber.wants_peers() {
            return;
        }
        let source = SubscriptionId(self.next_source);
        self.next_source += 1;
        self.peers
            .insert(source, Peer { key, owed: BTreeSet::new(), held: BTreeSet::new() });
        self.subscriber.ask_peer(source, [key; 32], LaneGrant::new([key; 32]));
        let announced = Announce { subscription: source, shared: true, ..announce(1, &manifest(CHUNKS)) };
        self.subscriber
            .handle_announce(announced, self.now, self.received_bytes)
            .unwrap();
    }

    fn tell_held(&mut self, key: u8, chunks: u32) {
        let Some(source) = self.peer(key) else { return };
        let Some(peer) = self.peers.get_mut(&source) else { return };
        let (added, withdrawn) = (bits(chunks), bits(!chunks));
        peer.held = added.iter().collect();
        peer.owed.retain(|chunk| added.contains(*chunk)); // What it has not begun is passed over.
        let held = Held { subscription: source, epoch: EPOCH, version: Version(1), added, withdrawn };
        self.subscriber.handle_held(source, &held).unwrap();
    }

    fn push(&mut self, which: usize) {
        let unsent: Vec<u32> = all().difference(&self.begun).copied().collect();
        let chunk = unsent.get(which % unsent.len().max(1)).copied();
        if let Some(chunk) = chunk.filter(|_| self.is_announced && self.credit > 0) {
            self.credit -= 1;
            self.requested.remove(&chunk);
            self.begin(SUBSCRIPTION, chunk, Lie::None);
        }
    }

    fn send(&mut self, key: u8, which: usize, lie: u8) {
        let Some(source) = self.peer(key).filter(|_| key != SILENT) else { return };
        let Some(peer) = self.peers.get_mut(&source) else { return };
        let Some(chunk) = peer.owed.iter().nth(which % peer.owed.len().max(1)).copied() else { return };
        peer.owed.remove(&chunk);
        let lies = [Lie::None, Lie::Codec, Lie::Size, Lie::Hash, Lie::Encoding, Lie::Content];
        let lie = if key == LIAR { lies[lie as usize] } else { Lie::None };
        self.begin(source, chunk, lie);
    }

    fn begin(&mut self, source: SubscriptionId, chunk: u32, lie: Lie) {
        if source == SUBSCRIPTION {
            self.begun.insert(chunk);
        }
        let token = StreamToken(self.next_stream);
        self.next_stream += 1;
        self.streams.push(Stream { token, source, chunk, lie, has_arrived: false });
    }

    fn deliver_header(&mut self, which: usize) {
        let in_flight: Vec<_> = self.streams.iter_mut().filter(|stream| !stream.has_arrived).collect();
        let count = in_flight.len();
        let Some(stream) = in_flight.into_iter().nth(which % count.max(1)) else { return };
        stream.has_arrived = true;
        let Stream { token, source, chunk, lie, .. } = *stream;
        let honest = ChunkHeader { subscription: source, ..header(1, chunk) };
        let header = match lie {
            Lie::Codec => ChunkHeader { codec: CodecId::Zstd, ..honest },
            Lie::Size => ChunkHeader { raw_bytes: 1, encoded_bytes: 1, ..honest },
            Lie::Hash => ChunkHeader { hash: hash(chunk + 1), ..honest },
            Lie::None | Lie::Encoding | Lie::Content => honest,
        };
        self.subscriber.handle_chunk(header, token).unwrap();
    }

    fn end(&mut self, which: usize) {
        let Some((token, chunk)) = self.writing.iter().nth(which % self.writing.len().max(1)) else { return };
        let (token, chunk) = (*token, *chunk);
        self.writing.remove(&token);
        let stream = self.streams.iter().position(|stream| stream.token == token);
        let stream = self.streams.remove(stream.expect("it was begun"));
        self.received_bytes += 1;
        match stream.lie {
            Lie::None => {
                self.held.insert(chunk);
                self.subscriber.handle_verified(token, verified(chunk));
            }
            Lie::Content => assert!(self.subscriber.handle_corrupt(token)),
            _ => assert!(self.subscriber.handle_wrong_encoding(token)),
        }
    }

    fn list(&mut self, count: u32) {
        let Some(first) = self.listed.filter(|first| *first < CHUNKS) else { return };
        let hashes: Vec<_> = (first..CHUNKS.min(first + count)).map(hash).collect();
        self.listed = Some(first + hashes.len() as u32);
        self.subscriber.handle_hashes(SUBSCRIPTION, VERSION, first, &hashes).unwrap();
    }

    /// The origin has begun all chunks.
    fn complete(&mut self) {
        let is_due = self.is_announced && self.begun == all() && self.requested.is_empty();
        if is_due && !std::mem::replace(&mut self.is_complete, true) {
            let digest = digest(self.subscriber.selection().expect("its manifest is here"));
            self.subscriber.handle_complete(VERSION, digest).unwrap();
        }
    }

    fn end_streams(&mut self, source: SubscriptionId) -> Vec<StreamToken> {
        let ended = self.streams.extract_if(.., |stream| stream.source == source);
        let ended: Vec<_> = ended.map(|stream| stream.token).collect();
        self.writing.retain(|token, _| !ended.contains(token));
        ended
    }

    fn retire(&mut self) {
        let receiving: BTreeSet<_> = self.writing.keys().copied().collect();
        let ended = self.end_streams(SUBSCRIPTION);
        self.begun = self.held.clone();
        self.was_retired = true;
        self.requested.clear(); // It is asked again for those.
        self.subscriber.handle_retired(SUBSCRIPTION);
        ended
            .into_iter()
            .filter(|token| receiving.contains(token))
            .for_each(|token| self.subscriber.handle_lost(token));
    }

    fn lose(&mut self, source: SubscriptionId) {
        self.end_streams(source);
        self.peers.remove(&source);
        self.subscriber.handle_source_lost(source);
    }

    fn reconnect(&mut self) {
        match self.subscriber.has_other_sources() {
            true => drop(self.end_streams(SUBSCRIPTION)),
            false => {
                self.streams.clear();
                self.writing.clear();
                self.peers.clear();
            }
        }
        self.requested.clear();
        (self.listed, self.is_announced, self.is_complete, self.credit) = (None, false, false, 0);
        self.subscriber.handle_detached(CREDIT);
        if !self.subscriber.has_other_sources() && !matches!(self.subscriber.phase, Phase::Running(_)) {
            self.named.clear();
            self.peers.clear();
        }
        self.act();
        self.subscriber.subscribe(None);
    }

    fn tick(&mut self) {
        self.now += Duration::from_secs(1);
        self.received_bytes += 1;
        self.subscriber.handle_timeout(self.now, self.received_bytes);
    }

    /// Lets the origin answer and honest peers send, while others say nothing, until the version is committed.
    fn drain(&mut self) {
        self.step(Step::Announce);
        let mut seconds = 0;
        while !self.is_committed {
            for round in 0..4 * CHUNKS as usize {
                self.step(Step::Answer(round));
                HONEST.into_iter().for_each(|key| self.step(Step::Send(key, round, 0)));
                self.step(Step::Header(0));
                if let Some(at) = self.writing.keys().position(|token| !self.is_of_silent(*token)) {
                    self.step(Step::End(at));
                }
                self.step(Step::Hashes(CHUNKS));
            }
            self.step(Step::Complete);
            self.step(Step::Tick);
            seconds += 1;
            assert!(seconds < 90, "{:?}: {:?}", self.held, self.subscriber.requests);
        }
        assert_eq!(self.credit, CREDIT);
        assert_eq!(self.subscriber.arrivals.credit(), CREDIT, "both ends count the same credit");
    }

    /// Whether the stream of a chunk comes from a peer that sends no more.
    fn is_of_silent(&self, token: StreamToken) -> bool {
        let stream = self.streams.iter().find(|stream| stream.token == token);
        stream.is_some_and(|stream| {
            self.peers.get(&stream.source).is_some_and(|peer| !HONEST.contains(&peer.key))
        })
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// For any order of events: what is ordered and arriving stays within the allowance, peers are asked only for what they
    /// hold and the origin vouches for, nothing counts that it does not, only liars are called liars, pushes are never
    /// violations, a version is committed only when it is whole, and it is, whatever liars and silent peers do.
    #[test]
    fn a_shared_version_is_whole_after_any_events(steps in prop::collection::vec(any_step(), 0..150)) {
        let mut world = World::new();
        for step in steps {
            world.step(step);
        }
        world.drain();
    }
}
