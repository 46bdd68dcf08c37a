//! Members at several sites, simulated: how many chunks pass from one to another.

use super::{Choice, MemberId, graph::Graph};
use crate::{ChunkIndex, RangeSet, Site, SubscriptionId, subscriber::fixtures};
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::{Duration, Instant},
};

const CHUNKS: u32 = 200;
const MEMBERS: u64 = 36;
const SITES: u64 = 3;

/// The time of one round.
const ROUND: Duration = Duration::from_millis(100);

/// The chunks that a member sends, and that the origin pushes, in a round.
const SENT_IN_ROUND: usize = 4;

struct Member {
    choice: Choice,
    has: BTreeSet<u32>,
    /// What it has since its neighbours were told.
    news: RangeSet,
    /// The orders of others, in turn.
    orders: VecDeque<(MemberId, u32)>,
}

/// What passed between members until all had everything.
#[derive(Debug, PartialEq, Eq, Clone, Copy)]
struct Passed {
    chunks: u32,
    between_sites: u32,
    rounds: u32,
}

struct World {
    graph: Graph,
    members: BTreeMap<MemberId, Member>,
    now: Instant,
    passed: Passed,
}

fn site(member: MemberId) -> Site {
    Site::new(["east", "west", "south"][(member.0 % SITES) as usize]).unwrap()
}

fn source(member: MemberId) -> SubscriptionId {
    SubscriptionId(member.0 as u32)
}

impl World {
    /// Members that name their sites, or do not.
    fn new(seed: u64, are_labelled: bool) -> Self {
        let mut graph = Graph::new(seed);
        let ids = || (0..MEMBERS).map(MemberId);
        ids().for_each(|id| graph.join(id, true, if are_labelled { site(id) } else { Site::default() }));
        let member = |id: MemberId| {
            let mut choice = Choice::new(CHUNKS, seed ^ id.0 << 32);
            choice.want(&RangeSet::from_range(0..CHUNKS));
            for other in graph.neighbours(id) {
                choice.add_source(source(*other));
                if !graph.are_near(id, *other) {
                    choice.set_far(source(*other));
                }
            }
            (id, Member { choice, has: BTreeSet::new(), news: RangeSet::new(), orders: VecDeque::new() })
        };
        let members = ids().map(member).collect();
        let passed = Passed { chunks: 0, between_sites: 0, rounds: 0 };
        Self { graph, members, now: fixtures::now(), passed }
    }

    fn run(mut self) -> Passed {
        let mut unsent = (0..CHUNKS).collect::<VecDeque<_>>();
        while self.members.values().any(|member| member.has.len() < CHUNKS as usize) {
            assert!(self.passed.rounds < 2_000, "it comes to an end");
            for chunk in unsent.drain(..SENT_IN_ROUND.min(unsent.len())) {
                self.receive(MemberId(u64::from(chunk) % MEMBERS), chunk, None);
            }
            self.order();
            self.send();
            self.tell();
            self.now += ROUND;
            self.passed.rounds += 1;
        }
        self.passed
    }

    fn receive(&mut self, id: MemberId, chunk: u32, from: Option<MemberId>) {
        let member = self.members.get_mut(&id).unwrap();
        if member.has.insert(chunk) {
            member.news.insert(chunk);
        }
        match from {
            Some(from) => member.choice.handle_delivered(source(from), ChunkIndex(chunk), self.now),
            None => member.choice.drop_want(ChunkIndex(chunk)),
        }
    }

    fn order(&mut self) {
        for id in (0..MEMBERS).map(MemberId) {
            for other in self.graph.neighbours(id) {
                let choice = &mut self.members.get_mut(&id).unwrap().choice;
                if let Some(chunk) = choice.next(source(*other), self.now) {
                    self.members.get_mut(other).unwrap().orders.push_back((id, chunk.0));
                }
            }
        }
    }

    fn send(&mut self) {
        let queues = self.members.iter_mut().map(|(id, member)| {
            let count = SENT_IN_ROUND.min(member.orders.len());
            (*id, member.orders.drain(..count).collect::<Vec<_>>())
        });
        for (from, orders) in queues.collect::<Vec<_>>() {
            for (to, chunk) in orders {
                self.passed.chunks += 1;
                self.passed.between_sites += u32::from(site(from) != site(to));
                self.receive(to, chunk, Some(from));
            }
        }
    }

    fn tell(&mut self) {
        for id in (0..MEMBERS).map(MemberId) {
            let news = std::mem::take(&mut self.members.get_mut(&id).unwrap().news);
            for other in self.graph.neighbours(id) {
                let choice = &mut self.members.get_mut(other).unwrap().choice;
                choice.handle_held(source(id), &news, &RangeSet::new());
            }
        }
    }
}

/// Goal: chunks come to a site few times, and no later for that. Method: 36 members at three sites, which name them or not.
#[test]
fn few_chunks_pass_between_sites() {
    for seed in 0..4 {
        let [without, with] = [false, true].map(|are_labelled| World::new(seed, are_labelled).run());
        println!("{without:?} {with:?}");
        assert!(with.between_sites * 4 < without.between_sites, "{with:?} {without:?}");
        assert!(with.rounds * 2 < without.rounds * 3, "{with:?} {without:?}");
    }
}
