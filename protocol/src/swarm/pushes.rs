//! [`Pushes`]: the chunks that the origin pushes, and which of them are stuck.

use super::{
    MemberId,
    pace::{Pace, Usual},
};
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::{Duration, Instant},
};

/// The least time after which a push is stuck, since the usual times of small chunks on fast links vary.
const STUCK_MIN: Duration = Duration::from_millis(100);

/// After this time, for each of those that share the link, a push is stuck while none has ended.
const EXCEPTIONAL_AT_FIRST: Duration = Duration::from_secs(10);

/// For this time pushes are under way, at the rate at which they arrive, beside [`SLOTS_MIN`]: longer than most round trips,
/// so that the origin's link is never idle. With more, each chunk would take longer to come to where others can take it
/// from, and control messages would wait behind it.
const AHEAD: Duration = Duration::from_millis(250);

/// The pushes under way while none has arrived.
const SLOTS_MIN: usize = 4;

/// The most pushes under way.
const SLOTS_MAX: usize = 64;

/// The least pushes at once to one of several members. With two, the next one is under way when the credit for the last
/// one arrives.
const PUSHES_MIN: usize = 2;

/// A push that has not arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Push {
    since: Instant,
    chunk: u32,
    member: MemberId,
    /// The number of those that shared the origin's link with it when it began, itself included.
    sharing: u32,
}

/// The pushes that have not arrived.
#[derive(Debug, Default)]
pub(super) struct Pushes {
    /// By member, oldest first: they arrive in about that order.
    by_member: BTreeMap<MemberId, VecDeque<Push>>,
    /// Those that are not stuck, by age.
    moving: BTreeSet<Push>,
    /// Those that are stuck and were not repeated, by age.
    stuck: BTreeSet<Push>,
    /// The same by chunk.
    stuck_by_chunk: BTreeMap<u32, Vec<Push>>,
    /// The usual time of a push, divided by the number of those that shared the origin's link with it.
    usual: Usual,
    /// The rate at which pushes arrive.
    pace: Pace,
}

impl Pushes {
    pub(super) fn begin(&mut self, member: MemberId, chunk: u32, now: Instant) {
        let push = Push { since: now, chunk, member, sharing: self.moving.len() as u32 + 1 };
        self.moving.insert(push);
        self.by_member.entry(member).or_default().push_back(push);
    }

    /// The number of pushes to a member.
    pub(super) fn to(&self, member: MemberId) -> usize {
        self.by_member.get(&member).map_or(0, VecDeque::len)
    }

    /// The chunks that are being pushed to a member.
    pub(super) fn under_way(&self, member: MemberId) -> impl Iterator<Item = u32> + '_ {
        self.by_member.get(&member).into_iter().flatten().map(|push| push.chunk)
    }

    /// The number of pushes that are not stuck.
    pub(super) fn moving(&self) -> usize {
        self.moving.len()
    }

    /// The most pushes at once that are not stuck.
    pub(super) fn slots(&self, now: Instant) -> usize {
        (SLOTS_MIN + (self.pace.rate(now) * AHEAD.as_secs_f64()) as usize).min(SLOTS_MAX)
    }

    /// Whether one of so many members that serve has as many pushes as it should have at once.
    pub(super) fn has_enough(&self, member: MemberId, members: usize, now: Instant) -> bool {
        self.to(member) >= self.slots(now).div_ceil(members.max(1)).max(PUSHES_MIN)
    }

    /// Records that the oldest push to a member arrived. Returns its chunk, and whether it took so long as to be
    /// stuck.
    pub(super) fn handle_arrived(&mut self, member: MemberId, now: Instant) -> Option<(u32, bool)> {
        let push = self.by_member.get_mut(&member)?.pop_front()?;
        let is_late = self.is_late(&push, now);
        self.usual.note(now.saturating_duration_since(push.since) / push.sharing);
        self.pace.handle_delivered(now);
        self.forget(&push);
        Some((push.chunk, is_late))
    }

    /// Forgets the pushes to a member that left.
    pub(super) fn remove(&mut self, member: MemberId) {
        for push in self.by_member.remove(&member).into_iter().flatten() {
            self.forget(&push);
        }
    }

    fn forget(&mut self, push: &Push) {
        self.moving.remove(push);
        if self.stuck.remove(push)
            && let Some(pushes) = self.stuck_by_chunk.get_mut(&push.chunk)
        {
            pushes.retain(|other| other != push);
        }
    }

    fn insert_stuck(&mut self, push: Push) {
        if self.stuck.insert(push) {
            self.stuck_by_chunk.entry(push.chunk).or_default().push(push);
        }
    }

    /// Records the time. Returns the members with pushes that are stuck from now on.
    pub(super) fn handle_time(&mut self, now: Instant) -> Vec<MemberId> {
        let mut members = vec![];
        loop {
            let late: Vec<Push> =
                self.moving.iter().filter(|push| self.is_late(push, now)).copied().collect();
            if late.is_empty() {
                return members;
            }
            for push in late {
                self.moving.remove(&push); // Fewer share the link now, so that others may be late, too.
                self.insert_stuck(push);
                members.push(push.member);
            }
        }
    }

    /// The chunk of the oldest stuck push of one that `is_wanted`.
    pub(super) fn find_stuck(&self, is_wanted: impl Fn(u32) -> bool) -> Option<u32> {
        self.stuck.iter().map(|push| push.chunk).find(|chunk| is_wanted(*chunk))
    }

    /// When the next push is stuck.
    pub(super) fn stuck_at(&self) -> Option<Instant> {
        self.moving.iter().map(|push| push.since + self.stuck_after(push)).min()
    }

    /// The usual time of a push beside as many others as there are now.
    pub(super) fn usual(&self) -> Option<Duration> {
        self.usual.get().map(|usual| usual * (self.moving.len() as u32).max(1))
    }

    /// Records that a chunk is stuck at the member that it was pushed to.
    pub(super) fn add_stuck(&mut self, chunk: u32, member: MemberId, now: Instant) {
        self.insert_stuck(Push { since: now, chunk, member, sharing: 1 });
    }

    /// Whether a push is stuck and was not repeated.
    pub(super) fn has_stuck(&self) -> bool {
        !self.stuck.is_empty()
    }

    /// Forgets that pushes of a chunk are stuck, because it arrived or is repeated.
    pub(super) fn drop_stuck(&mut self, chunk: u32) {
        for push in self.stuck_by_chunk.remove(&chunk).into_iter().flatten() {
            self.stuck.remove(&push);
        }
    }

    fn is_late(&self, push: &Push, now: Instant) -> bool {
        now.saturating_duration_since(push.since) >= self.stuck_after(push)
    }

    /// The time after which a push is stuck. Pushes share the origin's link: the more there were when it began, or are now,
    /// the longer each takes.
    fn stuck_after(&self, push: &Push) -> Duration {
        let sharing = push.sharing.max(self.moving.len() as u32);
        let at_most = self.usual.exceptional().unwrap_or(EXCEPTIONAL_AT_FIRST);
        (at_most * sharing).max(STUCK_MIN)
    }
}
