//! [`LaneSet`]: the lanes of a session by their numbers.

use std::collections::BTreeMap;
use tensor_relay_protocol::LaneId;

/// The bound of lane numbers, which are never used again. A client that loses a lane every 5 s, its longest backoff, has
/// used all of them after two months.
pub(super) const LANE_NUMBERS_MAX: u32 = 1 << 20;

/// Why a lane cannot join a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JoinRefused {
    /// The session has the maximum number of lanes.
    Full,
    /// The session has ended.
    Ended,
    /// The number is in use or invalid.
    NumberUnavailable,
    /// The number was retired.
    Retired,
}

/// The lanes of a session by their numbers. Pure.
#[derive(Debug)]
pub(super) struct LaneSet<L> {
    pub(super) live: BTreeMap<LaneId, L>,
    used: UsedNumbers,
    ended: bool,
}

/// The numbers that joined or were retired. Clients count up, but a `Join` may overtake another: of the numbers below
/// the highest used one, [`RECENT`](Self::RECENT) are told apart, and earlier ones count as used (the anti-replay window
/// of RFC 4303, §3.4.3).
#[derive(Debug, Default)]
struct UsedNumbers {
    /// The number after the highest used one.
    next: u32,
    /// Whether `next - 1 - n` was used, as bit `n`.
    recent: u64,
}

/// A newly retired number, with its lane, if one had joined.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Retirement<L> {
    pub(super) lane: Option<L>,
}

impl<L> Default for LaneSet<L> {
    fn default() -> Self {
        Self { live: BTreeMap::new(), used: UsedNumbers::default(), ended: false }
    }
}

impl<L> LaneSet<L> {
    pub(super) fn check_join(&self, id: LaneId, max: usize) -> Result<(), JoinRefused> {
        match () {
            () if self.ended => Err(JoinRefused::Ended),
            () if id.0 >= LANE_NUMBERS_MAX || self.live.contains_key(&id) => {
                Err(JoinRefused::NumberUnavailable)
            }
            () if self.used.contains(id.0) => Err(JoinRefused::Retired),
            () if self.live.len() >= max => Err(JoinRefused::Full),
            () => Ok(()),
        }
    }

    pub(super) fn join(&mut self, id: LaneId, lane: L, max: usize) -> Result<(), JoinRefused> {
        self.check_join(id, max)?;
        self.insert(id, lane);
        Ok(())
    }

    pub(super) fn insert(&mut self, id: LaneId, lane: L) {
        self.used.insert(id.0);
        self.live.insert(id, lane);
    }

    /// Retires a number, even without a lane; `None` if it was retired before or is invalid, or the session has ended.
    pub(super) fn retire(&mut self, id: LaneId) -> Option<Retirement<L>> {
        if self.ended || id.0 >= LANE_NUMBERS_MAX {
            return None;
        }
        let lane = self.live.remove(&id);
        let is_new = self.used.insert(id.0);
        (lane.is_some() || is_new).then_some(Retirement { lane })
    }

    pub(super) fn close(&mut self) -> Vec<L> {
        self.ended = true;
        std::mem::take(&mut self.live).into_values().collect()
    }
}

impl UsedNumbers {
    /// The count of numbers up to the highest used one that are told apart.
    const RECENT: u32 = u64::BITS;

    fn contains(&self, number: u32) -> bool {
        match self.next.checked_sub(number + 1) {
            None => false,
            Some(age) => age >= Self::RECENT || self.recent >> age & 1 == 1,
        }
    }

    /// Adds a number; returns whether it was not used before.
    fn insert(&mut self, number: u32) -> bool {
        if self.contains(number) {
            return false;
        }
        if number >= self.next {
            self.recent = self.recent.checked_shl(number + 1 - self.next).unwrap_or(0);
            self.next = number + 1;
        }
        self.recent |= 1 << (self.next - 1 - number);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    const CONTROL: LaneId = LaneId(0);

    proptest! {
        /// For any order of joins and retirements, also of invalid numbers: a number joins once and is retired once,
        /// and the session never exceeds its maximum of lanes. Numbers far below the highest one count as used.
        #[test]
        fn numbers_are_used_once(
            steps in prop::collection::vec((any::<bool>(), prop_oneof![
                8 => 0u32..6,
                1 => UsedNumbers::RECENT - 2..UsedNumbers::RECENT + 4,
                1 => LANE_NUMBERS_MAX - 1..LANE_NUMBERS_MAX + 1,
                1 => Just(u32::MAX),
            ]), 0..60),
            max in 1usize..5,
        ) {
            let mut set = LaneSet::default();
            set.insert(CONTROL, 0);
            let (mut live, mut used) = (BTreeSet::from([0]), BTreeSet::from([0]));
            for (joins, number) in steps {
                let id = LaneId(number);
                let is_old = used.last().is_some_and(|last| *last >= number.saturating_add(UsedNumbers::RECENT));
                let is_used = used.contains(&number) || is_old;
                if joins {
                    let refused = match () {
                        () if number >= LANE_NUMBERS_MAX || live.contains(&number) => {
                            Some(JoinRefused::NumberUnavailable)
                        }
                        () if is_used => Some(JoinRefused::Retired),
                        () if live.len() >= max => Some(JoinRefused::Full),
                        () => None,
                    };
                    prop_assert_eq!(set.join(id, number, max).err(), refused);
                    if refused.is_none() {
                        live.insert(number);
                        used.insert(number);
                    }
                } else if number < LANE_NUMBERS_MAX {
                    let lane = live.take(&number);
                    let is_new = lane.is_some() || !is_used;
                    used.insert(number);
                    prop_assert_eq!(set.retire(id), is_new.then_some(Retirement { lane }));
                } else {
                    prop_assert_eq!(set.retire(id), None);
                }
                prop_assert!(set.live.keys().map(|id| id.0).eq(live.iter().copied()));
            }
        }
    }

    #[test]
    fn a_number_retired_before_its_join_is_refused() {
        let mut set = LaneSet::default();
        assert_eq!(set.retire(LaneId(1)), Some(Retirement { lane: None }), "the client gets an answer");
        assert_eq!(set.join(LaneId(1), "late", 4), Err(JoinRefused::Retired));
        assert_eq!(set.retire(LaneId(1)), None, "once");
    }

    #[test]
    fn a_retirement_is_announced_once() {
        let mut set = LaneSet::default();
        set.join(LaneId(1), "lane", 4).unwrap();
        assert_eq!(set.retire(LaneId(1)), Some(Retirement { lane: Some("lane") }), "the server lost it");
        assert_eq!(set.retire(LaneId(1)), None, "the client's `Retire` crossed the server's `Retired`");
    }

    #[test]
    fn the_last_lane_may_be_retired_and_another_one_join() {
        let mut set = LaneSet::default();
        set.live.insert(CONTROL, "control");
        assert_eq!(set.retire(CONTROL), Some(Retirement { lane: Some("control") }));
        assert!(set.live.is_empty());
        assert_eq!(set.join(CONTROL, "again", 4), Err(JoinRefused::Retired));
        set.join(LaneId(1), "lane", 1).unwrap();
        assert_eq!(set.join(LaneId(2), "one too many", 1), Err(JoinRefused::Full));
    }

    #[test]
    fn no_lane_joins_an_ended_session() {
        let mut set = LaneSet::default();
        set.join(LaneId(1), "lane", 4).unwrap();
        assert_eq!(set.close(), ["lane"]);
        assert_eq!(set.join(LaneId(2), "late", 4), Err(JoinRefused::Ended));
        assert_eq!(set.retire(LaneId(1)), None, "the session has ended");
    }
}
