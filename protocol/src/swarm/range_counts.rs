//! [`RangeCounts`]: in how many sets each number is.

use crate::RangeSet;

/// How many sets of ranges each number below a bound is in. A Fenwick tree of differences: a range is added, and a number
/// asked for, in O(log n). Needs 4 bytes for each number.
#[derive(Debug)]
pub(super) struct RangeCounts(Vec<i32>);

impl RangeCounts {
    /// No sets of numbers below this bound.
    pub(super) fn new(bound: u32) -> Self {
        Self(vec![0; bound as usize + 1])
    }

    /// Adds a set, whose numbers are below the bound.
    pub(super) fn add(&mut self, set: &RangeSet) {
        self.change(set, 1);
    }

    /// Removes a set that was added.
    pub(super) fn remove(&mut self, set: &RangeSet) {
        self.change(set, -1);
    }

    /// The number of sets that a number is in.
    pub(super) fn of(&self, number: u32) -> u32 {
        let (mut at, mut count) = (number as usize + 1, 0);
        while at > 0 {
            count += self.0[at - 1];
            at &= at - 1;
        }
        count as u32
    }

    fn change(&mut self, set: &RangeSet, by: i32) {
        for range in set.ranges() {
            self.change_from(range.start, by);
            self.change_from(range.end, -by);
        }
    }

    /// Changes the counts of all numbers from this one on.
    fn change_from(&mut self, number: u32, by: i32) {
        let mut at = number as usize + 1;
        while at <= self.0.len() {
            self.0[at - 1] += by;
            at += at & at.wrapping_neg();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Any sets, compared with counting.
        #[test]
        fn counts_sets(
            sets in prop::collection::vec((prop::collection::vec((0u32..100, 0u32..60), 0..4), any::<bool>()), 0..20),
        ) {
            let sets = sets.into_iter().map(|(ranges, stays)| {
                let set: RangeSet = ranges.into_iter().map(|(start, len)| start..(start + len).min(100)).collect();
                (set, stays)
            });
            let sets: Vec<(RangeSet, bool)> = sets.collect();
            let mut counts = RangeCounts::new(100);
            sets.iter().for_each(|(set, _)| counts.add(set));
            sets.iter().filter(|(_, stays)| !stays).for_each(|(set, _)| counts.remove(set));
            for number in 0..100 {
                let expected = sets.iter().filter(|(set, stays)| *stays && set.contains(number)).count();
                prop_assert_eq!(counts.of(number) as usize, expected);
            }
        }
    }
}
