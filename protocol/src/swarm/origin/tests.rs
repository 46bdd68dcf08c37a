//! Tests of [`Swarm`]: any events of a few members, and single rules.

use super::*;
use crate::subscriber::fixtures;
use proptest::prelude::*;

const CHUNKS: u32 = 40;

#[derive(Debug, Clone)]
enum Step {
    Join(u64, Vec<(u32, u32)>, bool, bool),
    Leave(u64),
    Pick(u64),
    Credit(u64),
    /// A member reports some of what it got, and withdraws some.
    Held(u64, u64, u64),
    /// It got this chunk of a peer that has it.
    Take(u64, usize),
    Requested(u64, u32),
    Commit(u64),
    Wait(u64),
}

fn any_step() -> impl Strategy<Value = Step> {
    let id = || 0u64..5;
    let ranges = prop_oneof![
        3 => Just(vec![(0, CHUNKS + 3)]),
        1 => prop::collection::vec((0u32..CHUNKS, 0u32..30), 0..3),
    ];
    prop_oneof![
        4 => (id(), ranges, prop::bool::weighted(0.8), prop::bool::weighted(0.2))
            .prop_map(|(id, selected, serves, lacks)| Step::Join(id, selected, serves, lacks)),
        1 => id().prop_map(Step::Leave),
        20 => id().prop_map(Step::Pick),
        14 => id().prop_map(Step::Credit),
        6 => (id(), any::<u64>(), any::<u64>()).prop_map(|(id, add, drop)| Step::Held(id, add, drop & add << 7)),
        6 => (id(), 0usize..64).prop_map(|(id, which)| Step::Take(id, which)),
        1 => (id(), 0..CHUNKS).prop_map(|(id, chunk)| Step::Requested(id, chunk)),
        1 => id().prop_map(Step::Commit),
        3 => (0u64..6_000).prop_map(Step::Wait),
    ]
}

/// A member, as it sees itself.
#[derive(Debug)]
struct Real {
    selected: RangeSet,
    /// What may be pushed to it.
    wanted: RangeSet,
    serves: bool,
    has: BTreeSet<u32>,
    /// What it has or was sent, without what it withdrew.
    offers: BTreeSet<u32>,
    /// The pushes that have not arrived.
    pushed: Vec<u32>,
}

struct World {
    swarm: Swarm,
    now: Instant,
    members: BTreeMap<u64, Real>,
}

impl World {
    fn step(&mut self, step: Step) {
        let now = self.now;
        match step {
            Step::Join(id, ranges, serves, lacks_base) if !self.members.contains_key(&id) => {
                let selected: RangeSet = ranges.into_iter().map(|(start, len)| start..start + len).collect();
                let joining =
                    Joining { selected: selected.clone(), serves, lacks_base, ..Joining::default() };
                self.swarm.join(MemberId(id), joining, now);
                let selected = selected.intersection(&RangeSet::from_range(0..CHUNKS));
                let wanted = selected.clone();
                let (has, offers) = (BTreeSet::new(), BTreeSet::new());
                self.members
                    .insert(id, Real { selected, wanted, serves, has, offers, pushed: vec![] });
            }
            Step::Leave(id) => {
                self.swarm.leave(MemberId(id), now);
                self.members.remove(&id);
            }
            Step::Pick(id) => {
                self.pick(id);
            }
            Step::Credit(id) => {
                let Some(member) = self.members.get_mut(&id).filter(|member| !member.pushed.is_empty())
                else {
                    return;
                };
                let arrived = member.pushed.remove(0);
                member.has.insert(arrived);
                self.swarm.handle_credited(MemberId(id), 1, now);
            }
            Step::Held(id, add, withdraw) => {
                let Some(member) = self.members.get_mut(&id) else { return };
                let bits = |bits: u64| move |chunk: &u32| bits >> (chunk % 64) & 1 == 1;
                let set = |bits: &dyn Fn(&u32) -> bool| -> RangeSet {
                    let chosen = member.has.iter().filter(|chunk| bits(chunk));
                    chosen.map(|chunk| *chunk..*chunk + 1).collect()
                };
                let withdrawn = set(&bits(withdraw));
                let added = set(&bits(add)).difference(&withdrawn);
                self.swarm.handle_held(MemberId(id), &added, &withdrawn, now);
                member.offers.extend(added.iter());
                member.offers.retain(|chunk| !withdrawn.contains(*chunk));
            }
            Step::Take(id, which) => self.take(id, which),
            Step::Requested(id, chunk) if self.members.contains_key(&id) => {
                self.swarm.handle_sent(MemberId(id), ChunkIndex(chunk));
                self.members.entry(id).and_modify(|member| {
                    member.wanted.remove(chunk);
                    member.offers.insert(chunk);
                });
            }
            Step::Commit(id) => {
                let Some(member) = self.members.get_mut(&id) else { return };
                if member.selected.iter().all(|chunk| member.has.contains(&chunk)) {
                    self.swarm.handle_committed(MemberId(id), now);
                    member.pushed.clear();
                    member.offers.extend(member.selected.iter());
                    (member.selected, member.wanted) = (RangeSet::new(), RangeSet::new());
                }
            }
            Step::Wait(ms) => {
                self.now += Duration::from_millis(ms);
                self.swarm.handle_time(self.now);
                assert!(self.swarm.wakes_at().is_none_or(|at| at > self.now), "what was due is done");
            }
            Step::Join(..) | Step::Requested(..) => {}
        }
        self.check();
    }

    /// Returns whether a chunk was pushed.
    fn pick(&mut self, id: u64) -> bool {
        let serving = self.members.values().filter(|member| member.serves).count();
        let Some(member) = self.members.get_mut(&id) else { return false };
        match self.swarm.pick(MemberId(id), &member.wanted, self.now) {
            Pick::Chunk(chunk) => {
                assert!(member.wanted.remove(chunk.0), "{chunk:?} is wanted");
                assert!(!member.has.contains(&chunk.0), "{chunk:?} is not there");
                member.pushed.push(chunk.0);
                member.offers.insert(chunk.0);
                let is_limited = serving > 1 && member.serves && self.swarm.pushes.to(MemberId(id)) > 0;
                assert!(
                    !is_limited || self.swarm.pushes.to(MemberId(id)) <= self.swarm.pushes.slots(self.now)
                );
                true
            }
            Pick::Wait => false,
            Pick::InOrder => panic!("the swarm knows which"),
        }
    }

    fn take(&mut self, id: u64, which: usize) {
        let offered: Vec<u32> = {
            let holders = self.members.iter().filter(|(other, member)| **other != id && member.serves);
            holders.flat_map(|(_, member)| member.has.iter().copied()).collect()
        };
        let Some(member) = self.members.get_mut(&id) else { return };
        let useful: Vec<u32> = offered
            .into_iter()
            .filter(|chunk| member.selected.contains(*chunk) && !member.has.contains(chunk))
            .collect();
        let Some(chunk) = useful.get(which % useful.len().max(1)).copied() else { return };
        member.has.insert(chunk);
        member.offers.insert(chunk);
        let added = RangeSet::from_range(chunk..chunk + 1);
        self.swarm.handle_held(MemberId(id), &added, &RangeSet::new(), self.now);
    }

    /// The counts are those of the members.
    fn check(&self) {
        let serving = || self.members.values().filter(|member| member.serves);
        assert_eq!(self.swarm.serving, serving().count());
        for chunk in 0..CHUNKS {
            let select = serving().filter(|member| member.selected.contains(chunk)).count() as u32;
            let have = serving().filter(|member| member.offers.contains(&chunk)).count() as u32;
            assert_eq!(self.swarm.supply.of(chunk), (select, have), "{chunk}");
            assert_eq!(self.swarm.supply.unsent().contains(chunk), have == 0 && select > 0);
            assert_eq!(self.swarm.supply.orphans().contains(chunk), have == 0 && select == 0);
        }
    }

    /// Lets everybody that is woken ask, as the caller does.
    fn serve_woken(&mut self) -> bool {
        let mut is_any = false;
        for MemberId(id) in self.swarm.take_woken() {
            while self.pick(id) {
                is_any = true;
            }
        }
        is_any
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// For any events: what is picked is wanted and not there; the counts are those of the members; and when all that
    /// is pushed arrives and time passes, whoever is not seeded is pushed something, so that in the end every selected
    /// chunk is at a member that serves, or at each of those that only take.
    #[test]
    fn every_chunk_is_sent_to_somebody(steps in prop::collection::vec(any_step(), 0..200), seed: u64) {
        let mut world = World { swarm: Swarm::new(CHUNKS, seed), now: fixtures::now(), members: BTreeMap::new() };
        for step in steps {
            world.step(step);
        }
        let mut ids: Vec<u64> = world.members.keys().copied().collect();
        ids.iter().for_each(|id| while world.pick(*id) {});
        for round in 0..8 * CHUNKS {
            if round == 4 * CHUNKS && ids.len() > 1 {
                world.step(Step::Leave(ids.remove(0))); // Everything was quiet: the others are woken.
            }
            for id in &ids {
                if !world.members[id].pushed.is_empty() {
                    world.step(Step::Credit(*id));
                    while world.pick(*id) {}
                }
            }
            world.serve_woken();
            world.step(Step::Wait(300));
            world.serve_woken();
        }
        for id in &ids {
            let member = &world.members[id];
            let is_alone = member.serves && world.swarm.serving == 1;
            let lacks = |chunk: &u32| !world.swarm.members[&MemberId(*id)].had.contains(*chunk);
            if is_alone || !member.serves && world.swarm.serving == 0 {
                prop_assert!(!member.selected.iter().any(|chunk| lacks(&chunk)), "{id} is sent everything");
            } else {
                prop_assert!(world.swarm.is_seeded(MemberId(*id)), "{id}");
            }
        }
    }
}

/// A swarm of so many members, who select everything and serve.
fn swarm_of(members: u64, now: Instant) -> Swarm {
    let mut swarm = Swarm::new(CHUNKS, 1);
    for id in 0..members {
        let selected = RangeSet::from_range(0..CHUNKS);
        swarm.join(MemberId(id), Joining { selected, serves: true, ..Joining::default() }, now);
    }
    swarm
}

/// The chunks that a member is pushed, one after the other, of those that it was not pushed.
fn picks(swarm: &mut Swarm, id: u64, wanted: &mut RangeSet, now: Instant) -> Vec<u32> {
    let next = || match swarm.pick(MemberId(id), wanted, now) {
        Pick::Chunk(chunk) => Some(chunk.0).filter(|chunk| wanted.remove(*chunk)),
        _ => None,
    };
    std::iter::from_fn(next).collect()
}

fn all() -> RangeSet {
    RangeSet::from_range(0..CHUNKS)
}

#[test]
fn a_member_alone_is_pushed_everything_in_order() {
    let now = fixtures::now();
    let mut swarm = swarm_of(1, now);
    assert!(picks(&mut swarm, 0, &mut all(), now).into_iter().eq(0..CHUNKS));
    assert!(!swarm.is_seeded(MemberId(0)));
}

#[test]
fn several_members_are_pushed_different_chunks() {
    let now = fixtures::now();
    let mut swarm = swarm_of(3, now);
    let mut wanted = [all(), all(), all()];
    let pushed: Vec<_> = (0..3).map(|id| picks(&mut swarm, id, &mut wanted[id as usize], now)).collect();
    assert_eq!(pushed, [vec![0, 1], vec![2, 3], vec![]], "two to each, as far as there are slots");
    swarm.handle_credited(MemberId(1), 1, now);
    assert_eq!(picks(&mut swarm, 2, &mut wanted[2], now), [4]);
    swarm.leave(MemberId(0), now);
    swarm.handle_credited(MemberId(1), 1, now);
    assert_eq!(picks(&mut swarm, 1, &mut wanted[1], now), [0, 1], "what only the one that left was sent");
}

#[test]
fn a_chunk_that_is_stuck_is_pushed_to_one_other_member() {
    let now = fixtures::now();
    let mut swarm = swarm_of(3, now);
    let mut wanted = [all(), all(), all()];
    let mut now = now;
    assert_eq!(picks(&mut swarm, 2, &mut wanted[2], now), [0, 1]);
    // The others are quick, and take what the other one has.
    let mut pushed = vec![];
    for _ in 0..60 {
        for id in 0..2 {
            let chunks = picks(&mut swarm, id, &mut wanted[id as usize], now);
            pushed.extend(chunks.clone());
            now += Duration::from_millis(10);
            swarm.handle_credited(MemberId(id), chunks.len() as u32, now);
            let added = chunks.into_iter().map(|chunk| chunk..chunk + 1).collect();
            (0..2).for_each(|id| swarm.handle_held(MemberId(id), &added, &RangeSet::new(), now));
        }
    }
    pushed.sort_unstable();
    assert!(pushed.into_iter().eq(0..CHUNKS), "each once");
    assert!(picks(&mut swarm, 2, &mut wanted[2], now).is_empty());
}

#[test]
fn a_member_that_keeps_its_chunks_gets_no_more_of_them() {
    let mut now = fixtures::now();
    let mut swarm = swarm_of(4, now);
    let mut wanted = [all(), all(), all(), all()];
    let mut kept = vec![];
    for _ in 0..40 {
        for id in 0..4 {
            let pushed = picks(&mut swarm, id, &mut wanted[id as usize], now);
            swarm.handle_credited(MemberId(id), pushed.len() as u32, now);
            match id {
                3 => kept.extend(pushed),
                _ => {
                    let spread: RangeSet = pushed.into_iter().map(|chunk| chunk..chunk + 1).collect();
                    (0..3).for_each(|id| swarm.handle_held(MemberId(id), &spread, &RangeSet::new(), now));
                }
            }
        }
        now += Duration::from_millis(400);
    }
    let had = |id| swarm.members[&MemberId(id)].has.iter().count();
    assert!(kept.len() <= 20 && had(0) + had(1) >= CHUNKS as usize, "{kept:?}");
    assert!(
        kept.iter()
            .all(|chunk| (0..3).any(|id| swarm.members[&MemberId(id)].has.contains(*chunk)))
    );
}

#[test]
fn members_that_only_take_are_named_to_nobody_and_get_chunks_from_the_others() {
    let now = fixtures::now();
    let mut swarm = swarm_of(2, now);
    swarm.join(MemberId(9), Joining { selected: all(), ..Joining::default() }, now);
    assert!(picks(&mut swarm, 9, &mut all(), now).is_empty());
    assert_eq!(
        BTreeSet::from_iter(swarm.neighbours(MemberId(9))),
        BTreeSet::from([&MemberId(0), &MemberId(1)])
    );
    assert_eq!(swarm.neighbours(MemberId(0)), [MemberId(1)]);
    (0..2).for_each(|id| swarm.leave(MemberId(id), now));
    assert!(picks(&mut swarm, 9, &mut all(), now).into_iter().eq(0..CHUNKS), "nobody else has them");
}
