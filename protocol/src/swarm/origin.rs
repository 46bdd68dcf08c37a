//! [`Swarm`]: which chunk the origin pushes to which member.

use super::{
    bits::{Bits, numbers, words},
    graph::Graph,
    pushes::Pushes,
    spread::Spread,
    supply::Supply,
};
use crate::{ChunkIndex, Pick, RangeSet, Site};
use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

#[cfg(test)]
mod tests;

/// For this time nothing is pushed to a member at which a chunk was stuck, if there are others. It doubles each time.
const SLOW_FOR: Duration = Duration::from_secs(10);

/// The longest such time.
const SLOW_FOR_MAX: Duration = Duration::from_secs(160);

/// So many chunks are pushed to a member without it being known that anybody gets them from it, if it is known of
/// others.
const UNSEEN_MAX: usize = 2;

/// For this time a slot waits for the member that it was granted to.
const GRANT_FOR: Duration = Duration::from_millis(250);

/// A member of the swarm of one version: one subscription.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberId(pub u64);

/// A member that joins.
#[derive(Debug, Clone, Default)]
pub struct Joining {
    /// The chunks that it selects.
    pub selected: RangeSet,
    /// Those that it has already, e.g. of an earlier connection.
    pub held: RangeSet,
    /// Whether others can take chunks from it; otherwise it is named to nobody.
    pub serves: bool,
    /// Whether it lacks the base of which others have deltas: chunks are pushed to it only if nobody else can have
    /// them, so that their shared encodings are deltas.
    pub lacks_base: bool,
    /// Where it is: most of those that are named to it have the same.
    pub site: Site,
}

/// The origin's view of one shared version: who has what, or was sent it, and whom it names to whom.
///
/// A chunk is pushed to one member that serves, and then comes to the others from that one. It is pushed again when no
/// such member is left that has it or was sent it, and once more to another member when it is stuck. A member that
/// serves and is the only one to do so is pushed everything, in order. So is one that only takes, as far as no member
/// that serves selects the same.
///
/// The caller reports what happens with `handle_*`, and after that the members in [`take_woken`](Self::take_woken) are
/// to ask [`pick`](Self::pick) again. Costs O(log n) for each call and each chunk that changes. For a member that joins,
/// leaves or commits, it costs a step for each 64 chunks, an addition for each chunk that it has, and O(log n) for each range
/// that it selects; for one that leaves, also a look at the selections of others; `pick` for a member with many ranges of
/// wanted chunks up to as much as their number. Memory: 9 bytes for each chunk, and two bits for each chunk and member.
#[derive(Debug)]
pub struct Swarm {
    members: BTreeMap<MemberId, Member>,
    /// The number of members that serve.
    serving: usize,
    /// What those select and have.
    supply: Supply,
    pushes: Pushes,
    spread: Spread,
    graph: Graph,
    /// The members that wait for a slot: the best known first, those in turn.
    waiting: BTreeSet<(Standing, u64, MemberId)>,
    turns: u64,
    /// The members for which there was nothing to be pushed.
    idle: BTreeSet<MemberId>,
    /// The members that a slot is kept for, and since when.
    granted: BTreeMap<MemberId, Instant>,
    woken: BTreeSet<MemberId>,
    /// Whether [`is_seeded`](Self::is_seeded) may have changed for all members.
    is_seeding_changed: bool,
}

#[derive(Debug)]
struct Member {
    selected: RangeSet,
    /// The chunks that it has or was sent, and can send.
    has: Bits,
    /// The chunks that it needs no more, whether it can send them or not.
    had: Bits,
    serves: bool,
    lacks_base: bool,
    standing: Standing,
    /// Until when it counts as slow, and how long that was.
    slow: Option<(Instant, Duration)>,
    /// Its turn, while it waits.
    turn: Option<u64>,
}

/// What is known of a member. Members that pass chunks on are preferred, so that one that keeps or spoils them gets few.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Standing {
    /// Another member got a chunk from it.
    Proven,
    /// It was sent nothing yet.
    Untried,
    /// It was sent a chunk that nobody has got from it yet.
    Tried,
}

impl Member {
    /// Whether chunks are better pushed to others.
    fn is_last_choice(&self, now: Instant) -> bool {
        self.lacks_base || self.slow.is_some_and(|(until, _)| now < until)
    }

    /// Whether it selects a chunk that it never had: one that it withdrew is not pushed to it again.
    fn lacks(&self, chunk: u32) -> bool {
        self.selected.contains(chunk) && !self.had.contains(chunk)
    }
}

impl Swarm {
    /// The swarm of a version with this many chunks, without members. The seed decides whom it names to whom.
    pub fn new(chunks: u32, seed: u64) -> Self {
        Self {
            members: BTreeMap::new(),
            serving: 0,
            supply: Supply::new(chunks),
            pushes: Pushes::default(),
            spread: Spread::default(),
            graph: Graph::new(seed),
            waiting: BTreeSet::new(),
            turns: 0,
            idle: BTreeSet::new(),
            granted: BTreeMap::new(),
            woken: BTreeSet::new(),
            is_seeding_changed: false,
        }
    }

    /// The number of members.
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Whether there is no member.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Adds a member. No effect if it is one.
    pub fn join(&mut self, id: MemberId, joining: Joining, now: Instant) {
        if self.members.contains_key(&id) {
            return;
        }
        let Joining { selected, held, serves, lacks_base, site } = joining;
        let none = || Bits::new(self.supply.chunks());
        let (has, had) = (none(), none());
        let selected = selected.intersection(&self.all());
        if serves {
            self.serving += 1;
            self.supply.add_selection(&selected);
        }
        let (standing, slow, turn) = (Standing::Untried, None, None);
        self.graph.join(id, serves, site);
        let member = Member { selected, has, had, serves, lacks_base, standing, slow, turn };
        self.members.insert(id, member);
        self.add(id, &held);
        self.handle_membership(now);
        self.woken.insert(id);
    }

    /// Removes a member. What it alone had, or was sent, is to be sent again.
    pub fn leave(&mut self, id: MemberId, now: Instant) {
        let Some(member) = self.members.remove(&id) else { return };
        self.graph.leave(id);
        self.pushes.remove(id);
        self.spread.remove(id);
        self.waiting.extract_if(.., |(_, _, other)| *other == id).for_each(drop);
        self.idle.remove(&id);
        self.granted.remove(&id);
        if member.serves {
            self.serving -= 1;
            self.supply.remove_selection(&member.selected);
            for (word, mask) in member.has.iter_words() {
                self.supply.remove_held(word, mask);
            }
            self.settle();
        }
        self.handle_membership(now);
        self.woken.remove(&id);
    }

    /// Records that a member committed the version: it wants nothing more, and has all that it selected.
    pub fn handle_committed(&mut self, id: MemberId, now: Instant) {
        let Some(member) = self.members.get_mut(&id) else { return };
        let (selected, serves) = (std::mem::take(&mut member.selected), member.serves);
        self.add(id, &selected);
        self.pushes.remove(id);
        if serves {
            self.supply.remove_selection(&selected); // Each of them is held, by this member.
        }
        self.grant(now);
    }

    /// What to push to a member that has credit and a lane, of `wanted` chunks: selected, and not pushed to it. A
    /// picked chunk counts as sent, so the caller must send it. After [`Pick::Wait`], the member is woken when to ask
    /// again.
    pub fn pick(&mut self, id: MemberId, wanted: &RangeSet, now: Instant) -> Pick {
        self.handle_time(now);
        self.woken.remove(&id);
        let is_granted = self.granted.remove(&id).is_some();
        let chunk = self.choose(id, wanted, is_granted, now);
        if let Some(chunk) = chunk {
            self.pushes.begin(id, chunk, now);
            self.add(id, &RangeSet::from_range(chunk..chunk + 1));
            self.set_standing(id, |standing| match standing {
                Standing::Proven => Standing::Proven,
                Standing::Untried | Standing::Tried => Standing::Tried,
            });
        }
        self.grant(now);
        chunk.map_or(Pick::Wait, |chunk| Pick::Chunk(ChunkIndex(chunk)))
    }

    fn choose(&mut self, id: MemberId, wanted: &RangeSet, is_granted: bool, now: Instant) -> Option<u32> {
        let member = self.members.get(&id)?;
        if !member.serves {
            if self.members.len() > 1 && self.pushes.has_enough(id, self.members.len(), now) {
                return None; // It asks again with the next credit.
            }
            let orphan = first_common(wanted, self.supply.orphans(), &member.had);
            if orphan.is_none() {
                self.idle.insert(id);
            }
            return orphan;
        }
        let unsent = first_common(wanted, self.supply.unsent(), &member.had);
        if self.serving == 1 {
            return unsent;
        }
        if self.pushes.has_enough(id, self.serving, now) {
            return None; // It asks again with the next credit.
        }
        let is_doubtful = member.standing != Standing::Proven && self.spread.at(id) >= UNSEEN_MAX;
        let is_for_others = |chunk: u32| {
            let is_better = |other: &Member| match is_doubtful {
                true => other.standing == Standing::Proven && !other.is_last_choice(now),
                false => member.is_last_choice(now) && !other.is_last_choice(now),
            };
            let mut others = self.members.values().filter(|other| other.serves);
            (is_doubtful || member.is_last_choice(now))
                && others.any(|other| is_better(other) && other.lacks(chunk))
        };
        let unsent = unsent.filter(|chunk| !is_for_others(*chunk));
        let is_repeatable =
            |chunk| wanted.contains(chunk) && !member.had.contains(chunk) && !is_for_others(chunk);
        let is_any_stuck = unsent.is_none() && self.pushes.find_stuck(is_repeatable).is_some();
        if unsent.is_none() && !is_any_stuck {
            self.idle.insert(id);
            return None;
        }
        if !is_granted && !self.has_slot(now) {
            self.wait(id);
            return None;
        }
        unsent.or_else(|| {
            let chunk = self.pushes.find_stuck(is_repeatable);
            chunk.inspect(|chunk| self.pushes.drop_stuck(*chunk))
        })
    }

    /// Records that a chunk was sent to a member that had requested it.
    pub fn handle_sent(&mut self, id: MemberId, chunk: ChunkIndex) {
        if chunk.0 < self.supply.chunks() {
            self.add(id, &RangeSet::from_range(chunk.0..chunk.0 + 1));
        }
    }

    /// Records that a member granted credit for so many chunks: so many pushes have arrived. Others than those that
    /// [`pick`](Self::pick) picked do not count.
    pub fn handle_credited(&mut self, id: MemberId, chunks: u32, now: Instant) {
        self.handle_time(now);
        for _ in 0..chunks {
            let Some((chunk, is_late)) = self.pushes.handle_arrived(id, now) else { break };
            if is_late {
                self.mark_slow(id, now);
            }
            if self.supply.is_wanted(chunk) {
                self.spread.begin(chunk, id, now);
            }
        }
        self.wait(id); // It asks for more, and comes first if it is proven.
        self.grant(now);
    }

    /// Records what a member says it can send now, and can send no longer.
    pub fn handle_held(&mut self, id: MemberId, added: &RangeSet, withdrawn: &RangeSet, now: Instant) {
        self.handle_time(now);
        for chunk in self.add(id, added) {
            if self.pushes.has_stuck() {
                self.pushes.drop_stuck(chunk);
            }
            if let Some(from) = self.spread.handle_held(chunk, id, now) {
                self.set_standing(from, |_| Standing::Proven);
                if self.idle.remove(&from) {
                    self.wait(from);
                }
            }
        }
        let Some(member) = self.members.get_mut(&id) else { return };
        let (was_seeded, mut is_any_gone) = (self.supply.unsent().is_empty(), false);
        for (word, mask) in words(withdrawn, self.supply.chunks()) {
            let gone = mask & member.has.word(word);
            is_any_gone |= gone != 0;
            member.has.remove_word(word, gone);
            if member.serves {
                self.supply.remove_held(word, gone);
            }
        }
        if is_any_gone {
            self.settle();
            self.is_seeding_changed |= was_seeded != self.supply.unsent().is_empty();
            self.wake_idle();
        }
        self.grant(now);
    }

    /// Records the time: pushes may be stuck, and slots be kept in vain. To be called at [`wakes_at`](Self::wakes_at).
    pub fn handle_time(&mut self, now: Instant) {
        let mut stuck = self.pushes.handle_time(now);
        while let Some((chunk, member)) = self.spread.take_stuck(self.pushes.usual(), now) {
            if self.supply.is_wanted(chunk) {
                self.pushes.add_stuck(chunk, member, now);
                stuck.push(member);
            }
        }
        if !stuck.is_empty() {
            stuck.into_iter().for_each(|member| self.mark_slow(member, now));
            self.wake_idle();
        }
        let granted = self.granted.len();
        self.granted
            .retain(|_, since| now.saturating_duration_since(*since) < GRANT_FOR);
        if granted > self.granted.len() || !self.waiting.is_empty() {
            self.grant(now);
        }
    }

    /// When [`handle_time`](Self::handle_time) may change something; `None` if only other events do.
    pub fn wakes_at(&self) -> Option<Instant> {
        let lapses_at = self.granted.values().min().map(|since| *since + GRANT_FOR);
        let pushes_stuck_at = self.pushes.stuck_at();
        let spread_stuck_at = self.spread.stuck_at(self.pushes.usual());
        [lapses_at, pushes_stuck_at, spread_stuck_at].into_iter().flatten().min()
    }

    /// Whether the origin pushes nothing more to a member by itself, except what is stuck elsewhere: what no peer
    /// offers is to be requested. May change whenever anything does: cheap enough to be asked for each member once a
    /// second.
    pub fn is_seeded(&self, id: MemberId) -> bool {
        let Some(member) = self.members.get(&id) else { return false };
        let unsent = if member.serves { self.supply.unsent() } else { self.supply.orphans() };
        let is_alone = member.serves && self.serving == 1;
        !is_alone && first_common(&member.selected, unsent, &member.had).is_none()
    }

    /// The members that are named to a member: at most [`NEIGHBOURS_MAX`](super::NEIGHBOURS_MAX), which serve.
    pub fn neighbours(&self, id: MemberId) -> &[MemberId] {
        self.graph.neighbours(id)
    }

    /// Whether two members are at one site.
    pub fn are_near(&self, one: MemberId, other: MemberId) -> bool {
        self.graph.are_near(one, other)
    }

    /// Whether a member is named to others.
    pub fn serves(&self, id: MemberId) -> bool {
        self.members.get(&id).is_some_and(|member| member.serves)
    }

    /// The chunks that a member has, as far as they are in the first `ranges_max` ranges.
    pub fn held(&self, id: MemberId, ranges_max: usize) -> RangeSet {
        let Some(member) = self.members.get(&id) else { return RangeSet::new() };
        let mut held = member.has.ranges(ranges_max);
        for chunk in self.pushes.under_way(id) {
            held.remove(chunk);
        }
        held.ranges().iter().take(ranges_max).cloned().collect()
    }

    /// The members whose neighbours, or whose [`is_seeded`](Self::is_seeded), may have changed since the last call.
    pub fn take_changed(&mut self) -> BTreeSet<MemberId> {
        let mut changed = self.graph.take_changed();
        if std::mem::take(&mut self.is_seeding_changed) {
            changed.extend(self.members.keys());
        }
        changed
    }

    /// The members that are to ask [`pick`](Self::pick) again, since the last call.
    pub fn take_woken(&mut self) -> BTreeSet<MemberId> {
        std::mem::take(&mut self.woken)
    }

    /// All chunks.
    fn all(&self) -> RangeSet {
        RangeSet::from_range(0..self.supply.chunks())
    }

    /// Finds the chunks that no member selects any more that serves: what none has of them is no longer to be sent.
    fn settle(&mut self) {
        let mut unselected = self.all();
        for member in self.members.values().filter(|member| member.serves) {
            if unselected.is_empty() {
                return;
            }
            unselected = unselected.difference(&member.selected);
        }
        self.supply.settle(&unselected);
    }

    /// The only member that serves is pushed everything; with another one it is not.
    fn handle_membership(&mut self, now: Instant) {
        self.is_seeding_changed = true;
        if self.serving <= 2 {
            self.woken.extend(self.members.keys());
        }
        self.wake_idle();
        self.grant(now);
    }

    /// Records that a member has chunks. Returns those that are new.
    fn add(&mut self, id: MemberId, chunks: &RangeSet) -> Vec<u32> {
        let Some(member) = self.members.get_mut(&id) else { return vec![] };
        let (was_seeded, mut new) = (self.supply.unsent().is_empty(), vec![]);
        for (word, mask) in words(chunks, self.supply.chunks()) {
            let added = mask & !member.has.word(word);
            member.has.insert_word(word, added);
            member.had.insert_word(word, added);
            if member.serves {
                self.supply.add_held(word, added);
            }
            new.extend(numbers(word, added));
        }
        self.is_seeding_changed |= was_seeded != self.supply.unsent().is_empty();
        new
    }

    fn mark_slow(&mut self, id: MemberId, now: Instant) {
        if let Some(member) = self.members.get_mut(&id) {
            let before = member.slow.filter(|(until, _)| *until <= now);
            let slow_for = before.map_or(SLOW_FOR, |(_, slow_for)| (slow_for * 2).min(SLOW_FOR_MAX));
            member.slow = Some((now + slow_for, slow_for));
        }
        self.set_standing(id, |_| Standing::Tried);
    }

    fn set_standing(&mut self, id: MemberId, change: impl FnOnce(Standing) -> Standing) {
        let Some(member) = self.members.get_mut(&id) else { return };
        let (before, turn) = (member.standing, member.turn);
        member.standing = change(before);
        if let Some(turn) = turn {
            self.waiting.remove(&(before, turn, id));
            self.waiting.insert((member.standing, turn, id));
        }
    }

    fn has_slot(&self, now: Instant) -> bool {
        self.pushes.moving() + self.granted.len() < self.pushes.slots(now)
    }

    fn wait(&mut self, id: MemberId) {
        let Some(member) = self.members.get_mut(&id) else { return };
        if member.turn.is_none() {
            member.turn = Some(self.turns);
            self.waiting.insert((member.standing, self.turns, id));
            self.turns += 1;
        }
    }

    /// Lets the members wait for which there was nothing to be pushed, because there may be something now. Those that only
    /// take wait for no slot.
    fn wake_idle(&mut self) {
        for id in std::mem::take(&mut self.idle) {
            if self.serves(id) {
                self.wait(id);
            } else if self.supply.orphans().is_empty() {
                self.idle.insert(id);
            } else {
                self.woken.insert(id);
            }
        }
    }

    /// Keeps free slots for the members that wait for them longest.
    fn grant(&mut self, now: Instant) {
        let is_nothing_left = self.supply.unsent().is_empty() && !self.pushes.has_stuck();
        while is_nothing_left || self.has_slot(now) {
            let Some((_, _, id)) = self.waiting.pop_first() else { break };
            if let Some(member) = self.members.get_mut(&id) {
                member.turn = None;
            }
            if is_nothing_left {
                self.idle.insert(id);
            } else if !self.pushes.has_enough(id, self.serving, now) {
                self.granted.insert(id, now);
                self.woken.insert(id);
            }
        }
    }
}

/// The first number of `wanted` that is in `among` and not in `except`.
fn first_common(wanted: &RangeSet, among: &Bits, except: &Bits) -> Option<u32> {
    let mut from = 0;
    loop {
        let number = among.first_from(from)?;
        from = wanted.first_from(number)?;
        if from == number {
            if !except.contains(number) {
                return Some(number);
            }
            from += 1;
        }
    }
}
