//! [`Shared`]: what a receiver knows of a shared version beside its chunks: the shared encodings, the peers, what is
//! ordered of them, and what is left for the origin (PROTOCOL.md §3.15).

use super::{Arrivals, Assembly, entries::Entries};
use crate::{
    ChunkHeader, ChunkIndex, CodecSet, EncodingEntry, EncodingHash, Held, ProtocolViolation, RangeSet,
    Source, SubscriptionId,
    swarm::{Choice, NEIGHBOURS_MAX},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

/// A peer that sends more `Held` messages than this between two checks, which are a second apart, floods. A holder sends
/// at most ten a second.
const HELD_MAX: u32 = 64;

/// After so many checks without an arriving chunk, the origin is asked for what it does not push, too.
const IDLE_CHECKS_MAX: u32 = 3;

/// Once in so many checks, peers that could not be asked are named to the driver again.
const NAMED_CHECKS: u32 = 5;

/// The most chunks that are outstanding at the origin by requests while there are peers that may get them.
const PULLED_MAX: u32 = 4;

/// The most peers whose keys are remembered because they failed in this version.
const SHUNNED_MAX: usize = 256;

/// The pushed chunks that the origin has outstanding at a client, at most, once others have chunks, too.
const PUSHED_MAX: u32 = 2;

/// The most chunks of a version that a peer may begin and not end. It could waste time for ever otherwise.
const LOST_MAX: u32 = 8;

/// After so many usual times, and at least so many checks, a source is stalled inside a chunk that came from another one,
/// too.
const HELD_UP: u32 = 8;
const HELD_UP_CHECKS_MIN: u32 = 3;

/// The state of the shared version under way.
#[derive(Debug)]
pub(super) struct Shared {
    /// The time of the latest event.
    now: Instant,
    /// The latest list of peers.
    named: Vec<Source>,
    /// Whether the origin pushes nothing more by itself.
    is_seeded: bool,
    entries: Entries,
    peers: BTreeMap<SubscriptionId, Peer>,
    /// The keys of peers that lied or stalled in this version.
    shunned: BTreeSet<[u8; 32]>,
    /// The state once chunks can be received.
    running: Option<Running>,
}

/// A peer that was asked for the version.
#[derive(Debug)]
struct Peer {
    key: [u8; 32],
    /// Whether it is at the site of this client, as the origin says.
    is_near: bool,
    /// How many more chunks it may begin: those that were ordered of it, and not begun.
    may_begin: u32,
    /// The `Held` messages since the last check.
    held: u32,
    /// The chunks that it began and did not end, although its connection lived.
    lost: u32,
}

/// What is ordered of whom.
#[derive(Debug)]
struct Running {
    /// What the receiver can decode.
    codecs: CodecSet,
    choice: Choice,
    /// The missing chunks whose shared encoding cannot be decoded here, or is not certain.
    of_origin: BTreeSet<u32>,
    /// Chunks without an entry, to request of the origin if they are still missing.
    unnamed: Vec<u32>,
    /// Whether chunks that the origin pushed may have been lost with a lane.
    is_loss_possible: bool,
    /// The number of chunks that were requested again of the origin, because a lane was lost: they may come twice.
    repeated: u32,
    /// Whether the origin is asked for chunks that no peer can be asked for.
    is_pulling: bool,
    /// The number of events of arriving chunks, and that number at the last check.
    events: (u64, u64),
    /// The number of checks.
    checks: u32,
    /// The checks since a chunk was arriving.
    idle_checks: u32,
    /// The peer that was ordered of last.
    served: SubscriptionId,
}

impl Shared {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            now,
            named: vec![],
            is_seeded: false,
            entries: Entries::default(),
            peers: BTreeMap::new(),
            shunned: BTreeSet::new(),
            running: None,
        }
    }

    /// Records the time.
    pub(super) fn set_time(&mut self, now: Instant) {
        self.now = self.now.max(now);
    }

    /// Begins to receive the version, whose chunks are `assembly`'s.
    ///
    /// # Errors
    /// [`ProtocolViolation`] when an encoding was named of a chunk that the version does not have.
    pub(super) fn begin(
        &mut self,
        assembly: &Assembly,
        codecs: CodecSet,
        seed: u64,
    ) -> Result<(), ProtocolViolation> {
        let count = assembly.manifest().chunking().count();
        self.entries.begin(count)?;
        self.running = Some(Running {
            codecs,
            choice: Choice::new(count, seed),
            of_origin: BTreeSet::new(),
            unnamed: vec![],
            is_loss_possible: false,
            repeated: 0,
            is_pulling: false,
            events: (0, 0),
            checks: 0,
            idle_checks: 0,
            served: SubscriptionId(0),
        });
        let missing = assembly.missing();
        let (mut wanted, mut of_origin) = (RangeSet::new(), BTreeSet::new());
        for chunk in self.entries.chunks().filter(|chunk| missing.contains(*chunk)) {
            match self.is_decodable(chunk, assembly) {
                true => drop(wanted.insert(chunk)),
                false => drop(of_origin.insert(chunk)),
            }
        }
        if let Some(running) = &mut self.running {
            running.choice.want(&wanted);
            running.of_origin = of_origin;
        }
        Ok(())
    }

    /// Whether a chunk may be ordered of peers: its shared encoding is known, and can be decoded here.
    fn is_decodable(&self, chunk: u32, assembly: &Assembly) -> bool {
        let entry = self.entries.get(ChunkIndex(chunk));
        let codecs = self.running.as_ref().map(|running| running.codecs);
        entry.is_some_and(|(codec, base, _)| {
            codecs.is_some_and(|codecs| codecs.contains(codec)) && (base.is_none() || base == assembly.base())
        })
    }

    /// Replaces the list of peers. Returns those in use that are no longer named.
    pub(super) fn handle_sources(&mut self, sources: Vec<Source>, is_seeded: bool) -> Vec<SubscriptionId> {
        (self.named, self.is_seeded) = (sources, is_seeded);
        let is_named = |key: &[u8; 32]| self.named.iter().any(|source| source.key == *key);
        let gone = self.peers.iter().filter(|(_, peer)| !is_named(&peer.key));
        gone.map(|(id, _)| *id).collect()
    }

    /// The peers that may be used.
    pub(super) fn usable(&self) -> Vec<Source> {
        let usable = self.named.iter().filter(|source| !self.shunned.contains(&source.key));
        usable.cloned().collect()
    }

    /// Handles entries of the origin.
    ///
    /// # Errors
    /// See [`Entries::insert`].
    pub(super) fn handle_encodings(
        &mut self,
        entries: &[EncodingEntry],
        assembly: Option<&Assembly>,
    ) -> Result<(), ProtocolViolation> {
        for entry in entries {
            if self.entries.insert(*entry)?
                && let Some(assembly) = assembly
            {
                self.put_back(entry.chunk, assembly);
            }
        }
        Ok(())
    }

    /// Handles the beginning of another session with the origin. One that does not share sends what is requested.
    pub(super) fn begin_session(&mut self, is_shared: bool) {
        self.entries.begin_session();
        self.is_seeded = !is_shared;
        if let Some(running) = &mut self.running {
            (running.is_pulling, running.idle_checks) = (false, 0);
        }
    }

    /// After so many checks without progress, of at most `checks_max`, a source is stalled that keeps a chunk from others:
    /// several times longer than chunks usually take.
    pub(super) fn held_up_checks(&self, checks_max: u32) -> u32 {
        let usual = self.running.as_ref().and_then(|running| running.choice.usual());
        let checks = usual.map_or(checks_max, |usual| (usual * HELD_UP).as_secs() as u32);
        checks.max(HELD_UP_CHECKS_MIN).min(checks_max)
    }

    /// Whether the origin named peers.
    pub(super) fn has_peers(&self) -> bool {
        !self.named.is_empty()
    }

    /// Whether one more peer may be asked.
    pub(super) fn has_room(&self) -> bool {
        self.running.is_some() && self.peers.len() < NEIGHBOURS_MAX
    }

    /// Whether a peer is named that was not asked, and could be.
    pub(super) fn has_unasked(&self) -> bool {
        let is_asked = |key: &[u8; 32]| self.peers.values().any(|peer| peer.key == *key);
        let mut usable = self.named.iter().filter(|source| !self.shunned.contains(&source.key));
        self.has_room() && usable.any(|source| !is_asked(&source.key))
    }

    /// Adds a peer that was asked for the version.
    pub(super) fn add_peer(&mut self, peer: SubscriptionId, key: [u8; 32]) {
        let is_near = self.named.iter().any(|source| source.key == key && source.is_near);
        self.peers.insert(peer, Peer { key, is_near, may_begin: 0, held: 0, lost: 0 });
    }

    /// Handles that a peer has announced the version.
    pub(super) fn handle_announced(&mut self, peer: SubscriptionId) {
        if let Some(running) = &mut self.running {
            running.choice.add_source(peer);
            if self.peers.get(&peer).is_some_and(|peer| !peer.is_near) {
                running.choice.set_far(peer);
            }
        }
    }

    /// Removes a peer; its orders go to others.
    pub(super) fn remove_peer(&mut self, peer: SubscriptionId) {
        self.peers.remove(&peer);
        if let Some(running) = &mut self.running {
            running.choice.remove_source(peer);
        }
    }

    /// Uses the owner of a peer's key no more in this version.
    pub(super) fn shun(&mut self, peer: SubscriptionId) {
        let key = self.peers.get(&peer).map(|peer| peer.key);
        if self.shunned.len() < SHUNNED_MAX {
            self.shunned.extend(key);
        }
    }

    pub(super) fn is_peer(&self, source: SubscriptionId) -> bool {
        self.peers.contains_key(&source)
    }

    /// Handles what a peer can send now, and can send no longer. Costs a logarithm of the chunks for each that changes.
    ///
    /// # Errors
    /// [`ProtocolViolation::OutOfTurn`] when it sends far more of them than it may.
    pub(super) fn handle_held(
        &mut self,
        source: SubscriptionId,
        held: &Held,
    ) -> Result<(), ProtocolViolation> {
        let Some(peer) = self.peers.get_mut(&source) else { return Ok(()) };
        peer.held += 1;
        if peer.held > HELD_MAX {
            let (found, expected) = ("a flood of Held", "at most ten a second");
            return Err(ProtocolViolation::OutOfTurn { found, expected });
        }
        if let Some(running) = &mut self.running {
            running.choice.handle_held(source, &held.added, &held.withdrawn);
        }
        Ok(())
    }

    /// The hash that an encoding from a peer must have; `None` if the chunk is not to be taken from peers.
    pub(super) fn hash_of(&self, chunk: ChunkIndex) -> Option<EncodingHash> {
        self.entries.get(chunk).map(|(_, _, hash)| hash)
    }

    /// Whether a peer's header names another codec or base than the origin's entry, or there is none. The hash covers the
    /// rest of it.
    pub(super) fn is_other_encoding(&self, header: &ChunkHeader) -> bool {
        match self.entries.get(header.chunk) {
            Some((codec, base, _)) => (codec, base) != (header.codec, header.base),
            None => !self.entries.contains(header.chunk.0),
        }
    }

    /// Records that a stream of a source ended early; returns whether the source is a peer that does that too often.
    pub(super) fn note_lost(&mut self, source: SubscriptionId) -> bool {
        let Some(peer) = self.peers.get_mut(&source) else { return false };
        peer.lost += 1;
        peer.lost > LOST_MAX
    }

    /// Records the header of a chunk of a peer; returns whether the peer was asked for that many.
    pub(super) fn handle_peer_header(&mut self, source: SubscriptionId) -> bool {
        let Some(peer) = self.peers.get_mut(&source) else { return false };
        let may_begin = peer.may_begin > 0;
        peer.may_begin = peer.may_begin.saturating_sub(1);
        may_begin
    }

    /// Records that a chunk is ordered elsewhere.
    pub(super) fn drop_chunk(&mut self, chunk: ChunkIndex) {
        if let Some(running) = &mut self.running {
            running.choice.drop_want(chunk);
            running.of_origin.remove(&chunk.0);
        }
    }

    /// Records the header of a chunk of the origin.
    pub(super) fn handle_origin_header(&mut self, chunk: ChunkIndex) {
        self.note_arrival();
        if let Some(running) = &mut self.running {
            running.choice.drop_want(chunk);
            running.of_origin.remove(&chunk.0);
        }
    }

    /// Excuses one chunk of the origin that was neither requested nor pushed within its credit, if it may be one that comes
    /// twice.
    pub(super) fn excuse_repeated(&mut self) -> bool {
        let Some(running) = &mut self.running else { return false };
        let is_excused = running.repeated > 0;
        running.repeated = running.repeated.saturating_sub(1);
        is_excused
    }

    /// Records that a chunk begins, ends or is waited for.
    pub(super) fn note_arrival(&mut self) {
        if let Some(running) = &mut self.running {
            running.events.0 += 1;
        }
    }

    /// Records a verified chunk.
    pub(super) fn handle_delivered(&mut self, source: SubscriptionId, chunk: ChunkIndex) {
        let now = self.now;
        if let Some(running) = &mut self.running {
            running.choice.handle_delivered(source, chunk, now);
            running.of_origin.remove(&chunk.0);
        }
    }

    /// Records that a source will not deliver a chunk: its stream was lost or discarded.
    pub(super) fn handle_failed(&mut self, source: SubscriptionId, chunk: ChunkIndex) {
        if let Some(running) = &mut self.running {
            running.choice.handle_failed(source, chunk);
        }
    }

    /// Records that chunks that the origin pushed may have been lost.
    pub(super) fn handle_loss(&mut self) {
        if let Some(running) = &mut self.running {
            running.is_loss_possible = true;
        }
    }

    /// Puts a missing chunk back to those that are to be ordered: of peers, or of the origin.
    pub(super) fn put_back(&mut self, chunk: ChunkIndex, assembly: &Assembly) {
        if assembly.selection().place(chunk).is_none() || !assembly.is_missing(chunk) {
            return;
        }
        let (is_decodable, is_named) = (self.is_decodable(chunk.0, assembly), self.entries.contains(chunk.0));
        let Some(running) = &mut self.running else { return };
        match (is_decodable, is_named) {
            (true, _) => running.choice.want(&RangeSet::from_range(chunk.0..chunk.0 + 1)),
            (false, true) => {
                running.choice.drop_want(chunk); // It may have become uncertain.
                running.of_origin.insert(chunk.0);
            }
            (false, false) => running.unnamed.push(chunk.0),
        }
    }

    /// Checks, once a second, whether chunks arrive: if none do although the origin pushes no more, it is asked for what no
    /// peer can be asked for; and if none do for long, anyway. Returns whether the driver should try again to connect to
    /// peers.
    pub(super) fn check(&mut self, arrivals: &Arrivals, assembly: &Assembly) -> bool {
        self.peers.values_mut().for_each(|peer| peer.held = 0);
        let (is_seeded, has_unasked) = (self.is_seeded, self.has_unasked());
        let Some(running) = &mut self.running else { return false };
        running.checks += 1;
        let is_idle = running.events.0 == running.events.1 && arrivals.receiving() == 0;
        running.events.1 = running.events.0;
        running.idle_checks = if is_idle { running.idle_checks + 1 } else { 0 };
        running.is_pulling |= running.idle_checks >= if is_seeded { 1 } else { IDLE_CHECKS_MAX };
        if running.is_pulling && running.unnamed.is_empty() {
            let entries = &self.entries;
            let mut unnamed: Vec<u32> = assembly.missing().iter().filter(|c| !entries.contains(*c)).collect();
            unnamed.reverse(); // They are taken from the end.
            running.unnamed = unnamed;
        }
        has_unasked && running.checks.is_multiple_of(NAMED_CHECKS)
    }

    /// How many of the allowed chunks are left to the origin, which may push them.
    pub(super) fn reserve(&self, credit: u32) -> u32 {
        if self.is_seeded || !self.peers.is_empty() { credit.min(PUSHED_MAX) } else { credit }
    }

    /// The next order of peers, of at most `room` chunks, which count as ordered. `can_order` says of whom.
    pub(super) fn order_of_peers(
        &mut self,
        room: u32,
        assembly: &Assembly,
        can_order: impl Fn(SubscriptionId) -> bool,
    ) -> Option<(SubscriptionId, RangeSet)> {
        let (now, running) = (self.now, self.running.as_mut()?);
        let served = running.served;
        let turns = self.peers.range(SubscriptionId(served.0.saturating_add(1))..);
        let turns: Vec<_> = turns.chain(self.peers.range(..=served)).map(|(id, _)| *id).collect();
        for id in turns.into_iter().filter(|id| can_order(*id)) {
            let mut chunks = RangeSet::new();
            while chunks.len() < room
                && let Some(chunk) = running.choice.next(id, now)
            {
                match assembly.is_verified(chunk) {
                    true => running.choice.take_back(id, chunk),
                    false => drop(chunks.insert(chunk.0)),
                }
            }
            if !chunks.is_empty() {
                (running.served, running.is_pulling) = (id, false);
                if let Some(peer) = self.peers.get_mut(&id) {
                    peer.may_begin += chunks.len();
                }
                return Some((id, chunks));
            }
        }
        None
    }

    /// Records that a source was asked again for chunks that a lane may have lost.
    pub(super) fn note_repeated(&mut self, source: SubscriptionId, chunks: u32) {
        match self.peers.get_mut(&source) {
            Some(peer) => peer.may_begin += chunks,
            None => self.running.iter_mut().for_each(|running| running.repeated += chunks),
        }
    }

    /// The chunks to request of the origin, at most `room`, of which `requested` are on their way. Those that no peer can be
    /// asked for are requested at once; others if nothing else comes.
    pub(super) fn order_of_origin(
        &mut self,
        room: u32,
        requested: &RangeSet,
        assembly: &Assembly,
    ) -> RangeSet {
        let mut chunks = RangeSet::new();
        let has_peers = !self.peers.is_empty() || !self.usable_is_empty();
        let Some(running) = &mut self.running else { return chunks };
        let is_wanted = |chunk: u32| {
            assembly.selection().place(ChunkIndex(chunk)).is_some()
                && assembly.is_missing(ChunkIndex(chunk))
                && !requested.contains(chunk)
        };
        while chunks.len() < room
            && let Some(chunk) = running.of_origin.pop_first()
        {
            if is_wanted(chunk) {
                chunks.insert(chunk);
            }
        }
        let is_due = running.is_loss_possible || self.is_seeded && !assembly.is_sent();
        let is_alone = is_due && !has_peers;
        if is_alone && !running.is_pulling {
            running.is_pulling = true;
            let entries = &self.entries;
            running.unnamed = assembly.missing().iter().filter(|c| !entries.contains(*c)).collect();
            running.unnamed.reverse();
        }
        if !running.is_pulling {
            return chunks;
        }
        let pulled_max = if has_peers { PULLED_MAX.saturating_sub(requested.len()) } else { room };
        while chunks.len() < room.min(pulled_max) {
            let chunk = running.choice.next_unheld().or_else(|| running.choice.next_ready());
            let Some(chunk) = chunk.map(|chunk| chunk.0).or_else(|| running.unnamed.pop()) else { break };
            running.choice.drop_want(ChunkIndex(chunk));
            if is_wanted(chunk) {
                chunks.insert(chunk);
            }
        }
        chunks
    }

    fn usable_is_empty(&self) -> bool {
        self.named.iter().all(|source| self.shunned.contains(&source.key))
    }
}
