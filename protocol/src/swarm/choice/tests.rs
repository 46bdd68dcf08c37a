//! Tests of [`Choice`]: any events, compared with a model of what the sources hold and owe.

use super::*;
use crate::subscriber::fixtures;
use proptest::prelude::*;
use std::{collections::BTreeSet, time::Duration};

const CHUNKS: u32 = 70;

/// The source that is far, in sequences of any events.
const FAR: u32 = 3;

/// One event. Sources are numbered; chunks are indices, some of which do not exist.
#[derive(Debug, Clone)]
enum Step {
    Add(u32),
    Remove(u32),
    Held(u32, Vec<(u32, u32)>, bool),
    Want(u32, u32),
    Drop(u32),
    Next(u32),
    /// An order of a source arrives.
    Delivered(u32, usize),
    /// An order of a source fails.
    Failed(u32, usize),
    Wait(u64),
}

fn any_step() -> impl Strategy<Value = Step> {
    let source = || 0u32..4;
    let ranges = prop::collection::vec((0u32..CHUNKS + 5, 0u32..20), 0..3);
    prop_oneof![
        2 => source().prop_map(Step::Add),
        1 => source().prop_map(Step::Remove),
        6 => (source(), ranges, prop::bool::weighted(0.7)).prop_map(|(id, ranges, add)| Step::Held(id, ranges, add)),
        3 => (0u32..CHUNKS, 0u32..30).prop_map(|(start, len)| Step::Want(start, len)),
        3 => (0u32..CHUNKS).prop_map(Step::Drop),
        16 => source().prop_map(Step::Next),
        8 => (source(), 0usize..64).prop_map(|(id, which)| Step::Delivered(id, which)),
        3 => (source(), 0usize..64).prop_map(|(id, which)| Step::Failed(id, which)),
        3 => (0u64..4_000).prop_map(Step::Wait),
    ]
}

/// The choice, and a model.
struct World {
    choice: Choice,
    began: Instant,
    now: Instant,
    wanted: BTreeSet<u32>,
    held: BTreeMap<u32, BTreeSet<u32>>,
    owed: BTreeSet<(u32, u32)>,
}

fn id(source: u32) -> SubscriptionId {
    SubscriptionId(source)
}

impl World {
    fn step(&mut self, step: Step) {
        match step {
            Step::Add(source) => {
                if !self.held.contains_key(&source) {
                    self.choice.add_source(id(source));
                    self.held.insert(source, BTreeSet::new());
                    if source == FAR {
                        self.choice.set_far(id(source));
                    }
                }
            }
            Step::Remove(source) => {
                self.choice.remove_source(id(source));
                self.held.remove(&source);
                self.owed.retain(|(of, _)| *of != source);
            }
            Step::Held(source, ranges, is_added) => {
                let set: RangeSet = ranges.into_iter().map(|(start, len)| start..start + len).collect();
                let none = RangeSet::new();
                let (added, withdrawn) = if is_added { (&set, &none) } else { (&none, &set) };
                self.choice.handle_held(id(source), added, withdrawn);
                let Some(held) = self.held.get_mut(&source) else { return };
                held.extend(added.iter().filter(|chunk| *chunk < CHUNKS));
                held.retain(|chunk| !withdrawn.contains(*chunk));
                self.owed.retain(|(of, chunk)| *of != source || !withdrawn.contains(*chunk));
            }
            Step::Want(start, len) => {
                self.choice.want(&RangeSet::from_range(start..start + len));
                self.wanted.extend(start..(start + len).min(CHUNKS));
            }
            Step::Drop(chunk) => {
                self.choice.drop_want(ChunkIndex(chunk));
                self.wanted.remove(&chunk);
            }
            Step::Next(source) => self.next(source),
            Step::Delivered(source, which) => {
                if let Some(chunk) = self.end(source, which) {
                    self.choice.handle_delivered(id(source), ChunkIndex(chunk), self.now);
                    self.wanted.remove(&chunk);
                }
            }
            Step::Failed(source, which) => {
                if let Some(chunk) = self.end(source, which) {
                    self.choice.handle_failed(id(source), ChunkIndex(chunk));
                }
            }
            Step::Wait(ms) => self.now += Duration::from_millis(ms),
        }
        self.check();
    }

    fn end(&mut self, source: u32, which: usize) -> Option<u32> {
        let owed: Vec<u32> = self
            .owed
            .iter()
            .filter(|(of, _)| *of == source)
            .map(|(_, chunk)| *chunk)
            .collect();
        let chunk = *owed.get(which % owed.len().max(1))?;
        self.owed.remove(&(source, chunk));
        Some(chunk)
    }

    fn next(&mut self, source: u32) {
        let owes = self.owed.iter().filter(|(of, _)| *of == source).count();
        match self.choice.next(id(source), self.now) {
            Some(ChunkIndex(chunk)) => {
                assert!(self.held[&source].contains(&chunk), "it holds the chunk");
                assert!(self.wanted.contains(&chunk), "the chunk is wanted");
                let others = self.owed.iter().filter(|(_, owed)| *owed == chunk).count();
                assert!(others == 0 || self.now > self.began, "an order is repeated only when it is late");
                assert!(self.owed.insert((source, chunk)), "a source is asked once");
            }
            None => {
                let is_ordered = |chunk: &u32| self.owed.iter().any(|(_, owed)| owed == chunk);
                let held = self.held.get(&source);
                let is_near = |chunk: &u32| self.near().any(|held| held.contains(chunk));
                let is_for_it = |chunk: &u32| !is_ordered(chunk) && (source != FAR || !is_near(chunk));
                let useful = held.is_some_and(|held| held.intersection(&self.wanted).any(is_for_it));
                assert!(owes > 0 || !useful, "an idle source is asked");
            }
        }
    }

    /// What the near sources hold.
    fn near(&self) -> impl Iterator<Item = &BTreeSet<u32>> {
        self.held.iter().filter(|(source, _)| **source != FAR).map(|(_, held)| held)
    }

    fn check(&self) {
        for source in self.held.keys() {
            let owed = self.owed.iter().filter(|(of, _)| of == source).count();
            assert_eq!(self.choice.ordered_of(id(*source)), owed);
        }
        let is_held = |chunk: &u32| self.held.values().any(|held| held.contains(chunk));
        let is_ordered = |chunk: &u32| self.owed.iter().any(|(_, owed)| owed == chunk);
        let unheld = self.wanted.iter().filter(|chunk| !is_held(chunk) && !is_ordered(chunk)).count() as u32;
        assert_eq!(self.choice.unheld(), unheld);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// For any events: a source is asked for what it holds and what is wanted, once for each chunk; an idle source that
    /// holds anything wanted that nobody was asked for is asked; and once every order is delivered, what sources hold
    /// has arrived.
    #[test]
    fn sources_are_asked_for_what_they_hold(steps in prop::collection::vec(any_step(), 0..200), seed: u64) {
        let began = fixtures::now();
        let mut world = World {
            choice: Choice::new(CHUNKS, seed),
            began,
            now: began,
            wanted: BTreeSet::new(),
            held: BTreeMap::new(),
            owed: BTreeSet::new(),
        };
        for step in steps {
            world.step(step);
        }
        for _ in 0..2 * CHUNKS {
            for source in 0..4 {
                world.step(Step::Next(source));
                world.step(Step::Delivered(source, 0));
            }
        }
        let is_held = |chunk: &u32| world.held.values().any(|held| held.contains(chunk));
        prop_assert!(!world.wanted.iter().any(is_held), "{:?}", world.wanted);
        prop_assert_eq!(world.choice.unheld() as usize, world.wanted.len());
    }
}

/// A choice in which all chunks are wanted, with sources that hold those from a first to before a last one.
fn choice_of(sources: &[(u32, u32)]) -> Choice {
    let mut choice = Choice::new(CHUNKS, 1);
    choice.want(&RangeSet::from_range(0..CHUNKS));
    for (source, (first, end)) in (0..).zip(sources) {
        choice.add_source(id(source));
        choice.handle_held(id(source), &RangeSet::from_range(*first..*end), &RangeSet::new());
    }
    choice
}

/// Goal: what a near source has, or may have, crosses no border, unless it is silent.
#[test]
fn a_far_source_is_asked_for_what_no_near_one_has() {
    let mut choice = choice_of(&[(0, 0), (3, 4)]);
    choice.set_far(id(0));
    let (none, now) = (RangeSet::new(), fixtures::now());
    choice.handle_held(id(0), &RangeSet::from_range(3..5), &none);
    assert_eq!(choice.next(id(0), now), Some(ChunkIndex(4)));
    choice.handle_delivered(id(0), ChunkIndex(4), now);
    assert_eq!(choice.next(id(0), now), None, "a near one has it");
    assert_eq!(choice.next(id(1), now), Some(ChunkIndex(3)));
    let at = |ms| now + Duration::from_millis(ms);
    assert_eq!(choice.next(id(0), at(900)), None, "it is late at most");
    assert_eq!(choice.next(id(0), at(20_000)), Some(ChunkIndex(3)), "the near one was asked in vain");
    choice.handle_failed(id(0), ChunkIndex(3));
    choice.handle_failed(id(1), ChunkIndex(3));
    assert_eq!(choice.next(id(0), at(20_000)), None);
    choice.handle_held(id(1), &none, &RangeSet::from_range(3..4));
    assert_eq!(choice.next(id(0), at(20_000)), Some(ChunkIndex(3)), "it is withdrawn");
}

/// Goal: a far source that is silent keeps no other far one from being asked.
#[test]
fn a_silent_far_source_bars_no_other() {
    let mut choice = Choice::new(CHUNKS, 1);
    choice.want(&RangeSet::from_range(0..CHUNKS));
    (0..3).for_each(|source| choice.add_source(id(source)));
    for far in [0, 1] {
        choice.set_far(id(far));
        choice.handle_held(id(far), &RangeSet::from_range(far..far + 1), &RangeSet::new());
    }
    let now = fixtures::now();
    assert_eq!(choice.next(id(0), now), Some(ChunkIndex(0)));
    assert_eq!(choice.next(id(1), now), None, "one is enough");
    assert_eq!(choice.next(id(1), now + Duration::from_secs(5)), Some(ChunkIndex(1)));
}

/// A choice with a far source (0) and a near one (1), which hold chunks 0 to 4; and the far one another chunk.
fn near_and_far() -> Choice {
    let mut choice = Choice::new(6, 1);
    choice.want(&RangeSet::from_range(0..6));
    (0..2).for_each(|source| choice.add_source(id(source)));
    choice.set_far(id(0));
    choice.handle_held(id(0), &RangeSet::from_range(0..6), &RangeSet::new());
    choice.handle_held(id(1), &RangeSet::from_range(0..5), &RangeSet::new());
    choice
}

/// Goal: a near source that is silent withholds nothing: neither the chunk that it was asked for, nor the others.
#[test]
fn a_silent_near_source_withholds_nothing() {
    let (mut choice, began) = (near_and_far(), fixtures::now());
    choice.drop_want(ChunkIndex(5));
    let asked = choice.next(id(1), began);
    assert!(asked.is_some() && choice.next(id(0), began).is_none());
    let (mut now, mut chunks) = (began + Duration::from_secs(5), BTreeSet::new());
    while let Some(chunk) = choice.next(id(0), now) {
        chunks.insert(chunk.0);
        now += Duration::from_millis(10);
        choice.handle_delivered(id(0), chunk, now);
    }
    assert!(chunks.into_iter().eq(0..5));
}

/// Goal: a near source that is much slower than a far one withholds nothing from it, and one that is a little slower does.
#[test]
fn a_slow_near_source_withholds_nothing() {
    for (near_ms, is_asked) in [(300, false), (900, true)] {
        let (mut choice, began) = (near_and_far(), fixtures::now());
        let at = |ms| began + Duration::from_millis(ms);
        let (near, far) = (choice.next(id(1), began).unwrap(), choice.next(id(0), began));
        assert_eq!(far, Some(ChunkIndex(5)), "no near one has it");
        choice.handle_delivered(id(0), ChunkIndex(5), at(100));
        choice.handle_delivered(id(1), near, at(near_ms));
        assert_eq!(choice.next(id(0), at(near_ms)).is_some(), is_asked, "{near_ms}");
    }
}

/// Goal: a far source of which nothing is known is tried once near ones take long, with one order at a time, and asked for more
/// if it is much faster.
#[test]
fn an_unknown_far_source_is_tried() {
    for (near_ms, far_ms, is_tried, is_asked) in
        [(900, 100, false, false), (3_000, 100, true, true), (3_000, 2_000, true, false)]
    {
        let (mut choice, began) = (near_and_far(), fixtures::now());
        let at = |ms| began + Duration::from_millis(ms);
        choice.drop_want(ChunkIndex(5));
        let near = choice.next(id(1), began).unwrap();
        choice.handle_delivered(id(1), near, at(near_ms));
        let tried = choice.next(id(0), at(near_ms));
        assert_eq!(tried.is_some(), is_tried, "{near_ms}");
        assert_eq!(choice.next(id(0), at(near_ms)), None, "one order is enough");
        let Some(tried) = tried else { continue };
        choice.handle_delivered(id(0), tried, at(near_ms + far_ms));
        assert_eq!(choice.next(id(0), at(near_ms + far_ms)).is_some(), is_asked, "{near_ms} {far_ms}");
    }
}

/// Goal: an order of a chunk that had arrived already says nothing of how long the source takes.
#[test]
fn an_order_that_is_taken_back_takes_no_time() {
    let (mut choice, now) = (near_and_far(), fixtures::now());
    let chunk = choice.next(id(1), now).unwrap();
    choice.take_back(id(1), chunk);
    assert_eq!((choice.usual(), choice.ordered_of(id(1))), (None, 0));
    let others: BTreeSet<_> = std::iter::from_fn(|| {
        let next = choice.next(id(1), now)?;
        choice.handle_delivered(id(1), next, now);
        Some(next)
    })
    .collect();
    assert!(!others.contains(&chunk) && others.len() == 4, "it is not ordered again");
}

#[test]
fn rare_chunks_come_first() {
    let mut choice = choice_of(&[(0, CHUNKS), (10, CHUNKS), (10, CHUNKS)]);
    let (mut now, mut rare) = (fixtures::now(), 0);
    for _ in 0..10 {
        let chunk = choice.next(id(0), now).unwrap();
        rare += u32::from(chunk.0 < 10);
        now += Duration::from_millis(400);
        choice.handle_delivered(id(0), chunk, now);
    }
    assert!(rare >= 5, "{rare} of the first ten are among the ten of 70 that only this source holds");
}

#[test]
fn a_fast_source_has_more_orders() {
    let mut choice = choice_of(&[(0, CHUNKS)]);
    let mut now = fixtures::now();
    let orders = |choice: &mut Choice, now| std::iter::from_fn(|| choice.next(id(0), now)).count();
    assert_eq!(orders(&mut choice, now), 1);
    for _ in 0..30 {
        now += Duration::from_millis(50);
        let owed = choice.orders.of(id(0));
        choice.handle_delivered(id(0), ChunkIndex(owed[0]), now);
        choice.next(id(0), now);
    }
    orders(&mut choice, now);
    assert!(
        (4..=6).contains(&choice.ordered_of(id(0))),
        "20 a second, for a quarter of a second, and one more"
    );
    assert_eq!(orders(&mut choice, now), 0);
}

#[test]
fn a_late_order_is_repeated_and_a_lost_one_is_taken_away() {
    let mut choice = choice_of(&[(3, 4); 3]);
    let began = fixtures::now();
    let at = |ms| began + Duration::from_millis(ms);
    assert_eq!(choice.next(id(0), began), Some(ChunkIndex(3)));
    assert_eq!(choice.next(id(1), at(1_000)), None, "it is not late");
    assert_eq!(choice.next(id(1), at(2_500)), Some(ChunkIndex(3)));
    assert_eq!(choice.next(id(2), at(5_500)), None, "it was repeated, and that is not lost yet");
    assert_eq!(choice.next(id(2), at(20_000)), Some(ChunkIndex(3)), "it was taken away");
    choice.handle_delivered(id(0), ChunkIndex(3), at(20_001));
    choice.remove_source(id(1));
    assert_eq!(choice.next(id(1), at(90_000)), None, "the chunk is here");
}

#[test]
fn what_a_lost_source_owed_is_ordered_again() {
    let mut choice = choice_of(&[(3, 4); 2]);
    let now = fixtures::now();
    assert_eq!(choice.next(id(0), now), Some(ChunkIndex(3)));
    assert_eq!(choice.next(id(1), now), None);
    choice.remove_source(id(0));
    assert_eq!(choice.next(id(1), now), Some(ChunkIndex(3)));
    choice.remove_source(id(1));
    assert_eq!(choice.unheld(), CHUNKS);
    let unheld = choice.next_unheld().unwrap();
    choice.drop_want(unheld);
    assert_eq!(choice.unheld(), CHUNKS - 1);
}
