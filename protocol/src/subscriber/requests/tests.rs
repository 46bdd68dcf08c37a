//! Tests of [`Requests`]: any events of up to three sources, compared with a model of what the sources owe; and single
//! decisions.

use super::*;
use crate::subscriber::{
    StreamToken,
    arrivals::WaitingStream,
    fixtures::{SUBSCRIPTION, hash, header, manifest, select, verified},
};
use crate::{ChunkHash, ChunkHeader};
use proptest::prelude::*;
use std::collections::BTreeSet;

const CHUNKS: u32 = 12;
const ORIGIN: SubscriptionId = SUBSCRIPTION;
const SECOND: SubscriptionId = SubscriptionId(2);
const THIRD: SubscriptionId = SubscriptionId(3);

/// One event. A `usize` selects one of several candidates: it is an index modulo their number.
#[derive(Debug, Clone, Copy)]
enum Step {
    /// A source announces the version.
    Add(SubscriptionId),
    /// A source is not used any more. The flag says whether its connection, and so each of its streams, was lost.
    Remove(SubscriptionId, bool),
    /// The header of a chunk arrives that the source pushes or owes.
    Header(SubscriptionId, usize),
    Verified(usize),
    /// The stream of a chunk on a retired lane ends early.
    Lost(usize),
    /// A lane of the source is retired. What it owes of the chunks with these bits is lost.
    Retired(SubscriptionId, u32),
    /// A verified chunk differs from the list.
    Discarded(usize),
    /// The whole list of hashes arrives.
    Listed,
}

fn any_step() -> impl Strategy<Value = Step> {
    let source = (ORIGIN.0..=THIRD.0).prop_map(SubscriptionId);
    let which = 0usize..64;
    prop_oneof![
        2 => source.clone().prop_map(Step::Add),
        1 => (source.clone(), any::<bool>()).prop_map(|(source, is_lost)| Step::Remove(source, is_lost)),
        12 => (source.clone(), which.clone()).prop_map(|(source, which)| Step::Header(source, which)),
        8 => which.clone().prop_map(Step::Verified),
        4 => which.clone().prop_map(Step::Lost),
        3 => (source, any::<u32>()).prop_map(|(source, lost)| Step::Retired(source, lost)),
        1 => which.prop_map(Step::Discarded),
        1 => Just(Step::Listed),
    ]
}

/// The requests of a version, and a model of its sources.
struct World {
    requests: Requests,
    assembly: Assembly,
    arrivals: Arrivals,
    allowance: u32,
    wanted: RangeSet,
    /// The sources in use.
    sources: BTreeSet<SubscriptionId>,
    /// The chunks that each source will send: it was asked for them, and has not lost them with a lane.
    owed: BTreeSet<(SubscriptionId, u32)>,
    /// The chunks that were pushed. None is pushed twice.
    pushed: BTreeSet<u32>,
    streams: BTreeMap<StreamToken, (SubscriptionId, u32)>,
    next_stream: u64,
    /// The sources that have lost a lane.
    retired: BTreeSet<SubscriptionId>,
    /// The chunks that were ordered of a source while another one owed them.
    twice: BTreeSet<u32>,
    has_two_sources: bool,
}

impl World {
    fn new(wanted: &[u32], allowance: u32) -> Self {
        let selection = select(manifest(CHUNKS), wanted);
        Self {
            requests: Requests::default(),
            wanted: selection.chunks().clone(),
            assembly: Assembly::new(selection),
            arrivals: Arrivals::new(allowance),
            allowance,
            sources: BTreeSet::new(),
            owed: BTreeSet::new(),
            pushed: BTreeSet::new(),
            streams: BTreeMap::new(),
            next_stream: 0,
            retired: BTreeSet::new(),
            twice: BTreeSet::new(),
            has_two_sources: false,
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Add(source) => self.add(source),
            Step::Remove(source, is_lost) => self.remove(source, is_lost),
            Step::Header(source, which) => self.deliver_header(source, which),
            Step::Verified(which) => {
                if let Some((source, chunk)) = self.end_stream(which, |_| true) {
                    self.requests.note_progress(source);
                    self.assembly.handle_verified(verified(chunk));
                }
            }
            Step::Lost(which) => {
                let retired = self.retired.clone();
                if let Some((source, chunk)) = self.end_stream(which, |source| retired.contains(&source)) {
                    self.requests.note_progress(source);
                    self.lose(chunk);
                }
            }
            Step::Retired(source, lost) => {
                self.owed.retain(|(owes, chunk)| *owes != source || lost & (1 << chunk) == 0);
                if source == ORIGIN || self.sources.contains(&source) {
                    self.retired.insert(source);
                    self.requests.handle_retired(source, ORIGIN);
                }
            }
            Step::Discarded(which) => {
                let held: Vec<u32> = self.assembly.held().iter().collect();
                if let Some(chunk) = held.get(which % held.len().max(1)).filter(|_| self.has_two_sources) {
                    self.assembly.discard(ChunkIndex(*chunk));
                    self.requests.handle_lost(ChunkIndex(*chunk), &self.assembly);
                }
            }
            Step::Listed => {
                let list: Vec<ChunkHash> = self.wanted.iter().map(hash).collect();
                if self.requests.lister().is_some() && !self.assembly.is_listed() && !list.is_empty() {
                    assert_eq!(self.assembly.handle_hashes(0, &list), Ok(vec![]));
                }
            }
        }
        self.order();
        self.check();
    }

    /// As the subscriber does it: the first announcement of a further source ends the pushing.
    fn add(&mut self, source: SubscriptionId) {
        let is_pushed = !self.requests.is_pushing_ended();
        if self.sources.contains(&source) || is_pushed && source == ORIGIN {
            return;
        }
        if is_pushed {
            self.requests
                .end_pushing(ORIGIN, &self.assembly.missing(), self.arrivals.credit());
            self.sources.insert(ORIGIN);
        }
        self.requests.add_source(source);
        self.sources.insert(source);
        self.has_two_sources |= self.sources.len() > 1;
    }

    fn remove(&mut self, source: SubscriptionId, is_lost: bool) {
        if !self.sources.remove(&source) {
            return;
        }
        self.owed.retain(|(owes, _)| *owes != source);
        if is_lost {
            self.streams.retain(|_, (of, _)| *of != source);
            let (lost, waiting) = self.arrivals.end_source(source);
            assert!(waiting.is_empty());
            lost.into_iter().for_each(|chunk| self.lose(chunk.0));
        } else {
            self.retired.insert(source); // Each of its streams may end early.
        }
        self.requests.remove_source(source, &self.assembly);
    }

    fn deliver_header(&mut self, source: SubscriptionId, which: usize) {
        let is_pushed = !self.requests.is_pushing_ended();
        let sent: Vec<u32> = match is_pushed {
            true if source == ORIGIN => {
                let unsent = self.wanted.iter().filter(|chunk| !self.pushed.contains(chunk));
                unsent.take(self.arrivals.credit() as usize).collect()
            }
            true => vec![],
            false => self
                .owed
                .iter()
                .filter(|(owes, _)| *owes == source)
                .map(|(_, chunk)| *chunk)
                .collect(),
        };
        let Some(chunk) = sent.get(which % sent.len().max(1)).copied() else { return };
        self.owed.remove(&(source, chunk));
        assert_eq!(
            self.requests.handle_header(source, ChunkIndex(chunk)),
            !is_pushed,
            "{chunk} of {source:?}"
        );
        if is_pushed {
            self.arrivals.spend().unwrap();
            self.pushed.insert(chunk);
        }
        let header = ChunkHeader { subscription: source, ..header(1, chunk) };
        // A chunk that is verified or arriving is not received.
        if self.assembly.handle_header(&header).is_ok() {
            let stream = StreamToken(self.next_stream);
            self.next_stream += 1;
            self.arrivals.begin(stream, &header);
            self.streams.insert(stream, (source, chunk));
        }
    }

    fn end_stream(
        &mut self,
        which: usize,
        may_end: impl Fn(SubscriptionId) -> bool,
    ) -> Option<(SubscriptionId, u32)> {
        let ending: Vec<_> = self.streams.iter().filter(|(_, (source, _))| may_end(*source)).collect();
        let (stream, ended) = ending
            .get(which % ending.len().max(1))
            .map(|(stream, ended)| (**stream, **ended))?;
        self.streams.remove(&stream);
        let is_pushed = !self.requests.is_pushing_ended();
        assert_eq!(self.arrivals.end(stream, is_pushed), Some((ChunkIndex(ended.1), ended.0)));
        Some(ended)
    }

    fn lose(&mut self, chunk: u32) {
        self.assembly.handle_lost(ChunkIndex(chunk));
        self.requests.handle_lost(ChunkIndex(chunk), &self.assembly);
    }

    /// Executes and checks all orders.
    fn order(&mut self) {
        while let Some(Order { source, chunks, hashes, again: false }) =
            self.requests.next(ORIGIN, &self.assembly, &self.arrivals, self.allowance)
        {
            if self.sources.is_empty() {
                self.sources.insert(ORIGIN); // A loss ended the pushing.
            }
            assert!(self.sources.contains(&source));
            if hashes {
                let is_asked_of =
                    if self.sources.contains(&ORIGIN) { Some(&ORIGIN) } else { self.sources.first() };
                assert_eq!((Some(&source), self.has_two_sources), (is_asked_of, true));
                self.assembly.begin_list();
            }
            let missing = self.assembly.missing();
            let is_idle = !self.owed.iter().chain(self.streams.values()).any(|(owes, _)| *owes == source);
            for chunk in chunks.iter() {
                assert!(missing.contains(chunk), "{chunk} is verified or arriving");
                let is_new = self.owed.insert((source, chunk));
                let is_owed = self.owed.iter().any(|(other, owed)| *other != source && *owed == chunk);
                if is_new && is_owed && !self.retired.contains(&source) {
                    assert!(is_idle && self.unordered().is_empty(), "{chunk} is ordered twice too early");
                    assert!(self.twice.insert(chunk), "{chunk} is ordered a third time");
                }
            }
            assert!(self.outstanding() <= self.allowance, "{} are outstanding", self.outstanding());
        }
    }

    fn outstanding(&self) -> u32 {
        (self.owed.len() + self.streams.len()) as u32
    }

    fn unordered(&self) -> RangeSet {
        let pulled = self.requests.pulled.as_ref();
        pulled
            .map(|pulled| pulled.unordered.intersection(&self.assembly.missing()))
            .unwrap_or_default()
    }

    /// Checks the state when there is no further order.
    fn check(&mut self) {
        let Some(pulled) = &self.requests.pulled else {
            return assert!(self.owed.is_empty() && self.sources.is_empty());
        };
        assert!(pulled.sources.keys().eq(&self.sources));
        assert_eq!(self.requests.sources(), self.sources.len());
        let ordered: Vec<(SubscriptionId, u32)> = pulled
            .sources
            .iter()
            .flat_map(|(source, of)| of.ordered.iter().map(|chunk| (*source, chunk)))
            .collect();
        for (source, chunk) in &self.owed {
            assert!(ordered.contains(&(*source, *chunk)), "{source:?} will send {chunk}");
        }
        for chunk in self.assembly.missing().iter() {
            let is_ordered = ordered.iter().any(|(_, of)| *of == chunk);
            assert!(
                is_ordered != pulled.unordered.contains(chunk),
                "{chunk} is either ordered or to be ordered"
            );
        }
        // No source that may be asked for more waits while chunks are to be ordered.
        let outstanding = ordered.len() + self.streams.len();
        let share = (self.allowance as usize / self.sources.len().max(1)).max(1);
        if outstanding < self.allowance as usize && !self.unordered().is_empty() {
            for source in &self.sources {
                let receiving = self.streams.values().filter(|(of, _)| of == source).count();
                let busy = ordered.iter().filter(|(of, _)| of == source).count() + receiving;
                assert!(busy >= share, "{source:?} sends {busy} of {share}");
            }
        }
        if self.has_two_sources && !self.assembly.is_listed() && !self.sources.is_empty() {
            let lister = self.requests.lister();
            assert!(lister.is_some_and(|lister| self.sources.contains(&lister)), "{lister:?} sends the list");
        }
    }

    /// Lets everything arrive; the version is whole then.
    fn drain(&mut self) {
        if self.requests.is_pushing_ended() {
            self.step(Step::Add(ORIGIN));
        }
        for _ in 0..3 * CHUNKS {
            for source in [ORIGIN, SECOND, THIRD] {
                self.step(Step::Header(source, 0));
                self.step(Step::Verified(0));
            }
        }
        assert_eq!(self.assembly.held(), self.wanted, "{:?}", self.requests);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// For any order of events: each wanted chunk is verified, arriving, ordered or to be ordered, what is outstanding
    /// stays within the allowance, no source is idle that could send more, a chunk is ordered of a second source once
    /// and only if that one has nothing else to send, and once everything has arrived, the version is whole.
    #[test]
    fn every_chunk_is_ordered_within_the_allowance(
        wanted in prop::collection::btree_set(0u32..CHUNKS, 0..14),
        allowance in 1u32..8,
        steps in prop::collection::vec(any_step(), 0..120),
    ) {
        let mut world = World::new(&Vec::from_iter(wanted), allowance);
        for step in steps {
            world.step(step);
        }
        world.drain();
    }
}

/// Requests of a version of this many chunks, of which the origin owes the first `CREDIT`, and the assembly.
fn pulled(chunks: u32) -> (Requests, Assembly) {
    let assembly = Assembly::new(select(manifest(chunks), &Vec::from_iter(0..chunks)));
    let mut requests = Requests::default();
    requests.end_pushing(ORIGIN, &assembly.missing(), CREDIT);
    (requests, assembly)
}

const CREDIT: u32 = 4;

/// All orders that are due.
fn orders(requests: &mut Requests, assembly: &Assembly, arrivals: &Arrivals) -> Vec<(u32, Vec<u32>, bool)> {
    let orders = std::iter::from_fn(|| requests.next(ORIGIN, assembly, arrivals, CREDIT));
    orders
        .map(|order| (order.source.0, order.chunks.iter().collect(), order.hashes))
        .collect()
}

/// The stream of a chunk begins to be received.
fn begin(
    requests: &mut Requests,
    assembly: &mut Assembly,
    arrivals: &mut Arrivals,
    (source, chunk): (SubscriptionId, u32),
) {
    assert!(requests.handle_header(source, ChunkIndex(chunk)));
    let header = ChunkHeader { subscription: source, ..header(1, chunk) };
    assembly.handle_header(&header).unwrap();
    arrivals.begin(StreamToken(chunk.into()), &header);
}

/// An idle source is asked for the last half of what another one owes, once.
#[test]
fn what_a_slow_source_owes_last_is_ordered_twice() {
    let (mut requests, mut assembly) = pulled(4);
    let mut arrivals = Arrivals::new(0);
    requests.add_source(SECOND);
    begin(&mut requests, &mut assembly, &mut arrivals, (ORIGIN, 0));
    arrivals.end(StreamToken(0), false);
    assembly.handle_verified(verified(0));
    assert_eq!(
        orders(&mut requests, &assembly, &arrivals),
        [(1, vec![1, 2, 3], true), (2, vec![3], false)],
        "there is room for one"
    );
    begin(&mut requests, &mut assembly, &mut arrivals, (SECOND, 3));
    assert_eq!(orders(&mut requests, &assembly, &arrivals), [], "it is busy");
    arrivals.end(StreamToken(3), false);
    assembly.handle_verified(verified(3));
    assert_eq!(orders(&mut requests, &assembly, &arrivals), [(2, vec![2], false)]);
    requests.handle_header(SECOND, ChunkIndex(2));
    assert_eq!(
        orders(&mut requests, &assembly, &arrivals),
        [(2, vec![1], false)],
        "chunk 2 was ordered twice"
    );
}

/// Both sources lose a chunk that was ordered of both: one with a lane while it arrives from the other, that one later.
#[test]
fn a_chunk_that_both_sources_lose_is_ordered_again() {
    let (mut requests, mut assembly) = pulled(2);
    let mut arrivals = Arrivals::new(0);
    requests.add_source(SECOND);
    assert_eq!(orders(&mut requests, &assembly, &arrivals), [(1, vec![0, 1], true), (2, vec![1], false)]);
    begin(&mut requests, &mut assembly, &mut arrivals, (SECOND, 1));
    requests.handle_retired(ORIGIN, ORIGIN);
    assert_eq!(orders(&mut requests, &assembly, &arrivals), [(1, vec![0], false)], "chunk 1 is arriving");
    arrivals.end(StreamToken(1), false);
    assembly.handle_lost(ChunkIndex(1));
    requests.handle_lost(ChunkIndex(1), &assembly);
    assert_eq!(orders(&mut requests, &assembly, &arrivals)[0], (1, vec![0, 1], false));
}

/// A source is stalled if it owes or sends chunks without progress, is not the origin, and is not the only one.
#[test]
fn a_source_that_owes_chunks_must_make_progress() {
    let checks = |requests: &mut Requests, arrivals: &Arrivals, count: usize| -> Vec<Option<u32>> {
        let check =
            |requests: &mut Requests| requests.check_sources(ORIGIN, arrivals, 2).map(|source| source.0);
        (0..count).map(|_| check(requests)).collect()
    };
    let mut arrivals = Arrivals::new(0);
    assert_eq!(checks(&mut Requests::default(), &arrivals, 3), [None; 3], "the version is pushed");
    let (mut requests, mut assembly) = pulled(9);
    requests.add_source(SECOND);
    requests.handle_header(ORIGIN, ChunkIndex(0));
    assert_eq!(orders(&mut requests, &assembly, &arrivals), [(1, vec![1, 2, 3], true), (2, vec![4], false)]);
    assert_eq!(checks(&mut requests, &arrivals, 3), [None, Some(2), Some(2)]);
    requests.note_progress(SECOND);
    assert_eq!(checks(&mut requests, &arrivals, 3), [None, None, Some(2)]);
    begin(&mut requests, &mut assembly, &mut arrivals, (SECOND, 4));
    assert_eq!(checks(&mut requests, &arrivals, 3), [None, None, Some(2)], "a header is progress");
    arrivals.end(StreamToken(4), false);
    assert_eq!(checks(&mut requests, &arrivals, 3), [None; 3], "it owes nothing");
    assert_eq!(orders(&mut requests, &assembly, &arrivals).last(), Some(&(2, vec![5], false)));
    requests.remove_source(ORIGIN, &assembly);
    assert_eq!(checks(&mut requests, &arrivals, 3), [None; 3], "it is the only source");
    requests.add_source(THIRD);
    assert_eq!(checks(&mut requests, &arrivals, 1), [Some(2)]);
}

/// A slow source that sends parts of a chunk is not stalled, until another one has the whole chunk.
#[test]
fn a_part_of_a_chunk_is_progress_unless_it_holds_up_another_source() {
    let (mut requests, mut assembly) = pulled(2);
    let mut arrivals = Arrivals::new(0);
    requests.add_source(SECOND);
    orders(&mut requests, &assembly, &arrivals);
    begin(&mut requests, &mut assembly, &mut arrivals, (SECOND, 1));
    let check = |requests: &mut Requests, arrivals: &Arrivals| {
        requests.note_part(SECOND);
        requests.check_sources(ORIGIN, arrivals, 2)
    };
    assert_eq!((0..9).map(|_| check(&mut requests, &arrivals)).collect::<Vec<_>>(), [None; 9]);
    let header = ChunkHeader { subscription: ORIGIN, ..header(1, 1) };
    arrivals.push_spare(WaitingStream { stream: StreamToken(99), header });
    assert_eq!([(); 2].map(|()| check(&mut requests, &arrivals)), [None, Some(SECOND)]);
}

#[test]
fn a_pushed_version_has_no_sources() {
    let mut requests = Requests::default();
    let assembly = Assembly::new(select(manifest(2), &[0, 1]));
    requests.add_source(SECOND);
    requests.remove_source(SECOND, &assembly);
    assert!(
        !requests.is_pushing_ended() && !requests.has_source(SECOND) && requests.others(ORIGIN).is_empty()
    );
    assert_eq!((requests.sources(), requests.lister()), (0, None));
    requests.end_pushing(ORIGIN, &assembly.missing(), 1);
    requests.end_pushing(SECOND, &assembly.missing(), 2); // It has ended.
    requests.add_source(SECOND);
    assert!(requests.is_pushing_ended() && requests.has_source(SECOND) && !requests.has_source(THIRD));
    assert_eq!(
        (requests.sources(), requests.others(ORIGIN), requests.others(SECOND)),
        (2, vec![SECOND], vec![ORIGIN])
    );
    assert_eq!(orders(&mut requests, &assembly, &Arrivals::new(0)).first(), Some(&(1, vec![0, 1], true)));
}

/// The list is asked of the origin if it is a source, and of another one only until it is complete.
#[test]
fn the_list_is_asked_for_until_it_is_complete() {
    let (mut requests, mut assembly) = pulled(2);
    let arrivals = Arrivals::new(0);
    requests.add_source(SECOND);
    orders(&mut requests, &assembly, &arrivals);
    assert_eq!(requests.lister(), Some(ORIGIN));
    assembly.begin_list();
    requests.remove_source(SECOND, &assembly);
    assert_eq!(requests.lister(), Some(ORIGIN), "another source was lost");
    requests.add_source(SECOND);
    requests.remove_source(ORIGIN, &assembly);
    assert_eq!(requests.lister(), None);
    assert_eq!(orders(&mut requests, &assembly, &arrivals), [(2, vec![0, 1], true)]);
    assembly.begin_list();
    assembly.handle_hashes(0, &[hash(0), hash(1)]).unwrap();
    requests.add_source(THIRD);
    requests.remove_source(SECOND, &assembly);
    assert_eq!(orders(&mut requests, &assembly, &arrivals), [(3, vec![0, 1], false)]);
}

/// Without a retired lane, a stream that ends early belongs to a version that the server gave up.
#[test]
fn a_loss_ends_the_pushing_only_after_a_lane_is_retired() {
    for is_retired in [false, true] {
        let mut assembly = Assembly::new(select(manifest(2), &[0, 1]));
        let (mut requests, mut arrivals) = (Requests::default(), Arrivals::new(0));
        for chunk in 0..2 {
            assert!(!requests.handle_header(ORIGIN, ChunkIndex(chunk)), "it was pushed");
            assembly.handle_header(&header(1, chunk)).unwrap();
            arrivals.begin(StreamToken(chunk.into()), &header(1, chunk));
        }
        if is_retired {
            requests.handle_retired(ORIGIN, ORIGIN);
        }
        assert_eq!(orders(&mut requests, &assembly, &arrivals), [], "each chunk is arriving");
        arrivals.end(StreamToken(1), true);
        assembly.handle_lost(ChunkIndex(1));
        requests.handle_lost(ChunkIndex(1), &assembly);
        let ordered = orders(&mut requests, &assembly, &arrivals);
        assert_eq!(ordered, if is_retired { vec![(1, vec![1], false)] } else { vec![] });
    }
}
