//! [`Spread`]: whether pushed chunks come from the members that they were pushed to, to others.

use super::{MemberId, pace::Usual};
use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

/// The least time after which a chunk that nobody else has is stuck at its member: members report what they have once a
/// second.
const STUCK_MIN: Duration = Duration::from_secs(2);

/// That time is at least so many usual times of a push; and twice as many, and at least [`STUCK_AT_FIRST`], before any
/// chunk has spread.
const STUCK_PUSHES: u32 = 2;

/// See [`STUCK_PUSHES`].
const STUCK_AT_FIRST: Duration = Duration::from_secs(4);

/// The chunks that arrived at one member, and that no other is known to have.
#[derive(Debug, Default)]
pub(super) struct Spread {
    chunks: BTreeMap<u32, (Instant, MemberId)>,
    by_age: BTreeSet<(Instant, u32)>,
    /// The number of chunks by member.
    counts: BTreeMap<MemberId, usize>,
    usual: Usual,
}

impl Spread {
    /// Records that a push of a chunk arrived, which others want.
    pub(super) fn begin(&mut self, chunk: u32, member: MemberId, now: Instant) {
        self.forget(chunk);
        self.chunks.insert(chunk, (now, member));
        self.by_age.insert((now, chunk));
        *self.counts.entry(member).or_default() += 1;
    }

    /// The number of chunks at a member that no other is known to have.
    pub(super) fn at(&self, member: MemberId) -> usize {
        self.counts.get(&member).copied().unwrap_or(0)
    }

    /// Records that a member has a chunk. Returns the other one that it was pushed to, and so came from, if that was
    /// not known.
    pub(super) fn handle_held(&mut self, chunk: u32, by: MemberId, now: Instant) -> Option<MemberId> {
        let (since, member) = self.chunks.get(&chunk).copied().filter(|(_, member)| *member != by)?;
        self.usual.note(now.saturating_duration_since(since));
        self.forget(chunk);
        Some(member)
    }

    /// Takes the oldest chunk that is stuck, with its member. `push` is the usual time of a push.
    pub(super) fn take_stuck(&mut self, push: Option<Duration>, now: Instant) -> Option<(u32, MemberId)> {
        let (_, chunk) = self.by_age.first().copied().filter(|_| self.stuck_at(push) <= Some(now))?;
        let (_, member) = self.chunks.get(&chunk).copied()?;
        self.forget(chunk);
        Some((chunk, member))
    }

    /// When the next chunk is stuck.
    pub(super) fn stuck_at(&self, push: Option<Duration>) -> Option<Instant> {
        let (since, push) = (self.by_age.first()?.0, push.unwrap_or_default());
        let after = match self.usual.exceptional() {
            Some(at_most) => at_most.max(push * STUCK_PUSHES).max(STUCK_MIN),
            None => (push * STUCK_PUSHES * 2).max(STUCK_AT_FIRST),
        };
        Some(since + after)
    }

    /// Forgets what is known of a member that left.
    pub(super) fn remove(&mut self, member: MemberId) {
        let gone: Vec<u32> = self
            .chunks
            .iter()
            .filter(|(_, (_, of))| *of == member)
            .map(|(chunk, _)| *chunk)
            .collect();
        gone.into_iter().for_each(|chunk| self.forget(chunk));
    }

    fn forget(&mut self, chunk: u32) {
        let Some((since, member)) = self.chunks.remove(&chunk) else { return };
        self.by_age.remove(&(since, chunk));
        if let Some(count) = self.counts.get_mut(&member) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&member);
            }
        }
    }
}
