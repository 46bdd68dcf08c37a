//! Both machines against each other, over messages and chunks that are delayed, overtaken and cut off.

use super::topic::{Numbered, Numbers};
use crate::{subscriber::fixtures, *};
use proptest::prelude::*;
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
    time::Duration,
};

const CHUNKS: u32 = 7;
const CREDIT: u32 = 3;
const WINDOW: u32 = 2;

/// One event. A `usize` selects one of several candidates: it is an index modulo their number.
#[derive(Debug, Clone, Copy)]
enum Step {
    Publish,
    /// The server handles the client's next message.
    ToServer,
    /// The client handles the server's next message.
    ToClient,
    /// The server begins what it can on one of its lanes.
    Work(usize),
    /// The server passes a chunk to the network.
    Sent(usize),
    /// A manifest or the header of a chunk arrives.
    Arrive(usize),
    /// A chunk was received and verified.
    Verified(usize),
    /// The stream of a chunk on a retired lane ends early.
    Lost(usize),
    Retire(usize),
    Join,
    Reconnect,
    GiveUp,
    /// The user acknowledges the last version.
    Acknowledge,
    Allowance(u32),
    /// A version is withdrawn while it is under way.
    Withdraw,
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => Just(Step::Publish),
        12 => Just(Step::ToServer),
        12 => Just(Step::ToClient),
        14 => (0usize..64).prop_map(Step::Work),
        12 => (0usize..64).prop_map(Step::Sent),
        12 => (0usize..64).prop_map(Step::Arrive),
        12 => (0usize..64).prop_map(Step::Verified),
        4 => (0usize..64).prop_map(Step::Lost),
        4 => (0usize..64).prop_map(Step::Retire),
        4 => Just(Step::Join),
        1 => Just(Step::Reconnect),
        1 => Just(Step::GiveUp),
        4 => Just(Step::Acknowledge),
        1 => (CREDIT..3 * CREDIT).prop_map(Step::Allowance),
        1 => Just(Step::Withdraw),
    ]
}

/// A data stream in the network.
#[derive(Debug, Clone, Copy)]
struct Stream {
    version: Version,
    /// `None` for the manifest.
    chunk: Option<u32>,
    lane: LaneId,
    token: StreamToken,
}

/// The client's memory.
#[derive(Debug, Default)]
struct Memory {
    version: Option<Version>,
    held: BTreeSet<u32>,
    writing: BTreeMap<StreamToken, u32>,
}

struct World {
    topic: Numbers,
    manifest: Arc<Manifest>,
    selected: RangeSet,
    selection: Arc<Selection>,
    // The server.
    sender: Option<Sender<Numbered>>,
    lanes: Vec<LaneId>,
    next_lane: u32,
    /// The sends that were begun and not ended.
    sending: Vec<SendAction>,
    /// The lane on which each chunk of the version under way was begun last.
    begun: BTreeMap<u32, LaneId>,
    current: Option<Version>,
    // The network.
    to_server: VecDeque<ClientMessage>,
    to_client: VecDeque<ServerMessage>,
    streams: Vec<Stream>,
    arrived: Vec<Stream>,
    next_token: u64,
    // The client.
    subscriber: Subscriber,
    allowance: u32,
    memory: Memory,
    committed: Vec<Version>,
    unacknowledged: VecDeque<Version>,
    /// Whether a version was given up, which a reader does not acknowledge.
    has_given_up: bool,
}

impl World {
    fn new(mode: Mode, wanted: &[u32]) -> Self {
        let manifest = fixtures::manifest(CHUNKS);
        let selection = fixtures::select(Arc::clone(&manifest), wanted);
        let request = Subscribe {
            selection: fixtures::globs(wanted),
            window: WINDOW,
            ..fixtures::request(mode, CREDIT)
        };
        let (timeout, now) = (Duration::from_secs(30), fixtures::now());
        let mut world = Self {
            topic: Numbers::new(3, mode == Mode::Every),
            manifest,
            selected: selection.chunks().clone(),
            selection,
            sender: None,
            lanes: vec![LaneId(0)],
            next_lane: 1,
            sending: vec![],
            begun: BTreeMap::new(),
            current: None,
            to_server: VecDeque::new(),
            to_client: VecDeque::new(),
            streams: vec![],
            arrived: vec![],
            next_token: 0,
            subscriber: Subscriber::new(request, fixtures::codecs(), timeout, now),
            allowance: CREDIT,
            memory: Memory::default(),
            committed: vec![],
            unacknowledged: VecDeque::new(),
            has_given_up: false,
        };
        world.subscriber.subscribe(None);
        world.act();
        world
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Publish => {
                self.topic.publish(self.manifest.digest());
                if let Some(sender) = &mut self.sender {
                    sender.handle_changed(&self.topic);
                }
            }
            Step::ToServer => self.deliver_to_server(),
            Step::ToClient => self.deliver_to_client(),
            Step::Work(which) => self.work(which),
            Step::Sent(which) => self.end_send(which),
            Step::Arrive(which) => self.arrive(which),
            Step::Verified(which) => self.verify(which),
            Step::Lost(which) => self.lose(which),
            Step::Retire(which) if self.lanes.len() > 1 => {
                let lane = self.lanes.remove(1 + which % (self.lanes.len() - 1));
                // Queued before anything that follows; what has not arrived is reset.
                self.to_client.push_back(ServerMessage::Retired(lane));
                self.streams.retain(|stream| stream.lane != lane || stream.chunk.is_none());
            }
            Step::Join if self.lanes.len() < 4 => {
                self.lanes.push(LaneId(self.next_lane));
                self.next_lane += 1;
            }
            Step::Reconnect => self.reconnect(),
            Step::GiveUp if self.subscriber.current_version().is_some() => {
                self.subscriber.give_up(AbortReason::DeviceFailed);
            }
            Step::Acknowledge => {
                if let Some(version) = self.unacknowledged.pop_back() {
                    self.unacknowledged.clear();
                    self.subscriber.acknowledge(super::topic::EPOCH, version);
                }
            }
            Step::Allowance(allowance) => {
                self.allowance = self.allowance.max(allowance);
                self.subscriber.set_allowance(allowance);
            }
            Step::Withdraw => {
                if let Some(sender) = &mut self.sender {
                    sender.give_up(AbortReason::Withdrawn);
                }
            }
            Step::Retire(_) | Step::Join | Step::GiveUp => {}
        }
        self.act();
    }

    /// Executes and checks the client's actions.
    fn act(&mut self) {
        while let Some(action) = self.subscriber.poll() {
            match action {
                Action::Send(message) => self.to_server.push_back(message),
                Action::Place { announce, resumes, .. } => {
                    let version = announce.id.version;
                    assert_eq!(resumes, self.memory.version == Some(version));
                    self.memory.version = Some(version);
                    self.subscriber.handle_placed(None).unwrap();
                }
                Action::Receive { stream, header, .. } => {
                    let chunk = header.chunk.0;
                    assert_eq!(self.memory.version, Some(header.version));
                    assert!(!self.memory.held.contains(&chunk), "chunk {chunk} is verified");
                    assert!(
                        self.memory.writing.values().all(|other| *other != chunk),
                        "two writers at {chunk}"
                    );
                    self.memory.writing.insert(stream, chunk);
                }
                Action::Discard(stream) => self.arrived.retain(|other| other.token != stream),
                Action::Commit(commit) => {
                    assert!(self.selected.iter().eq(self.memory.held.iter().copied()), "it is whole");
                    let version = commit.announce.id.version;
                    assert!(self.committed.last().is_none_or(|last| *last < version));
                    self.committed.push(version);
                    self.unacknowledged.push_back(version);
                    self.release();
                    self.subscriber.handle_committed(false);
                }
                Action::Release { .. } => {
                    self.has_given_up = true;
                    self.release();
                }
                Action::Seek => {} // There is one server.
                other => panic!("{other:?}"),
            }
        }
    }

    fn release(&mut self) {
        self.memory = Memory::default();
    }

    fn deliver_to_server(&mut self) {
        let Some(message) = self.to_server.pop_front() else { return };
        if let ClientMessage::Subscribe(subscribe) = message {
            let mut sender =
                Sender::new(&self.topic, &subscribe, FeatureSet::OF_CLIENT, self.topic.place(), None)
                    .unwrap();
            sender.handle_changed(&self.topic);
            self.sender = Some(sender);
            return;
        }
        if let ClientMessage::Request { chunks, .. } = &message {
            assert!(chunks.len() <= self.allowance.max(1), "{chunks:?} are more than the allowance");
        }
        let lanes = &self.lanes;
        if let Some(sender) = &mut self.sender {
            let (_, message) = SubscriptionMessage::of(message).unwrap();
            sender.handle_message(message, |lane| lanes.contains(&lane)).unwrap();
        }
    }

    fn deliver_to_client(&mut self) {
        let (now, Some(message)) = (fixtures::now(), self.to_client.pop_front()) else { return };
        match message {
            ServerMessage::Announce(announce) => self.subscriber.handle_announce(announce, now, 0).unwrap(),
            ServerMessage::Complete { epoch, version, digest, .. } => {
                self.subscriber.handle_complete((epoch, version), digest).unwrap();
            }
            ServerMessage::Abort { epoch, version, reason, .. } => {
                self.subscriber.handle_abort((epoch, version), reason).unwrap();
            }
            ServerMessage::Retired(_) => self.subscriber.handle_retired(fixtures::SUBSCRIPTION),
            other => panic!("{other:?}"),
        }
    }

    /// Executes and checks the server's actions, chunks on the lane `which`.
    fn work(&mut self, which: usize) {
        let lane = self.lanes[which % self.lanes.len()];
        let Some(sender) = &mut self.sender else { return };
        let Some(action) = sender.poll(&self.topic, Some(lane)) else { return };
        match action {
            SenderAction::Announce(announcement) => {
                let version = announcement.version.id().version;
                self.begun.clear();
                self.current = Some(version);
                let announce = Announce {
                    skipped: announcement.skipped,
                    afresh: announcement.afresh,
                    ..fixtures::announce(version.0, &self.manifest)
                };
                self.to_client.push_back(ServerMessage::Announce(announce));
                sender.handle_selected(Arc::clone(&self.selection));
            }
            SenderAction::Send(send) => {
                self.begin(send);
                self.sending.push(send);
            }
            SenderAction::Abort(version, reason) => {
                let (epoch, version) = version.key();
                let subscription = fixtures::SUBSCRIPTION;
                self.cancel();
                self.to_client
                    .push_back(ServerMessage::Abort { subscription, epoch, version, reason });
            }
            SenderAction::Aborted(..) | SenderAction::Committed { .. } => self.cancel(),
            SenderAction::Compare(..) => sender.handle_compared(&self.topic, true),
            SenderAction::Acknowledge(epoch, version) => self.topic.acknowledge(epoch, version),
            SenderAction::ReleaseBase => {}
            other => panic!("{other:?}"),
        }
    }

    /// Cancels the sends of the version under way, and resets its streams.
    fn cancel(&mut self) {
        self.sending.clear();
        self.streams.clear();
    }

    fn begin(&mut self, send: SendAction) {
        let version = self.current.unwrap();
        let token = StreamToken(self.next_token);
        match send {
            SendAction::Manifest => {
                self.streams.push(Stream { version, chunk: None, lane: LaneId(0), token });
            }
            SendAction::Chunk(chunk, lane) => {
                let last = self.begun.insert(chunk.0, lane);
                assert!(last.is_none_or(|last| !self.lanes.contains(&last)), "{chunk} is on a live lane");
                self.streams.push(Stream { version, chunk: Some(chunk.0), lane, token });
            }
            SendAction::Again(..) | SendAction::Hashes { .. } => panic!("there is one source"),
            SendAction::Complete => {
                assert!(self.sending.iter().all(|other| !matches!(other, SendAction::Chunk(..))));
                let complete = ServerMessage::Complete {
                    subscription: fixtures::SUBSCRIPTION,
                    epoch: super::topic::EPOCH,
                    version,
                    digest: fixtures::digest(&self.selection),
                };
                self.to_client.push_back(complete);
            }
        }
        self.next_token += 1;
    }

    fn end_send(&mut self, which: usize) {
        if self.sending.is_empty() {
            return;
        }
        let send = self.sending.remove(which % self.sending.len());
        if let Some(sender) = &mut self.sender {
            sender.handle_sent(send);
        }
    }

    fn arrive(&mut self, which: usize) {
        if self.streams.is_empty() {
            return;
        }
        let stream = self.streams.remove(which % self.streams.len());
        match stream.chunk {
            None => {
                self.subscriber.handle_manifest_header().unwrap();
                self.subscriber.handle_manifest(Manifest::clone(&self.manifest)).unwrap();
            }
            Some(chunk) => {
                self.arrived.push(stream);
                let header = fixtures::header(stream.version.0, chunk);
                self.subscriber.handle_chunk(header, stream.token).unwrap();
            }
        }
    }

    fn verify(&mut self, which: usize) {
        let written = self.memory.writing.iter().nth(which % self.memory.writing.len().max(1));
        let Some((token, chunk)) = written.map(|(token, chunk)| (*token, *chunk)) else { return };
        self.memory.writing.remove(&token);
        self.arrived.retain(|stream| stream.token != token);
        self.memory.held.insert(chunk);
        self.subscriber.handle_verified(token, fixtures::verified(chunk));
    }

    fn lose(&mut self, which: usize) {
        let lanes = &self.lanes;
        let lost = self.arrived.iter().filter(|stream| !lanes.contains(&stream.lane));
        let lost = lost.filter(|stream| self.memory.writing.contains_key(&stream.token));
        let lost: Vec<_> = lost.map(|stream| stream.token).collect();
        let Some(token) = lost.get(which % lost.len().max(1)).copied() else { return };
        self.memory.writing.remove(&token);
        self.arrived.retain(|stream| stream.token != token);
        self.subscriber.handle_lost(token);
    }

    fn reconnect(&mut self) {
        self.to_server.clear();
        self.to_client.clear();
        self.cancel();
        self.arrived.clear();
        self.memory.writing.clear();
        self.sender = None;
        (self.lanes, self.next_lane, self.allowance) = (vec![LaneId(0)], 1, CREDIT);
        self.subscriber.handle_detached(CREDIT);
        self.act();
        self.subscriber.subscribe(None);
    }

    /// Delivers everything until nothing is left to be done.
    fn drain(&mut self) {
        for round in 0..100 * CHUNKS as usize {
            for step in [Step::ToServer, Step::Work(round), Step::ToClient, Step::Arrive(0), Step::Lost(0)] {
                self.step(step);
            }
            for step in [Step::Sent(0), Step::Verified(0), Step::Acknowledge] {
                self.step(step);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    /// For any order of events: each committed version is whole, no chunk has two writers, none is begun twice on live
    /// lanes, requests stay within the allowance, and once everything is delivered, the client has the newest version,
    /// unless it gave it up; in mode `every` it has each version that was not given up.
    #[test]
    fn both_machines_agree(
        every in any::<bool>(),
        wanted in prop::collection::btree_set(0u32..CHUNKS, 0..8),
        steps in prop::collection::vec(any_step(), 0..300),
    ) {
        let mode = if every { Mode::Every } else { Mode::Latest };
        let mut world = World::new(mode, &Vec::from_iter(wanted));
        for step in steps {
            world.step(step);
        }
        world.drain();
        let last = world.topic.last();
        world.step(Step::Publish);
        world.drain();
        if world.topic.last() > last {
            prop_assert_eq!(world.committed.last(), Some(&world.topic.last()));
        } else {
            prop_assert!(world.has_given_up, "only a version that was given up blocks the publisher");
        }
        if every && !world.has_given_up {
            let all = (1..=world.topic.last().0).map(Version);
            prop_assert!(world.committed.iter().copied().eq(all), "{:?}", world.committed);
        }
    }
}
