//! Tests of [`SendPlan`]: single rules, and any events compared with a model of each chunk.

use super::{requests::REQUESTED_MAX, *};
use crate::PARTIAL_RANGES_MAX;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const LANE: Option<LaneId> = Some(LaneId(0));

fn all_of(count: u32) -> RangeSet {
    RangeSet::from_range(0..count)
}

fn plan_of(count: u32, needs_manifest: bool) -> SendPlan {
    let mut plan = SendPlan::new(needs_manifest, false);
    plan.handle_selected(all_of(count));
    plan
}

/// The next send of a version that is not shared and is here as a whole.
fn poll(plan: &mut SendPlan, credit: &mut Credit, lane: Option<LaneId>) -> Option<SendAction> {
    plan.poll(credit, lane, &Here::All, |_| Pick::InOrder)
}

/// Requests `chunks` of a version of which the first `selected` ones are selected.
fn request(
    plan: &mut SendPlan,
    selected: u32,
    chunks: &RangeSet,
    is_live: impl Fn(LaneId) -> bool,
) -> Result<bool, ProtocolViolation> {
    plan.end_pushing();
    let wanted = ChunkRequest { chunks: chunks.clone(), ..ChunkRequest::default() };
    plan.handle_request(&wanted, &all_of(selected), is_live)
}

/// Ends the send of a chunk.
fn sent(plan: &mut SendPlan) {
    plan.handle_sent(SendAction::Chunk(ChunkIndex(0), LaneId(0)));
}

fn chunk(chunk: u32, lane: u32) -> Option<SendAction> {
    Some(SendAction::Chunk(ChunkIndex(chunk), LaneId(lane)))
}

#[test]
fn the_manifest_is_first_and_needs_no_credit() {
    let mut credit = Credit::new(0).unwrap();
    let mut plan = SendPlan::new(true, false);
    assert_eq!(poll(&mut plan, &mut credit, LANE), Some(SendAction::Manifest));
    assert_eq!(poll(&mut plan, &mut credit, LANE), None, "the selected chunks are unknown");
    plan.handle_selected(all_of(1));
    assert_eq!(poll(&mut plan, &mut credit, LANE), None);
    credit.grant(1).unwrap();
    assert_eq!(poll(&mut plan, &mut credit, LANE), chunk(0, 0));
    assert_eq!(poll(&mut plan, &mut credit, LANE), None, "not complete while a chunk is in flight");
    sent(&mut plan);
    assert_eq!(poll(&mut plan, &mut credit, LANE), Some(SendAction::Complete));
    assert_eq!(poll(&mut plan, &mut credit, LANE), None);
}

#[test]
fn an_empty_version_is_complete_at_once() {
    let mut credit = Credit::new(0).unwrap();
    let mut plan = plan_of(0, false);
    assert_eq!(poll(&mut plan, &mut credit, None), Some(SendAction::Complete), "`Complete` needs no lane");
}

#[test]
fn without_a_lane_no_credit_is_spent() {
    let mut credit = Credit::new(2).unwrap();
    let mut plan = plan_of(2, true);
    assert_eq!(poll(&mut plan, &mut credit, None), Some(SendAction::Manifest));
    assert_eq!(poll(&mut plan, &mut credit, None), None);
    assert_eq!(credit.available(), 2);
    assert_eq!(poll(&mut plan, &mut credit, Some(LaneId(5))), chunk(0, 5));
}

#[test]
fn held_chunks_are_sent_only_if_they_are_requested() {
    let mut credit = Credit::new(9).unwrap();
    let mut plan = SendPlan::new(false, false);
    plan.handle_selected(RangeSet::from_range(2..3));
    assert_eq!(poll(&mut plan, &mut credit, LANE), chunk(2, 0));
    assert_eq!(request(&mut plan, 3, &RangeSet::from_range(1..9), |_| true), Ok(true));
    assert_eq!(poll(&mut plan, &mut credit, LANE), chunk(1, 0));
    assert_eq!(poll(&mut plan, &mut credit, LANE), None, "chunk 2 is under way, others do not exist");
}

#[test]
fn a_chunk_of_a_retired_lane_is_begun_again_once() {
    let mut credit = Credit::new(2).unwrap();
    let mut plan = plan_of(2, false);
    assert_eq!(poll(&mut plan, &mut credit, Some(LaneId(1))), chunk(0, 1));
    assert_eq!(poll(&mut plan, &mut credit, LANE), chunk(1, 0));
    assert_eq!(request(&mut plan, 2, &all_of(2), |_| true), Ok(false), "no lane is retired");
    let is_live = |lane| lane != LaneId(1);
    assert_eq!(request(&mut plan, 2, &RangeSet::from_range(1..u32::MAX), is_live), Ok(false), "lane 0 lives");
    assert_eq!(request(&mut plan, 2, &all_of(u32::MAX), is_live), Ok(true));
    assert_eq!(request(&mut plan, 2, &all_of(u32::MAX), is_live), Ok(false), "chunk 0 was requested already");
    assert_eq!(poll(&mut plan, &mut credit, LANE), chunk(0, 0), "without credit");
    assert_eq!(request(&mut plan, 2, &all_of(u32::MAX), is_live), Ok(false), "chunk 0 was begun on lane 0");
    (0..3).for_each(|_| sent(&mut plan));
    assert_eq!(poll(&mut plan, &mut credit, LANE), Some(SendAction::Complete));
}

#[test]
fn a_request_ends_the_pushing() {
    let mut credit = Credit::new(9).unwrap();
    let mut plan = plan_of(9, false);
    assert_eq!(poll(&mut plan, &mut credit, LANE), chunk(0, 0));
    assert_eq!(request(&mut plan, 9, &RangeSet::from_range(5..6), |_| true), Ok(true));
    assert_eq!(poll(&mut plan, &mut credit, LANE), chunk(5, 0));
    (0..2).for_each(|_| sent(&mut plan));
    assert_eq!(poll(&mut plan, &mut credit, LANE), None, "seven chunks were not sent");
    assert_eq!(request(&mut plan, 9, &all_of(9), |_| true), Ok(true));
    assert_eq!(poll(&mut plan, &mut credit, None), None, "no lane is left");
    for index in [1, 2, 3, 4, 6, 7, 8] {
        assert_eq!(poll(&mut plan, &mut credit, LANE), chunk(index, 0));
        sent(&mut plan);
    }
    assert_eq!(poll(&mut plan, &mut credit, LANE), Some(SendAction::Complete));
    assert_eq!(request(&mut plan, 9, &all_of(1), |_| false), Ok(true), "its lane was lost");
    assert_eq!(poll(&mut plan, &mut credit, LANE), chunk(0, 0));
    sent(&mut plan);
    assert_eq!(poll(&mut plan, &mut credit, LANE), None, "`Complete` is not repeated");
    assert!(plan.complete);
}

#[test]
fn hashes_are_sent_once_and_one_message_at_a_time() {
    let mut credit = Credit::new(0).unwrap();
    let mut plan = plan_of(HASHES_PER_MESSAGE + 1, false);
    plan.end_pushing();
    for _ in 0..2 {
        plan.handle_hashes_requested(HASHES_PER_MESSAGE + 1); // Repeated, it has no effect.
    }
    let first = SendAction::Hashes { first: 0, end: HASHES_PER_MESSAGE };
    assert_eq!(poll(&mut plan, &mut credit, None), Some(first));
    assert_eq!(poll(&mut plan, &mut credit, None), None);
    plan.handle_sent(first);
    let last = SendAction::Hashes { first: HASHES_PER_MESSAGE, end: HASHES_PER_MESSAGE + 1 };
    assert_eq!(poll(&mut plan, &mut credit, None), Some(last));
    plan.handle_sent(last);
    plan.handle_hashes_requested(HASHES_PER_MESSAGE + 1);
    assert_eq!(poll(&mut plan, &mut credit, LANE), None, "nothing else was requested");
    assert!(plan.may_be_committed());
}

#[test]
fn a_discarded_chunk_is_begun_again_on_live_lanes_without_a_base() {
    let mut credit = Credit::new(2).unwrap();
    let mut plan = plan_of(2, false);
    (0..2).for_each(|index| assert_eq!(poll(&mut plan, &mut credit, LANE), chunk(index, 0)));
    plan.end_pushing();
    let again = ChunkRequest { chunks: RangeSet::from_range(1..9), again: true, ..ChunkRequest::default() };
    assert_eq!(plan.handle_request(&again, &all_of(2), |_| true), Ok(false), "it is no progress");
    let action = SendAction::Again(ChunkIndex(1), LaneId(0));
    assert_eq!(poll(&mut plan, &mut credit, LANE), Some(action));
    plan.handle_sent(action);
    (0..2).for_each(|_| sent(&mut plan));
    assert_eq!(poll(&mut plan, &mut credit, LANE), Some(SendAction::Complete));
}

#[test]
fn too_many_requested_chunks_are_refused() {
    let mut plan = plan_of(3 * REQUESTED_MAX, false);
    assert_eq!(request(&mut plan, 3 * REQUESTED_MAX, &all_of(REQUESTED_MAX), |_| true), Ok(true));
    let one_more = RangeSet::from_range(0..REQUESTED_MAX + 1);
    assert_eq!(
        request(&mut plan, 3 * REQUESTED_MAX, &one_more, |_| true),
        Err(ProtocolViolation::TooManyRequested)
    );
    let ranges = |count: usize| (0..count as u32).map(|n| 2 * n..2 * n + 1).collect();
    let mut plan = plan_of(3 * REQUESTED_MAX, false);
    assert_eq!(request(&mut plan, 3 * REQUESTED_MAX, &ranges(PARTIAL_RANGES_MAX), |_| true), Ok(true));
    let refused = request(&mut plan, 3 * REQUESTED_MAX, &ranges(PARTIAL_RANGES_MAX + 1), |_| true);
    assert_eq!(refused, Err(ProtocolViolation::TooManyRequested));
}

#[test]
fn a_version_that_was_given_up_sends_nothing() {
    let mut credit = Credit::new(2).unwrap();
    let mut plan = plan_of(2, true);
    assert_eq!(poll(&mut plan, &mut credit, LANE), Some(SendAction::Manifest));
    assert_eq!(poll(&mut plan, &mut credit, LANE), chunk(0, 0));
    assert!(!plan.is_given_up());
    plan.give_up();
    assert!(plan.is_given_up());
    assert_eq!(request(&mut plan, 2, &all_of(2), |_| false), Ok(false));
    assert_eq!(poll(&mut plan, &mut credit, LANE), None);
    sent(&mut plan);
    assert_eq!(poll(&mut plan, &mut credit, LANE), None, "not complete either");
    assert!(!plan.complete);
}

/// An event during the transfer of a version.
#[derive(Debug, Clone)]
enum Step {
    Grant(u32),
    Poll(Option<u32>),
    End,
    Retire(u32),
    Request(Vec<(u32, u32)>),
    GiveUp,
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (1u32..5).prop_map(Step::Grant),
        12 => prop::option::weighted(0.9, 0u32..6).prop_map(Step::Poll),
        6 => Just(Step::End),
        1 => (0u32..6).prop_map(Step::Retire),
        2 => prop::collection::vec((0u32..100, 0u32..60), 0..3).prop_map(Step::Request),
    ]
}

fn any_steps() -> impl Strategy<Value = Vec<Step>> {
    (prop::collection::vec(any_step(), 0..400), prop::option::weighted(0.2, prop::sample::Index::arbitrary()))
        .prop_map(|(mut steps, given_up)| {
            if let Some(at) = given_up {
                steps.insert(at.index(steps.len() + 1), Step::GiveUp);
            }
            steps
        })
}

/// The expected state of one selected chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Model {
    /// Held by the receiver.
    Held,
    /// No longer pushed.
    Idle,
    Pushed,
    Requested,
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
    /// The number of chunks that were pushed.
    pushed: u32,
    given_up: bool,
}

impl Driver {
    fn new(selected: &BTreeSet<u32>, held: &BTreeSet<u32>) -> Self {
        let as_ranges = |set: &BTreeSet<u32>| set.iter().map(|n| *n..n + 1).collect::<RangeSet>();
        let mut plan = SendPlan::new(false, false);
        plan.handle_selected(as_ranges(selected).difference(&as_ranges(held)));
        let state = |n| if held.contains(n) { Model::Held } else { Model::Pushed };
        Self {
            plan,
            credit: Credit::new(0).unwrap(),
            model: selected.iter().map(|n| (*n, state(n))).collect(),
            retired: BTreeSet::new(),
            in_flight: 0,
            completes: 0,
            granted: 0,
            pushed: 0,
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
                sent(&mut self.plan);
            }
            Step::End => {}
            Step::Retire(lane) => drop(self.retired.insert(lane)),
            Step::Request(ranges) => {
                self.request(ranges.into_iter().map(|(start, len)| start..start + len).collect())
            }
            Step::GiveUp => {
                self.given_up = true;
                self.plan.give_up();
            }
        }
    }

    /// The first chunk in this state.
    fn first(&self, wanted: Model) -> Option<u32> {
        self.model.iter().find(|(_, state)| **state == wanted).map(|(n, _)| *n)
    }

    fn poll(&mut self, lane: Option<u32>) {
        let (requested, pushed) = (self.first(Model::Requested), self.first(Model::Pushed));
        match poll(&mut self.plan, &mut self.credit, lane.map(LaneId)) {
            Some(SendAction::Chunk(chunk, on)) => {
                assert!(!self.given_up);
                assert_eq!(Some(on.0), lane);
                assert_eq!(Some(chunk.0), requested.or(pushed), "in order, and what is requested first");
                self.pushed += u32::from(requested.is_none());
                self.model.insert(chunk.0, Model::Begun(on.0));
                self.in_flight += 1;
                let unspent = self.granted - self.pushed;
                assert_eq!(self.credit.available(), unspent, "only a pushed chunk costs credit");
            }
            Some(SendAction::Complete) => {
                assert!(!self.given_up && requested.or(pushed).is_none() && self.in_flight == 0);
                assert_eq!(self.first(Model::Idle), None, "every chunk was begun");
                self.completes += 1;
            }
            Some(send) => panic!("nothing asked for {send:?}"),
            None => {
                let has_credit = self.credit.available() > 0;
                let can_begin = lane.is_some() && (requested.is_some() || pushed.is_some() && has_credit);
                let is_sent = requested.or(pushed).or_else(|| self.first(Model::Idle)).is_none();
                let is_done = is_sent && self.in_flight == 0;
                let can_complete = is_done && self.completes == 0;
                assert!(self.given_up || !(can_begin || can_complete), "an action was possible");
            }
        }
    }

    fn request(&mut self, chunks: RangeSet) {
        let mut is_any_queued = false;
        for (n, state) in &mut self.model {
            match state {
                Model::Begun(lane) if !self.retired.contains(lane) => {}
                Model::Requested => {}
                _ if chunks.contains(*n) => {
                    *state = Model::Requested;
                    is_any_queued = true;
                }
                Model::Pushed => *state = Model::Idle,
                Model::Held | Model::Idle | Model::Begun(_) => {}
            }
        }
        let retired = self.retired.clone();
        let selected = self.model.keys().map(|n| *n..n + 1).collect();
        self.plan.end_pushing();
        let wanted = ChunkRequest { chunks, ..ChunkRequest::default() };
        let is_queued = self.plan.handle_request(&wanted, &selected, |lane| !retired.contains(&lane.0));
        assert_eq!(is_queued, Ok(is_any_queued && !self.given_up));
    }
}

proptest! {
    /// For any order of grants, polls, ended sends, retirements and requests, even of chunks that do not exist:
    /// every chunk is begun once, and again only if it was requested after its lane was retired; what is pushed is
    /// in order and costs credit; `Complete` is sent once, when nothing is due.
    #[test]
    fn chunks_are_begun_once(
        selected in prop::collection::btree_set(0u32..100, 0..60),
        held in prop::collection::btree_set(0u32..100, 0..30),
        steps in any_steps(),
    ) {
        let mut driver = Driver::new(&selected, &held);
        for step in steps {
            driver.step(step);
        }
        // With credit, a lane and requests for what is not pushed, everything is sent.
        driver.step(Step::Grant(200));
        if driver.first(Model::Idle).is_some() {
            driver.step(Step::Request(vec![(0, 100)]));
        }
        for _ in 0..2 * selected.len() + 2 {
            driver.step(Step::Poll(Some(9)));
            driver.step(Step::End);
        }
        prop_assert!(driver.given_up || driver.completes == 1);
        let due = [Model::Requested, Model::Pushed].map(|state| driver.first(state));
        prop_assert!(due == [None, None] || driver.given_up);
    }
}

/// An event during the transfer of a shared version.
#[derive(Debug, Clone)]
enum SharedStep {
    Grant(u32),
    /// The chunk that is picked is this one, or the first from it on; with `None`, none is.
    Poll(Option<u32>),
    Sent,
    Request(u32, u32),
}

fn any_shared_step() -> impl Strategy<Value = SharedStep> {
    prop_oneof![
        2 => (1u32..4).prop_map(SharedStep::Grant),
        10 => prop::option::weighted(0.8, 0u32..50).prop_map(SharedStep::Poll),
        6 => Just(SharedStep::Sent),
        2 => (0u32..50, 0u32..10).prop_map(|(start, len)| SharedStep::Request(start, len)),
    ]
}

proptest! {
    /// For any picks, grants and requests of a shared version: each chunk is begun once; a pushed one is the picked one
    /// and costs credit, a requested one neither; and once all were begun and sent, `Complete` is sent.
    #[test]
    fn shared_chunks_are_begun_once(
        selected in prop::collection::btree_set(0u32..50, 0..40),
        steps in prop::collection::vec(any_shared_step(), 0..200),
    ) {
        let selected: RangeSet = selected.into_iter().map(|n| n..n + 1).collect();
        let mut plan = SendPlan::new(false, true);
        plan.handle_selected(selected.clone());
        let (mut credit, mut begun, mut requested) = (Credit::new(0).unwrap(), BTreeSet::new(), BTreeSet::new());
        let (mut in_flight, mut completes) = (0, 0);
        let end = (0..120).flat_map(|_| [SharedStep::Grant(1), SharedStep::Poll(Some(0)), SharedStep::Sent]);
        for step in steps.into_iter().chain(end) {
            match step {
                SharedStep::Grant(chunks) => credit.grant(chunks).unwrap(),
                SharedStep::Poll(from) => {
                    let (before, mut picked) = (credit.available(), None);
                    let send = plan.poll(&mut credit, LANE, &Here::All, |wanted| {
                        assert!(wanted.iter().all(|chunk| selected.contains(chunk) && !begun.contains(&chunk)));
                        picked = from.and_then(|from| wanted.first_from(from));
                        picked.map_or(Pick::Wait, |chunk| Pick::Chunk(ChunkIndex(chunk)))
                    });
                    match send {
                        Some(SendAction::Chunk(ChunkIndex(chunk), _)) => {
                            prop_assert!(begun.insert(chunk), "{} is begun once", chunk);
                            let is_requested = requested.remove(&chunk);
                            prop_assert_eq!(picked, Some(chunk).filter(|_| !is_requested));
                            prop_assert_eq!(credit.available(), before - u32::from(!is_requested));
                            in_flight += 1;
                        }
                        Some(SendAction::Complete) => {
                            prop_assert!(in_flight == 0 && begun.len() as u32 == selected.len());
                            completes += 1;
                        }
                        None => prop_assert_eq!(credit.available(), before),
                        other => prop_assert!(false, "{:?}", other),
                    }
                }
                SharedStep::Sent if in_flight > 0 => {
                    in_flight -= 1;
                    sent(&mut plan);
                }
                SharedStep::Sent => {}
                SharedStep::Request(start, len) => {
                    let chunks = RangeSet::from_range(start..start + len);
                    prop_assert!(!plan.end_pushing());
                    requested.extend(chunks.iter().filter(|chunk| selected.contains(*chunk) && !begun.contains(chunk)));
                    let request = ChunkRequest { chunks, ..ChunkRequest::default() };
                    plan.handle_request(&request, &selected, |_| true).unwrap();
                    prop_assert!(plan.may_be_committed());
                }
            }
        }
        prop_assert_eq!(completes, 1);
    }
}
