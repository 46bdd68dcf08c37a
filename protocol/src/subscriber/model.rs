//! A property test of the subscriber: any events, compared with a model of the server, the network and memory.

use super::{
    fixtures::{announce, codecs, digest, globs, header, id, manifest, now, request, select, verified},
    *,
};
use crate::{ChunkIndex, Glob, LaneId, Mode, TensorBox};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const CHUNKS: u32 = 7;
const CREDIT: u32 = 3;

/// One event. A `usize` selects a chunk, stream or lane: it is an index modulo the number of candidates.
#[derive(Debug, Clone, Copy)]
enum Step {
    Announce,
    Manifest,
    /// The server begins a chunk.
    Begin(usize),
    /// The header of a begun chunk arrives.
    Header(usize),
    Verified(usize),
    /// The stream of a chunk that is being received ends early, which happens only on retired lanes.
    Lost(usize),
    Retire(usize),
    Join,
    Complete,
    Reconnect,
    AbortByServer,
    GiveUp,
    /// The client raises its credit to this number of chunks, if it has less.
    Allowance(u32),
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => Just(Step::Announce),
        3 => Just(Step::Manifest),
        12 => (0usize..64).prop_map(Step::Begin),
        12 => (0usize..64).prop_map(Step::Header),
        12 => (0usize..64).prop_map(Step::Verified),
        4 => (0usize..64).prop_map(Step::Lost),
        2 => (0usize..64).prop_map(Step::Retire),
        2 => Just(Step::Join),
        4 => Just(Step::Complete),
        1 => Just(Step::Reconnect),
        1 => Just(Step::AbortByServer),
        1 => Just(Step::GiveUp),
        1 => (CREDIT..3 * CREDIT).prop_map(Step::Allowance),
    ]
}

/// A chunk's stream in the network.
#[derive(Debug, Clone, Copy)]
struct Stream {
    token: StreamToken,
    version: u64,
    chunk: u32,
    lane: LaneId,
    /// Whether the chunk's header has arrived.
    arrived: bool,
}

/// The server's state of the version that it sends.
#[derive(Debug, Default)]
struct Sending {
    version: u64,
    /// The chunks that are to be pushed.
    pushed: BTreeSet<u32>,
    /// The requested chunks that were not begun since.
    requested: BTreeSet<u32>,
    /// The lane on which each chunk was begun last.
    begun: BTreeMap<u32, LaneId>,
    has_manifest_to_send: bool,
    is_complete: bool,
}

/// The subscriber, and the model that it must agree with.
struct World {
    subscriber: Subscriber,
    /// Whether boxes are requested, which cut no tensor here.
    has_boxes: bool,
    selection: Arc<Selection>,
    // The state of the server.
    sending: Option<Sending>,
    next_version: u64,
    credit: u32,
    allowance: u32,
    lanes: Vec<LaneId>,
    retired: BTreeSet<LaneId>,
    next_lane: u32,
    // The state of the network.
    streams: Vec<Stream>,
    next_stream: u64,
    // The state of the client's memory: the version that it is for, and that version's chunks.
    placed: Option<u64>,
    /// The chunk that each stream is writing.
    writing: BTreeMap<StreamToken, u32>,
    /// The verified chunks.
    held: BTreeSet<u32>,
    // What the client did so far.
    committed: Option<u64>,
    client_has_manifest: bool,
    /// The requested chunks whose headers have not arrived.
    outstanding: BTreeSet<u32>,
}

impl World {
    fn new(wanted: &[u32], has_boxes: bool) -> Self {
        let tensors = Glob::new("t*").unwrap();
        let boxes = if has_boxes { vec![TensorBox { tensors, slices: vec![] }] } else { vec![] };
        let request = Subscribe { selection: globs(wanted), boxes, ..request(Mode::Latest, CREDIT) };
        let subscriber = Subscriber::new(request, codecs(), Duration::from_secs(30), now());
        let mut world = Self {
            subscriber,
            has_boxes,
            selection: select(manifest(CHUNKS), wanted),
            sending: None,
            next_version: 1,
            credit: 0,
            allowance: CREDIT,
            lanes: vec![LaneId(0)],
            retired: BTreeSet::new(),
            next_lane: 1,
            streams: vec![],
            next_stream: 0,
            placed: None,
            writing: BTreeMap::new(),
            held: BTreeSet::new(),
            committed: None,
            client_has_manifest: false,
            outstanding: BTreeSet::new(),
        };
        world.subscriber.subscribe(None);
        world.execute_actions();
        world
    }

    /// Executes and checks all actions of the subscriber.
    fn execute_actions(&mut self) {
        while let Some(action) = self.subscriber.poll() {
            match action {
                Action::Send(message) => self.handle_message(message),
                Action::Place { announce, selection, resumes } => {
                    let version = announce.id.version.0;
                    assert_eq!(
                        (selection.chunks(), resumes),
                        (self.selection.chunks(), self.placed.is_some())
                    );
                    assert!(
                        self.placed.is_none_or(|placed| placed == version),
                        "the previous version was released"
                    );
                    self.placed = Some(version);
                    self.subscriber.handle_placed(None).unwrap();
                }
                Action::Receive { stream, header, range, .. } => {
                    let chunk = header.chunk.0;
                    assert_eq!(self.placed, Some(header.version.0));
                    assert_eq!(Some(range), self.selection.place(ChunkIndex(chunk)));
                    assert!(!self.held.contains(&chunk), "chunk {chunk} is verified");
                    assert!(
                        self.writing.values().all(|other| *other != chunk),
                        "two writers at chunk {chunk}"
                    );
                    self.writing.insert(stream, chunk);
                }
                Action::Discard(stream) => self.streams.retain(|other| other.token != stream),
                Action::Commit(commit) => {
                    let all: BTreeSet<u32> = self.selection.chunks().iter().collect();
                    assert_eq!(self.held, all, "a committed version has every selected chunk");
                    assert!(self.sending.as_ref().is_some_and(|sending| sending.is_complete));
                    assert_eq!(Some(commit.announce.id.version.0), self.placed);
                    assert!(self.committed < self.placed, "versions are committed once, in order");
                    self.committed = self.placed;
                    self.release();
                    self.subscriber.handle_committed(false);
                }
                Action::Release { id, .. } => {
                    assert!(self.placed.is_none_or(|placed| placed == id.version.0));
                    self.release();
                }
                Action::Seek => {} // There is one server.
                other => panic!("{other:?}"),
            }
        }
    }

    fn release(&mut self) {
        self.placed = None;
        self.held.clear();
        self.writing.clear();
        self.outstanding.clear();
        self.streams.retain(|stream| !stream.arrived);
    }

    /// Handles a client's message as the server.
    fn handle_message(&mut self, message: ClientMessage) {
        match message {
            ClientMessage::Subscribe(subscribe) => {
                self.credit = subscribe.credit;
                let is_withheld = self.has_boxes && !self.client_has_manifest;
                assert_eq!(self.credit, if is_withheld { 0 } else { CREDIT });
                assert_eq!(
                    subscribe.have.map(|have| have.key()),
                    self.committed.map(|version| key(&id(version)))
                );
                let partial = self.placed.map(|version| (version, self.held.iter().copied().collect()));
                let named = subscribe.partial.map(|partial| {
                    let chunks: Vec<u32> = partial.chunks.iter().collect();
                    (partial.version.0, chunks)
                });
                assert_eq!(named, partial);
                assert_eq!(subscribe.manifest.is_some(), self.client_has_manifest);
            }
            ClientMessage::Credit { chunks, .. } => {
                self.credit += chunks;
                assert!(!self.has_boxes || self.client_has_manifest, "it is not known that the boxes fit");
                assert!(self.credit <= self.allowance, "{} of {}", self.credit, self.allowance);
            }
            ClientMessage::Request { version, chunks, .. } => self.handle_request(version.0, &chunks),
            ClientMessage::Committed { version, .. } => {
                assert_eq!(self.sending.take().map(|sending| sending.version), Some(version.0));
            }
            ClientMessage::Abort { .. } => {
                self.sending = None;
                self.credit = 0;
                self.streams.retain(|stream| stream.arrived); // The server resets the other streams.
            }
            other => panic!("{other:?}"),
        }
    }

    fn handle_request(&mut self, version: u64, chunks: &RangeSet) {
        for chunk in chunks.iter() {
            assert!(self.selection.place(ChunkIndex(chunk)).is_some() && !self.held.contains(&chunk));
            assert!(self.writing.values().all(|other| *other != chunk), "{chunk} is being written");
        }
        self.outstanding.extend(chunks.iter());
        let outstanding = self.outstanding.len() + self.writing.len();
        assert!(outstanding <= self.allowance.max(1) as usize, "{outstanding} chunks are outstanding");
        self.credit = 0;
        let Some(sending) = self.sending.as_mut().filter(|sending| sending.version == version) else {
            return;
        };
        sending.pushed.clear();
        for chunk in chunks.iter() {
            if sending.begun.get(&chunk).is_none_or(|lane| self.retired.contains(lane)) {
                sending.requested.insert(chunk);
            }
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Announce if self.sending.is_none() => self.announce(),
            Step::Manifest => self.send_manifest(),
            Step::Begin(which) => self.begin(which),
            Step::Header(which) => self.deliver_header(which),
            Step::Verified(which) => self.finish(which),
            Step::Lost(which) => self.lose(which),
            Step::Retire(which) if self.lanes.len() > 1 => {
                let lane = self.lanes.remove(1 + which % (self.lanes.len() - 1));
                self.retired.insert(lane);
                self.streams.retain(|stream| stream.arrived || stream.lane != lane);
                self.outstanding.clear(); // Requested again, if they are missing.
                self.subscriber.handle_retired(fixtures::SUBSCRIPTION);
            }
            Step::Join if self.lanes.len() < 4 => {
                self.lanes.push(LaneId(self.next_lane));
                self.next_lane += 1;
            }
            Step::Complete => self.complete(),
            Step::Reconnect => self.reconnect(),
            Step::AbortByServer if self.sending.is_some() => {
                let version = self.sending.as_ref().map(|sending| sending.version).unwrap();
                self.subscriber.handle_abort(key(&id(version)), AbortReason::Withdrawn).unwrap();
            }
            Step::GiveUp if self.subscriber.current_version().is_some() => {
                self.subscriber.give_up(AbortReason::DeviceFailed);
            }
            Step::Allowance(allowance) => {
                self.allowance = self.allowance.max(allowance);
                self.subscriber.set_allowance(allowance);
            }
            _ => {}
        }
        self.execute_actions();
    }

    fn announce(&mut self) {
        // A partly received version continues.
        let version = self.placed.unwrap_or(self.next_version);
        self.next_version = self.next_version.max(version + 1);
        let pushed = self
            .selection
            .chunks()
            .iter()
            .filter(|chunk| !self.held.contains(chunk))
            .collect();
        self.sending = Some(Sending {
            version,
            pushed,
            has_manifest_to_send: !self.client_has_manifest,
            ..Sending::default()
        });
        let announced = announce(version, &manifest(CHUNKS));
        self.subscriber.handle_announce(announced, now(), 0).unwrap();
    }

    fn send_manifest(&mut self) {
        let Some(sending) = self.sending.as_mut().filter(|sending| sending.has_manifest_to_send) else {
            return;
        };
        sending.has_manifest_to_send = false;
        self.client_has_manifest = true;
        self.subscriber.handle_manifest_header().unwrap();
        self.subscriber.handle_manifest(Manifest::clone(&manifest(CHUNKS))).unwrap();
    }

    fn begin(&mut self, which: usize) {
        let Some(sending) = &mut self.sending else { return };
        let is_requested = !sending.requested.is_empty();
        let due = if is_requested { &mut sending.requested } else { &mut sending.pushed };
        let Some(chunk) = due.first().copied() else { return };
        if !is_requested && self.credit == 0 {
            return;
        }
        due.remove(&chunk);
        self.credit -= u32::from(!is_requested);
        let lane = self.lanes[which % self.lanes.len()];
        sending.begun.insert(chunk, lane);
        let token = StreamToken(self.next_stream);
        self.next_stream += 1;
        self.streams
            .push(Stream { token, version: sending.version, chunk, lane, arrived: false });
    }

    fn deliver_header(&mut self, which: usize) {
        let in_flight: Vec<_> = self.streams.iter_mut().filter(|stream| !stream.arrived).collect();
        let count = in_flight.len();
        let Some(stream) = in_flight.into_iter().nth(which % count.max(1)) else { return };
        stream.arrived = true;
        let Stream { token, version, chunk, .. } = *stream;
        self.outstanding.remove(&chunk);
        self.subscriber.handle_chunk(header(version, chunk), token).unwrap();
    }

    fn finish(&mut self, which: usize) {
        let Some((token, chunk)) = self.writing.iter().nth(which % self.writing.len().max(1)) else { return };
        let (token, chunk) = (*token, *chunk);
        self.writing.remove(&token);
        self.streams.retain(|stream| stream.token != token);
        self.held.insert(chunk);
        self.subscriber.handle_verified(token, verified(chunk));
    }

    fn lose(&mut self, which: usize) {
        let on_retired = self.streams.iter().filter(|stream| self.retired.contains(&stream.lane));
        let on_retired = on_retired.filter(|stream| self.writing.contains_key(&stream.token));
        let on_retired: Vec<_> = on_retired.map(|stream| stream.token).collect();
        let Some(token) = on_retired.get(which % on_retired.len().max(1)).copied() else { return };
        self.writing.remove(&token);
        self.streams.retain(|stream| stream.token != token);
        self.outstanding.clear();
        self.subscriber.handle_lost(token);
    }

    fn complete(&mut self) {
        let Some(sending) = &mut self.sending else { return };
        if sending.pushed.is_empty()
            && sending.requested.is_empty()
            && !sending.is_complete
            && !sending.has_manifest_to_send
        {
            sending.is_complete = true;
            let version = key(&id(sending.version));
            self.subscriber.handle_complete(version, digest(&self.selection)).unwrap();
        }
    }

    fn reconnect(&mut self) {
        self.writing.clear();
        self.streams.clear();
        self.outstanding.clear();
        self.sending = None;
        self.retired.clear();
        (self.lanes, self.allowance) = (vec![LaneId(0)], CREDIT);
        self.next_lane = 1; // Each session numbers its lanes from 0.
        self.subscriber.handle_detached(CREDIT);
        self.execute_actions();
        assert_eq!(self.subscriber.is_receiving(), self.placed.is_some());
        self.subscriber.subscribe(None);
    }

    /// Announces a version if none is being sent, and delivers everything until it is committed.
    fn drain(&mut self) {
        if self.sending.is_none() {
            self.step(Step::Announce);
        }
        let version = self.sending.as_ref().map(|sending| sending.version);
        for round in 0..10 * CHUNKS as usize {
            for step in [Step::Manifest, Step::Begin(round), Step::Header(0), Step::Lost(0), Step::Complete] {
                self.step(step);
            }
            self.step(Step::Verified(round));
        }
        assert!(self.committed >= version, "of {version:?} only {:?} were received", self.held);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// For any selection and order of events: a version is committed exactly when it is complete, no chunk has two
    /// writers at once or is received twice, credit is neither exceeded nor lost, and afterwards the current version,
    /// or the next one, can be committed.
    #[test]
    fn versions_are_complete_after_any_events(
        wanted in prop::collection::btree_set(0u32..CHUNKS, 0..8),
        has_boxes in any::<bool>(),
        steps in prop::collection::vec(any_step(), 0..200),
    ) {
        let mut world = World::new(&Vec::from_iter(wanted), has_boxes);
        for step in steps {
            world.step(step);
        }
        world.drain();
        prop_assert_eq!(world.subscriber.arrivals.credit(), world.credit, "both ends count the same credit");
        prop_assert_eq!(world.credit, world.allowance);
    }
}
