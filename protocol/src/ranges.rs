//! Sets of chunk numbers, kept as ranges.

use std::ops::Range;

/// A set of numbers that tends to have long runs: the chunks that a receiver holds, or still misses.
///
/// Ranges are sorted, disjoint, non-empty and not adjacent, so equal sets are equal values. Insertion is linear in the
/// number of ranges, which concurrent streams keep small.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RangeSet {
    ranges: Vec<Range<u32>>,
}

impl RangeSet {
    /// The empty set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds `number`; returns false when it was already there.
    pub fn insert(&mut self, number: u32) -> bool {
        let at = self.ranges.partition_point(|r| r.end < number);
        let Some(range) = self.ranges.get_mut(at).filter(|r| r.start <= number.saturating_add(1)) else {
            self.ranges.insert(at, number..number + 1);
            return true;
        };
        if range.contains(&number) {
            return false;
        }
        if number + 1 == range.start {
            range.start = number;
            return true;
        }
        range.end = number + 1;
        self.merge_with_next(at);
        true
    }

    /// Removes `number`; returns false when it was not there.
    pub fn remove(&mut self, number: u32) -> bool {
        let at = self.ranges.partition_point(|r| r.end <= number);
        let Some(range) = self.ranges.get_mut(at).filter(|r| r.contains(&number)) else {
            return false;
        };
        let rest = number + 1..range.end;
        range.end = number;
        let empty = range.start == range.end;
        if rest.start < rest.end {
            self.ranges.insert(at + 1, rest);
        }
        if empty {
            self.ranges.remove(at);
        }
        true
    }

    /// Whether `number` is in the set.
    pub fn contains(&self, number: u32) -> bool {
        let at = self.ranges.partition_point(|r| r.end <= number);
        self.ranges.get(at).is_some_and(|r| r.contains(&number))
    }

    /// How many numbers are in the set.
    pub fn len(&self) -> u32 {
        self.ranges.iter().map(|r| r.end - r.start).sum()
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// The runs of numbers, ascending.
    pub fn ranges(&self) -> &[Range<u32>] {
        &self.ranges
    }

    fn merge_with_next(&mut self, at: usize) {
        if let Some(next) = self.ranges.get(at + 1).filter(|next| next.start == self.ranges[at].end) {
            self.ranges[at].end = next.end;
            self.ranges.remove(at + 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        /// A list of operations against the obvious set.
        #[test]
        fn behaves_like_a_set(steps in prop::collection::vec((any::<bool>(), 0u32..40), 0..200)) {
            let (mut set, mut model) = (RangeSet::new(), BTreeSet::new());
            for (insert, number) in steps {
                match insert {
                    true => prop_assert_eq!(set.insert(number), model.insert(number)),
                    false => prop_assert_eq!(set.remove(number), model.remove(&number)),
                }
                prop_assert_eq!(set.len() as usize, model.len());
                prop_assert_eq!(set.is_empty(), model.is_empty());
                prop_assert!((0..41).all(|n| set.contains(n) == model.contains(&n)));
                prop_assert!(set.ranges().iter().all(|r| r.start < r.end));
                prop_assert!(set.ranges().windows(2).all(|w| w[0].end < w[1].start), "{:?}", set);
            }
        }
    }
}
