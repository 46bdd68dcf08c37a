//! The sender's state machine of one version on one subscription: the next chunk to send (PROTOCOL.md §6.3, §6.8).

use crate::{ChunkIndex, Credit, LaneId, RangeSet};
use std::{collections::BTreeMap, iter::Peekable};

/// The next action for the driver of a [`SendPlan`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SendAction {
    /// Send the manifest, before all chunks.
    Manifest,
    /// Send this chunk on this lane, then call [`SendPlan::handle_ended`]. The chunk's credit is already spent.
    Chunk(ChunkIndex, LaneId),
    /// Send `Complete`: every wanted chunk was passed to the transport, or was lost with its lane.
    Complete,
}

/// The send state of one version. It decides the order of chunks, which chunks are sent again, and when the version is
/// complete.
///
/// Pure: the driver polls it until it returns `None`, executes the actions, and reports their results. A chunk is begun
/// once, and again each time that the receiver fetches it after its lane was retired. So repeated `Fetch` messages for
/// the same chunk cause no further sends.
#[derive(Debug)]
pub struct SendPlan {
    needs_manifest: bool,
    /// Chunks that were never begun, ascending.
    waiting: Peekable<<RangeSet as IntoIterator>::IntoIter>,
    /// Chunks that were lost with their lanes and fetched by the receiver. They are sent again without credit.
    fetched: RangeSet,
    /// The begun chunks, by the lane on which they were begun last.
    begun: BTreeMap<LaneId, RangeSet>,
    /// The number of chunks that are being sent.
    in_flight: u32,
    /// Whether [`SendAction::Complete`] was returned.
    complete: bool,
    given_up: bool,
}

impl SendPlan {
    /// A plan for the chunks `wanted`, which the receiver selected and lacks, and for the manifest if it is needed.
    pub fn new(wanted: RangeSet, needs_manifest: bool) -> Self {
        Self {
            needs_manifest,
            waiting: wanted.into_iter().peekable(),
            fetched: RangeSet::new(),
            begun: BTreeMap::new(),
            in_flight: 0,
            complete: false,
            given_up: false,
        }
    }

    /// The next action; `None` if none is possible before the next event. `lane` is the lane for the next chunk;
    /// without one, no chunk is begun. Spends `credit` for a chunk that is begun for the first time.
    pub fn poll(&mut self, credit: &mut Credit, lane: Option<LaneId>) -> Option<SendAction> {
        if self.given_up {
            return None;
        }
        if std::mem::take(&mut self.needs_manifest) {
            return Some(SendAction::Manifest);
        }
        if !self.fetched.is_empty() || self.waiting.peek().is_some() {
            let lane = lane?;
            let chunk = self.next_chunk(credit)?;
            self.begun.entry(lane).or_default().insert(chunk.0);
            self.in_flight += 1;
            return Some(SendAction::Chunk(chunk, lane));
        }
        let is_complete = self.in_flight == 0 && !self.complete;
        self.complete |= is_complete;
        is_complete.then_some(SendAction::Complete)
    }

    /// Handles the end of a chunk's send. The chunk was passed to the transport completely, or was lost with its lane
    /// and will be fetched by the receiver.
    pub fn handle_ended(&mut self) {
        self.in_flight -= 1;
    }

    /// Handles the receiver's `Fetch` of `chunks`, which may be any numbers. Chunks that were last begun on a retired
    /// lane are queued again; others are ignored. Returns true if a chunk was queued and the plan was not given up.
    pub fn handle_fetch(&mut self, chunks: &RangeSet, is_retired: impl Fn(LaneId) -> bool) -> bool {
        let mut is_any_lost = false;
        for (_, begun) in self.begun.iter_mut().filter(|(lane, _)| is_retired(**lane)) {
            let lost = begun.intersection(chunks);
            if !lost.is_empty() {
                *begun = begun.difference(&lost);
                self.fetched = self.fetched.union(&lost);
                is_any_lost = true;
            }
        }
        self.begun.retain(|_, begun| !begun.is_empty());
        is_any_lost && !self.given_up
    }

    /// Ends the plan: [`poll`](Self::poll) returns no more actions. The driver cancels chunks in flight.
    pub fn give_up(&mut self) {
        self.given_up = true;
    }

    /// Whether [`give_up`](Self::give_up) was called.
    pub fn is_given_up(&self) -> bool {
        self.given_up
    }

    /// Whether [`SendAction::Complete`] was returned, after which the receiver may commit.
    pub fn is_complete(&self) -> bool {
        self.complete
    }

    /// The next chunk: a fetched one, or the next in order if there is credit for it.
    fn next_chunk(&mut self, credit: &mut Credit) -> Option<ChunkIndex> {
        let fetched = self.fetched.iter().next();
        if let Some(chunk) = fetched {
            self.fetched.remove(chunk);
            return Some(ChunkIndex(chunk));
        }
        let has_credit = credit.spend();
        self.waiting.next_if(|_| has_credit).map(ChunkIndex)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    const LANE: Option<LaneId> = Some(LaneId(0));

    fn all_of(count: u32) -> RangeSet {
        RangeSet::from_range(0..count)
    }

    fn chunk(chunk: u32, lane: u32) -> Option<SendAction> {
        Some(SendAction::Chunk(ChunkIndex(chunk), LaneId(lane)))
    }

    #[test]
    fn the_manifest_is_first_and_needs_no_credit() {
        let mut credit = Credit::new(0).unwrap();
        let mut plan = SendPlan::new(all_of(1), true);
        assert_eq!(plan.poll(&mut credit, LANE), Some(SendAction::Manifest));
        assert_eq!(plan.poll(&mut credit, LANE), None);
        credit.grant(1).unwrap();
        assert_eq!(plan.poll(&mut credit, LANE), chunk(0, 0));
        assert_eq!(plan.poll(&mut credit, LANE), None, "not complete while a chunk is in flight");
        plan.handle_ended();
        assert_eq!(plan.poll(&mut credit, LANE), Some(SendAction::Complete));
        assert_eq!(plan.poll(&mut credit, LANE), None);
    }

    #[test]
    fn an_empty_version_is_complete_at_once() {
        let mut credit = Credit::new(0).unwrap();
        let mut plan = SendPlan::new(RangeSet::new(), false);
        assert_eq!(plan.poll(&mut credit, None), Some(SendAction::Complete), "`Complete` needs no lane");
    }

    #[test]
    fn without_a_lane_no_credit_is_spent() {
        let mut credit = Credit::new(2).unwrap();
        let mut plan = SendPlan::new(all_of(2), true);
        assert_eq!(plan.poll(&mut credit, None), Some(SendAction::Manifest));
        assert_eq!(plan.poll(&mut credit, None), None);
        assert_eq!(credit.available(), 2);
        assert_eq!(plan.poll(&mut credit, Some(LaneId(5))), chunk(0, 5));
    }

    #[test]
    fn a_chunk_of_a_retired_lane_is_begun_again_once() {
        let mut credit = Credit::new(2).unwrap();
        let mut plan = SendPlan::new(all_of(2), false);
        assert_eq!(plan.poll(&mut credit, Some(LaneId(1))), chunk(0, 1));
        assert_eq!(plan.poll(&mut credit, LANE), chunk(1, 0));
        assert!(!plan.handle_fetch(&all_of(2), |_| false), "no lane is retired");
        let is_retired = |lane| lane == LaneId(1);
        assert!(!plan.handle_fetch(&RangeSet::from_range(1..u32::MAX), is_retired), "lane 0 is not retired");
        assert!(plan.handle_fetch(&all_of(u32::MAX), is_retired));
        assert!(!plan.handle_fetch(&all_of(u32::MAX), is_retired), "chunk 0 was fetched already");
        assert_eq!(plan.poll(&mut credit, LANE), chunk(0, 0), "without credit");
        assert!(!plan.handle_fetch(&all_of(u32::MAX), is_retired), "chunk 0 was begun on lane 0");
        (0..3).for_each(|_| plan.handle_ended());
        assert_eq!(plan.poll(&mut credit, LANE), Some(SendAction::Complete));
    }

    #[test]
    fn complete_is_not_repeated_after_a_fetch() {
        let mut credit = Credit::new(1).unwrap();
        let mut plan = SendPlan::new(all_of(1), false);
        assert_eq!(plan.poll(&mut credit, Some(LaneId(1))), chunk(0, 1));
        plan.handle_ended();
        assert_eq!(plan.poll(&mut credit, LANE), Some(SendAction::Complete));
        assert!(plan.handle_fetch(&all_of(1), |lane| lane == LaneId(1)));
        assert_eq!(plan.poll(&mut credit, None), None, "no lane is left");
        assert_eq!(plan.poll(&mut credit, LANE), chunk(0, 0));
        plan.handle_ended();
        assert_eq!(plan.poll(&mut credit, LANE), None);
        assert!(plan.is_complete());
    }

    #[test]
    fn a_version_that_was_given_up_sends_nothing() {
        let mut credit = Credit::new(2).unwrap();
        let mut plan = SendPlan::new(all_of(2), true);
        assert_eq!(plan.poll(&mut credit, LANE), Some(SendAction::Manifest));
        assert_eq!(plan.poll(&mut credit, LANE), chunk(0, 0));
        assert!(!plan.is_given_up());
        plan.give_up();
        assert!(plan.is_given_up());
        assert!(!plan.handle_fetch(&all_of(2), |_| true));
        assert_eq!(plan.poll(&mut credit, LANE), None);
        plan.handle_ended();
        assert_eq!(plan.poll(&mut credit, LANE), None, "not complete either");
        assert!(!plan.is_complete());
    }

    /// An event during the transfer of a version.
    #[derive(Debug, Clone)]
    enum Step {
        Grant(u32),
        Poll(Option<u32>),
        End,
        Retire(u32),
        Fetch(Vec<(u32, u32)>),
        GiveUp,
    }

    fn any_step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => (1u32..5).prop_map(Step::Grant),
            12 => prop::option::weighted(0.9, 0u32..6).prop_map(Step::Poll),
            6 => Just(Step::End),
            1 => (0u32..6).prop_map(Step::Retire),
            3 => prop::collection::vec((0u32..100, 0u32..60), 0..3).prop_map(Step::Fetch),
        ]
    }

    fn any_steps() -> impl Strategy<Value = Vec<Step>> {
        (
            prop::collection::vec(any_step(), 0..400),
            prop::option::weighted(0.2, prop::sample::Index::arbitrary()),
        )
            .prop_map(|(mut steps, given_up)| {
                if let Some(at) = given_up {
                    steps.insert(at.index(steps.len() + 1), Step::GiveUp);
                }
                steps
            })
    }

    /// The expected state of one wanted chunk.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Model {
        Waiting,
        Fetched,
        Begun(u32),
    }

    /// A driver that checks each action against the model.
    struct Driver {
        plan: SendPlan,
        credit: Credit,
        model: BTreeMap<u32, Model>,
        retired: BTreeSet<u32>,
        in_flight: u32,
        completes: u32,
        /// The total credit granted.
        granted: u32,
        /// The number of chunks begun at least once.
        begun: u32,
        given_up: bool,
    }

    impl Driver {
        fn new(wanted: &BTreeSet<u32>) -> Self {
            Self {
                plan: SendPlan::new(wanted.iter().map(|n| *n..n + 1).collect(), false),
                credit: Credit::new(0).unwrap(),
                model: wanted.iter().map(|n| (*n, Model::Waiting)).collect(),
                retired: BTreeSet::new(),
                in_flight: 0,
                completes: 0,
                granted: 0,
                begun: 0,
                given_up: false,
            }
        }

        fn step(&mut self, step: Step) {
            match step {
                Step::Grant(chunks) => {
                    self.granted += u32::from(self.credit.grant(chunks).is_ok()) * chunks;
                }
                Step::Poll(lane) => self.poll(lane.filter(|lane| !self.retired.contains(lane))),
                Step::End if self.in_flight > 0 => {
                    self.in_flight -= 1;
                    self.plan.handle_ended();
                }
                Step::End => {}
                Step::Retire(lane) => drop(self.retired.insert(lane)),
                Step::Fetch(ranges) => {
                    self.fetch(ranges.into_iter().map(|(start, len)| start..start + len).collect())
                }
                Step::GiveUp => {
                    self.given_up = true;
                    self.plan.give_up();
                }
            }
        }

        fn poll(&mut self, lane: Option<u32>) {
            let due = self.model.values().filter(|state| !matches!(state, Model::Begun(_))).count();
            match self.plan.poll(&mut self.credit, lane.map(LaneId)) {
                Some(SendAction::Chunk(chunk, on)) => {
                    assert!(!self.given_up);
                    assert_eq!(Some(on.0), lane);
                    let first_waiting =
                        self.model.iter().find(|(_, state)| **state == Model::Waiting).map(|(n, _)| *n);
                    let state = self.model.get_mut(&chunk.0).expect("the chunk is wanted");
                    match state {
                        Model::Waiting => {
                            assert_eq!(first_waiting, Some(chunk.0), "in order");
                            self.begun += 1;
                        }
                        Model::Fetched => {}
                        Model::Begun(_) => panic!("chunk {chunk} was begun twice"),
                    }
                    *state = Model::Begun(on.0);
                    self.in_flight += 1;
                    let unspent = self.granted - self.begun;
                    assert_eq!(self.credit.available(), unspent, "only a chunk's first send costs credit");
                }
                Some(SendAction::Complete) => {
                    assert!(!self.given_up && due == 0 && self.in_flight == 0);
                    self.completes += 1;
                }
                Some(SendAction::Manifest) => panic!("the receiver has the manifest"),
                None => {
                    let has_fetched = self.model.values().any(|state| *state == Model::Fetched);
                    let can_begin = lane.is_some() && due > 0 && (has_fetched || self.credit.available() > 0);
                    let can_complete = due == 0 && self.in_flight == 0 && self.completes == 0;
                    assert!(self.given_up || !(can_begin || can_complete), "an action was possible");
                }
            }
        }

        fn fetch(&mut self, chunks: RangeSet) {
            let mut is_any_lost = false;
            for (_, state) in self.model.iter_mut().filter(|(n, _)| chunks.contains(**n)) {
                if let Model::Begun(lane) = state
                    && self.retired.contains(lane)
                {
                    *state = Model::Fetched;
                    is_any_lost = true;
                }
            }
            let retired = self.retired.clone();
            let is_queued = self.plan.handle_fetch(&chunks, |lane| retired.contains(&lane.0));
            assert_eq!(is_queued, is_any_lost && !self.given_up);
        }
    }

    proptest! {
        /// For any order of grants, polls, ended sends, retirements and fetches, even of chunks that do not exist:
        /// every wanted chunk is begun, in order, within the credit, and again only after a fetch that followed the
        /// retirement of its lane; `Complete` is returned once, when no chunk waits or is in flight; after `give_up`
        /// there is no action.
        #[test]
        fn behaves_like_the_model(wanted in prop::collection::btree_set(0u32..80, 0..50), steps in any_steps()) {
            let mut driver = Driver::new(&wanted);
            steps.into_iter().for_each(|step| driver.step(step));
            for _ in 0..wanted.len() + 1 {
                [Step::Grant(4), Step::Poll(Some(9)), Step::End].into_iter().for_each(|step| driver.step(step));
            }
            while driver.in_flight > 0 {
                driver.step(Step::End);
            }
            driver.step(Step::Poll(None));
            let all_begun = driver.model.values().all(|state| matches!(state, Model::Begun(_)));
            prop_assert!(driver.given_up || (all_begun && driver.completes == 1));
            prop_assert!(driver.completes <= 1);
            prop_assert_eq!(driver.plan.is_complete(), driver.completes == 1);
        }
    }
}
