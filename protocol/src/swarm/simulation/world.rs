//! [`World`]: the members of one version with their links, and the origin.

use super::links::{Links, Node};
use crate::{
    ChunkIndex, Pick, RangeSet, SubscriptionId,
    swarm::{Choice, Joining, MemberId, Swarm},
};
use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, BinaryHeap},
    rc::Rc,
    time::{Duration, Instant},
};

/// The number of the origin among the nodes.
pub(super) const ORIGIN: Node = 0;

/// A second, in microseconds.
const SECOND: u64 = 1_000_000;

/// How often a holder tells its takers what it holds, at most.
const HELD_EVERY: u64 = SECOND / 10;

/// How often idle members look at the time.
const LOOK_EVERY: u64 = SECOND / 10;

/// After so long without anything outstanding a member requests of the origin what no peer holds.
const IDLE: u64 = SECOND;

/// The time to the first list of holders after the first; it doubles up to a second.
const NAME_FIRST: u64 = SECOND / 20;

/// The credit of a member.
const CREDIT: u32 = 4;

/// What a member does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Honest,
    /// It says that it holds everything, and sends wrong bytes.
    Liar,
    /// It says that it holds everything, and sends nothing.
    Silent,
}

/// A member of the simulation.
#[derive(Debug, Clone, Copy)]
pub(super) struct Setup {
    pub(super) kind: Kind,
    /// The time that one chunk takes on its link, in each direction.
    pub(super) chunk_us: u64,
    pub(super) joins_at: u64,
    pub(super) leaves_at: Option<u64>,
}

/// A simulation.
#[derive(Debug, Clone)]
pub(super) struct Scenario {
    pub(super) chunks: u32,
    /// The time that one chunk takes on the origin's link.
    pub(super) chunk_us: u64,
    pub(super) delay_us: u64,
    /// The most chunks that a member has ordered at once.
    pub(super) window: usize,
    pub(super) members: Vec<Setup>,
    pub(super) seed: u64,
    /// Whether links favour some transfers.
    pub(super) is_unfair: bool,
}

/// What came of it.
#[derive(Debug)]
pub(super) struct Outcome {
    /// When each member had all chunks after it had joined.
    pub(super) took_us: Vec<Option<u64>>,
    /// The chunks that the origin sent to each member.
    pub(super) by_origin: Vec<u32>,
    /// The chunks that the origin sent.
    pub(super) egress: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Join(Node),
    Leave(Node),
    /// A piece has left a node.
    Left(Node),
    Whole {
        from: Node,
        to: Node,
        chunk: u32,
        is_pushed: bool,
    },
    Credit(Node),
    /// A holder tells its takers what is new.
    TellHeld(Node),
    Held {
        from: Node,
        to: Option<Node>,
        added: Rc<Vec<u32>>,
    },
    TellOrigin(Node),
    Request {
        from: Node,
        to: Node,
        chunk: u32,
    },
    Connected {
        holder: Node,
        taker: Node,
    },
    /// A member looks at the time.
    Look(Node),
    /// The origin looks at the time.
    LookOrigin,
    /// The origin names holders.
    Name,
}

struct Member {
    setup: Setup,
    is_here: bool,
    choice: Choice,
    has: RangeSet,
    /// What the origin may push.
    unpushed: RangeSet,
    credit: u32,
    ordered: usize,
    requested: BTreeSet<u32>,
    peers: BTreeSet<Node>,
    barred: BTreeSet<Node>,
    takers: BTreeSet<Node>,
    untold: Vec<u32>,
    told_at: u64,
    is_telling: bool,
    untold_to_origin: RangeSet,
    busy_at: u64,
    /// Whether it has begun to request of the origin.
    requests: bool,
    whole_at: Option<u64>,
}

pub(super) struct World {
    scenario: Scenario,
    began: Instant,
    now: u64,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    count: u64,
    links: Links,
    swarm: Swarm,
    members: BTreeMap<Node, Member>,
    by_origin: Vec<u32>,
    /// The honest members that are not whole and will not leave before.
    awaited: usize,
    /// The time until holders are named again.
    name_every: u64,
}

fn id(node: Node) -> MemberId {
    MemberId(node as u64)
}

fn source(node: Node) -> SubscriptionId {
    SubscriptionId(node as u32)
}

impl World {
    /// Runs a scenario until every honest member is whole or has left.
    pub(super) fn run(scenario: &Scenario, began: Instant) -> Outcome {
        let rates = std::iter::once(scenario.chunk_us).chain(scenario.members.iter().map(|it| it.chunk_us));
        let mut world = Self {
            scenario: scenario.clone(),
            began,
            now: 0,
            events: BinaryHeap::new(),
            count: 0,
            links: Links::new(rates, scenario.delay_us, scenario.is_unfair),
            swarm: Swarm::new(scenario.chunks, scenario.seed),
            members: BTreeMap::new(),
            by_origin: vec![0; scenario.members.len()],
            name_every: NAME_FIRST,
            awaited: scenario.members.iter().filter(|it| it.kind == Kind::Honest).count(),
        };
        for (index, setup) in scenario.members.iter().enumerate() {
            world.at(setup.joins_at, Event::Join(index + 1));
            setup.leaves_at.into_iter().for_each(|at| world.at(at, Event::Leave(index + 1)));
        }
        world.at(0, Event::LookOrigin);
        world.at(NAME_FIRST, Event::Name);
        while world.awaited > 0 {
            let Reverse((at, _, event)) = world.events.pop().expect("looks at the time never end");
            assert!(at < 3_600 * SECOND, "members wait for ever");
            world.now = at;
            world.handle(event);
        }
        let took = |(index, setup): (usize, &Setup)| {
            let whole = world.members.get(&(index + 1)).and_then(|member| member.whole_at);
            whole.map(|at| at - setup.joins_at)
        };
        Outcome {
            took_us: scenario.members.iter().enumerate().map(took).collect(),
            egress: world.links.sent(ORIGIN),
            by_origin: world.by_origin,
        }
    }

    fn at(&mut self, time: u64, event: Event) {
        self.count += 1;
        self.events.push(Reverse((time, self.count, event)));
    }

    /// Sends a message.
    fn send(&mut self, event: Event) {
        self.at(self.now + self.scenario.delay_us, event);
    }

    fn instant(&self) -> Instant {
        self.began + Duration::from_micros(self.now)
    }

    fn is_here(&self, node: Node) -> bool {
        node == ORIGIN || self.members.get(&node).is_some_and(|member| member.is_here)
    }

    fn handle(&mut self, event: Event) {
        let now = self.instant();
        match event {
            Event::Join(node) => self.join(node),
            Event::Leave(node) => self.leave(node),
            Event::Left(node) => self.handle_left(node),
            Event::Whole { from, to, chunk, is_pushed } if self.is_here(to) => {
                self.handle_whole(from, to, chunk, is_pushed);
            }
            Event::Credit(node) if self.is_here(node) => {
                self.swarm.handle_credited(id(node), 1, now);
                self.push(node);
                self.push_woken();
            }
            Event::TellHeld(node) if self.is_here(node) => self.tell_held(node),
            Event::Held { from, to, added } => {
                let added: RangeSet = added.iter().map(|chunk| *chunk..*chunk + 1).collect();
                let takers = match to {
                    Some(taker) => vec![taker],
                    None => self.members[&from].takers.iter().copied().collect(),
                };
                for taker in takers {
                    if let Some(member) = self.members.get_mut(&taker).filter(|member| member.is_here) {
                        member.choice.handle_held(source(from), &added, &RangeSet::new());
                        self.order(taker);
                    }
                }
            }
            Event::TellOrigin(node) if self.is_here(node) => {
                let member = self.members.get_mut(&node).expect("it is here");
                let added = std::mem::take(&mut member.untold_to_origin);
                self.swarm.handle_held(id(node), &added, &RangeSet::new(), now);
                self.at(self.now + SECOND, Event::TellOrigin(node));
                self.push_woken();
            }
            Event::Request { from, to, chunk } if self.is_here(from) && self.is_here(to) => {
                let is_silent = self.members.get(&from).is_some_and(|it| it.setup.kind == Kind::Silent);
                if from == ORIGIN {
                    self.swarm.handle_sent(id(to), ChunkIndex(chunk));
                    self.by_origin[to - 1] += 1;
                }
                if !is_silent {
                    self.begin(from, to, chunk, false);
                }
            }
            Event::Connected { holder, taker } if self.is_here(holder) && self.is_here(taker) => {
                self.connect(holder, taker);
            }
            Event::Look(node) if self.is_here(node) => {
                self.order(node);
                if self.members[&node].whole_at.is_none() {
                    self.at(self.now + LOOK_EVERY, Event::Look(node));
                }
            }
            Event::LookOrigin => {
                self.swarm.handle_time(now);
                self.push_woken();
                self.at(self.now + LOOK_EVERY, Event::LookOrigin);
            }
            Event::Name => {
                for MemberId(member) in self.swarm.take_changed() {
                    self.name(member as Node);
                }
                self.name_every = (2 * self.name_every).min(SECOND);
                self.at(self.now + self.name_every, Event::Name);
            }
            _ => {} // To or from a member that left.
        }
    }

    fn join(&mut self, node: Node) {
        let (setup, chunks) = (self.scenario.members[node - 1], self.scenario.chunks);
        let all = RangeSet::from_range(0..chunks);
        let mut choice = Choice::new(chunks, self.scenario.seed ^ (node as u64) << 20);
        choice.want(&all);
        let member = Member {
            setup,
            is_here: true,
            choice,
            has: RangeSet::new(),
            unpushed: all.clone(),
            credit: CREDIT,
            ordered: 0,
            requested: BTreeSet::new(),
            peers: BTreeSet::new(),
            barred: BTreeSet::new(),
            takers: BTreeSet::new(),
            untold: vec![],
            told_at: 0,
            is_telling: false,
            untold_to_origin: RangeSet::new(),
            busy_at: self.now,
            requests: false,
            whole_at: None,
        };
        self.members.insert(node, member);
        let joining = Joining { selected: all, serves: true, ..Joining::default() };
        self.swarm.join(id(node), joining, self.instant());
        self.name(node);
        self.push(node);
        self.push_woken();
        self.at(self.now + LOOK_EVERY, Event::Look(node));
        self.at(self.now + SECOND, Event::TellOrigin(node));
    }

    fn leave(&mut self, node: Node) {
        let now = self.instant();
        let member = self.members.get_mut(&node).expect("it joined");
        member.is_here = false;
        if member.whole_at.is_none() && member.setup.kind == Kind::Honest {
            self.awaited -= 1;
        }
        let (takers, peers) = (std::mem::take(&mut member.takers), std::mem::take(&mut member.peers));
        self.links.remove(node);
        self.swarm.leave(id(node), now);
        for peer in peers {
            self.members.get_mut(&peer).into_iter().for_each(|peer| {
                peer.takers.remove(&node);
            });
        }
        takers.into_iter().for_each(|taker| self.disconnect(node, taker));
        self.push_woken();
    }

    /// Names holders to a member, which connects to those that it does not know.
    fn name(&mut self, node: Node) {
        let named: BTreeSet<Node> = self
            .swarm
            .neighbours(id(node))
            .iter()
            .map(|MemberId(member)| *member as Node)
            .collect();
        let Some(member) = self.members.get_mut(&node) else { return };
        let gone: Vec<Node> = member.peers.difference(&named).copied().collect();
        let new: Vec<Node> = named.difference(&member.peers).copied().collect();
        let new: Vec<Node> = new.into_iter().filter(|holder| !member.barred.contains(holder)).collect();
        gone.into_iter().for_each(|holder| self.disconnect(holder, node));
        for holder in new {
            self.at(self.now + 3 * self.scenario.delay_us, Event::Connected { holder, taker: node });
        }
    }

    fn connect(&mut self, holder: Node, taker: Node) {
        let member = self.members.get_mut(&taker).expect("it is here");
        if member.barred.contains(&holder) || !member.peers.insert(holder) {
            return;
        }
        member.choice.add_source(source(holder));
        let holding = self.members.get_mut(&holder).expect("it is here");
        holding.takers.insert(taker);
        let added = match holding.setup.kind {
            Kind::Honest => holding.has.iter().collect(),
            Kind::Liar | Kind::Silent => (0..self.scenario.chunks).collect(),
        };
        self.send(Event::Held { from: holder, to: Some(taker), added: Rc::new(added) });
    }

    fn disconnect(&mut self, holder: Node, taker: Node) {
        if let Some(holding) = self.members.get_mut(&holder) {
            holding.takers.remove(&taker);
        }
        if let Some(member) = self.members.get_mut(&taker)
            && member.peers.remove(&holder)
        {
            member.ordered -= member.choice.ordered_of(source(holder));
            member.choice.remove_source(source(holder));
            self.order(taker);
        }
    }

    /// Pushes what there is to a member.
    fn push(&mut self, node: Node) {
        let now = self.instant();
        while let Some(member) =
            self.members.get_mut(&node).filter(|member| member.is_here && member.credit > 0)
        {
            let Pick::Chunk(chunk) = self.swarm.pick(id(node), &member.unpushed, now) else { break };
            assert!(member.unpushed.remove(chunk.0), "a chunk is pushed to a member once");
            member.credit -= 1;
            self.by_origin[node - 1] += 1;
            self.begin(ORIGIN, node, chunk.0, true);
        }
    }

    fn push_woken(&mut self) {
        loop {
            let woken = self.swarm.take_woken();
            if woken.is_empty() {
                break;
            }
            woken.into_iter().for_each(|MemberId(member)| self.push(member as Node));
        }
    }

    fn begin(&mut self, from: Node, to: Node, chunk: u32, is_pushed: bool) {
        if let Some(at) = self.links.send(self.now, from, to, chunk, is_pushed) {
            self.at(at, Event::Left(from));
        }
    }

    fn handle_left(&mut self, node: Node) {
        let Some(left) = self.links.handle_left(self.now, node) else { return };
        let transfer = left.transfer;
        if left.is_first && transfer.is_pushed {
            let member = self.members.get_mut(&transfer.to).filter(|member| member.is_here);
            member
                .into_iter()
                .for_each(|member| member.choice.drop_want(ChunkIndex(transfer.chunk)));
        }
        if let Some(at) = left.whole_at {
            let (from, to) = (transfer.from, transfer.to);
            self.at(at, Event::Whole { from, to, chunk: transfer.chunk, is_pushed: transfer.is_pushed });
        }
        if let Some(at) = left.next_at {
            self.at(at, Event::Left(node));
        }
    }

    fn handle_whole(&mut self, from: Node, to: Node, chunk: u32, is_pushed: bool) {
        let (now, now_us) = (self.instant(), self.now);
        let is_lie = self.members.get(&from).is_some_and(|from| from.setup.kind != Kind::Honest);
        let member = self.members.get_mut(&to).expect("it is here");
        if from == ORIGIN {
            member.requested.remove(&chunk);
            member.choice.drop_want(ChunkIndex(chunk));
        } else {
            if !member.peers.contains(&from) || !member.choice.is_ordered_of(source(from), ChunkIndex(chunk))
            {
                return; // It was closed.
            }
            if is_lie {
                member.barred.insert(from);
                return self.disconnect(from, to);
            }
            member.choice.handle_delivered(source(from), ChunkIndex(chunk), now);
            member.ordered -= 1;
        }
        member.busy_at = now_us;
        if is_pushed {
            member.credit += 1;
        }
        if member.has.insert(chunk) {
            member.untold.push(chunk);
            member.untold_to_origin.insert(chunk);
            if member.has.len() == self.scenario.chunks && member.whole_at.is_none() {
                member.whole_at = Some(now_us);
                if member.setup.kind == Kind::Honest {
                    self.awaited -= 1;
                }
            }
        }
        if is_pushed {
            self.send(Event::Credit(to));
        }
        self.tell_soon(to);
        self.order(to);
    }

    fn tell_soon(&mut self, node: Node) {
        let member = self.members.get_mut(&node).expect("it is here");
        if !member.is_telling && member.setup.kind == Kind::Honest {
            member.is_telling = true;
            let at = self.now.max(member.told_at + HELD_EVERY);
            self.at(at, Event::TellHeld(node));
        }
    }

    fn tell_held(&mut self, node: Node) {
        let member = self.members.get_mut(&node).expect("it is here");
        (member.is_telling, member.told_at) = (false, self.now);
        let added = Rc::new(std::mem::take(&mut member.untold));
        self.send(Event::Held { from: node, to: None, added });
    }

    /// Orders what a member can order.
    fn order(&mut self, node: Node) {
        let (now, window) = (self.instant(), self.scenario.window);
        let member = self.members.get_mut(&node).expect("it is here");
        if member.whole_at.is_some() || member.setup.kind != Kind::Honest || member.ordered >= window {
            return;
        }
        let mut orders = vec![];
        let peers: Vec<Node> = member.peers.iter().copied().collect();
        let first = self.count as usize % peers.len().max(1);
        let mut is_any = true;
        while is_any {
            is_any = false;
            for step in 0..peers.len() {
                let peer = peers[(first + step) % peers.len()];
                if member.ordered < window
                    && let Some(chunk) = member.choice.next(source(peer), now)
                {
                    member.ordered += 1;
                    orders.push((peer, chunk.0));
                    is_any = true;
                }
            }
        }
        if member.ordered + member.requested.len() > 0 {
            member.busy_at = self.now;
        }
        let is_idle =
            self.now >= member.busy_at + IDLE + IDLE * (node as u64 % 16) / 16 || member.peers.is_empty();
        member.requests |= is_idle && self.swarm.is_seeded(id(node));
        while member.requests && member.requested.len() < 2 {
            let Some(chunk) = member.choice.next_unheld() else { break };
            member.choice.drop_want(chunk);
            member.requested.insert(chunk.0);
            orders.push((ORIGIN, chunk.0));
        }
        for (from, chunk) in orders {
            self.send(Event::Request { from, to: node, chunk });
        }
    }
}
