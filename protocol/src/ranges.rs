//! Sets of chunk or tensor numbers, stored as ranges.

use std::{iter::Flatten, ops::Range, vec};

/// A set of numbers below `u32::MAX`, efficient if it has long runs: the chunks that a receiver holds, or lacks.
///
/// Ranges are sorted, disjoint, non-empty and not adjacent, so equal sets are equal values. Insertion and removal take
/// time linear in the number of ranges, of which chunks that arrive concurrently cause few; insertion behind the last
/// range takes logarithmic time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RangeSet {
    ranges: Vec<Range<u32>>,
}

impl RangeSet {
    /// The empty set.
    pub fn new() -> Self {
        Self::default()
    }

    /// The set of the numbers in one range.
    pub fn from_range(range: Range<u32>) -> Self {
        Self::from_iter([range])
    }

    /// The set with these ranges, from a peer. `None` unless they have the form that [`ranges`](Self::ranges) returns:
    /// ascending, non-empty and not adjacent.
    pub fn from_ranges(ranges: impl IntoIterator<Item = Range<u32>>) -> Option<Self> {
        let mut end = None;
        let checked = ranges.into_iter().map(|range| {
            let is_valid = end.is_none_or(|end| end < range.start) && range.start < range.end;
            end = Some(range.end);
            is_valid.then_some(range)
        });
        Some(Self { ranges: checked.collect::<Option<_>>()? })
    }

    /// Adds `number`, which must be below `u32::MAX`; returns false when the set already contained it.
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

    /// Removes `number`; returns false when the set did not contain it.
    pub fn remove(&mut self, number: u32) -> bool {
        let at = self.ranges.partition_point(|r| r.end <= number);
        let Some(range) = self.ranges.get_mut(at).filter(|r| r.contains(&number)) else {
            return false;
        };
        let upper = number + 1..range.end;
        range.end = number;
        let is_empty = range.start == range.end;
        if upper.start < upper.end {
            self.ranges.insert(at + 1, upper);
        }
        if is_empty {
            self.ranges.remove(at);
        }
        true
    }

    /// Whether `number` is in the set.
    pub fn contains(&self, number: u32) -> bool {
        let at = self.ranges.partition_point(|r| r.end <= number);
        self.ranges.get(at).is_some_and(|r| r.contains(&number))
    }

    /// The first number from `number` on, found in logarithmic time.
    pub fn first_from(&self, number: u32) -> Option<u32> {
        let at = self.ranges.partition_point(|r| r.end <= number);
        self.ranges.get(at).map(|r| r.start.max(number))
    }

    /// The first number that both sets have.
    pub fn first_common(&self, other: &Self) -> Option<u32> {
        let mut from = 0;
        loop {
            let first = self.first_from(from)?;
            from = other.first_from(first)?;
            if first == from {
                return Some(first);
            }
        }
    }

    /// The size of the set.
    pub fn len(&self) -> u32 {
        self.ranges.iter().map(|r| r.end - r.start).sum()
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// The ranges, ascending.
    pub fn ranges(&self) -> &[Range<u32>] {
        &self.ranges
    }

    /// The numbers, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.ranges.iter().cloned().flatten()
    }

    /// Removes the first `count` numbers, or all if there are fewer, and returns them. Linear in the ranges.
    pub fn take_first(&mut self, count: u32) -> Self {
        let mut left = count;
        let mut first = vec![];
        self.ranges.retain_mut(|range| {
            let end = range.end.min(range.start.saturating_add(left));
            if range.start < end {
                first.push(range.start..end);
                left -= end - range.start;
            }
            range.start = end;
            range.start < range.end
        });
        Self { ranges: first }
    }

    /// The union. Sorts the ranges of both.
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        self.ranges.iter().chain(&other.ranges).cloned().collect()
    }

    /// The intersection. Each range of `other` costs a binary search in this set.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        let common = other.ranges.iter().flat_map(|wanted| {
            let first = self.ranges.partition_point(|range| range.end <= wanted.start);
            let overlapping = self.ranges[first..].iter().take_while(|range| range.start < wanted.end);
            overlapping.map(|range| range.start.max(wanted.start)..range.end.min(wanted.end))
        });
        Self { ranges: common.collect() }
    }

    /// The difference. Linear in the ranges of both.
    #[must_use]
    pub fn difference(&self, other: &Self) -> Self {
        let mut ranges = Vec::new();
        let mut holes = other.ranges.iter().peekable();
        for range in &self.ranges {
            let mut start = range.start;
            while let Some(hole) = holes.next_if(|hole| hole.end <= range.end) {
                if start < hole.start {
                    ranges.push(start..hole.start);
                }
                start = start.max(hole.end);
            }
            let end = holes.peek().map_or(range.end, |hole| hole.start.min(range.end));
            if start < end {
                ranges.push(start..end);
            }
        }
        Self { ranges }
    }

    fn merge_with_next(&mut self, at: usize) {
        if let Some(next) = self.ranges.get(at + 1).filter(|next| next.start == self.ranges[at].end) {
            self.ranges[at].end = next.end;
            self.ranges.remove(at + 1);
        }
    }
}

/// Collects ranges in any order, which may overlap or be empty. Linear if they ascend.
impl FromIterator<Range<u32>> for RangeSet {
    fn from_iter<I: IntoIterator<Item = Range<u32>>>(ranges: I) -> Self {
        let mut merged: Vec<Range<u32>> = Vec::new();
        for range in ranges.into_iter().filter(|range| !range.is_empty()) {
            match merged.last_mut() {
                Some(last) if can_merge(last, &range) => last.end = last.end.max(range.end),
                _ => merged.push(range),
            }
        }
        merged.sort_unstable_by_key(|range| range.start);
        merged.dedup_by(|next, range| {
            let is_merged = can_merge(range, next);
            range.end = if is_merged { range.end.max(next.end) } else { range.end };
            is_merged
        });
        Self { ranges: merged }
    }
}

/// Whether `next` starts in `range` or right behind it.
fn can_merge(range: &Range<u32>, next: &Range<u32>) -> bool {
    range.start <= next.start && next.start <= range.end
}

impl IntoIterator for RangeSet {
    type Item = u32;
    type IntoIter = Flatten<vec::IntoIter<Range<u32>>>;

    /// The numbers, ascending, each in constant time.
    fn into_iter(self) -> Self::IntoIter {
        self.ranges.into_iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        /// Any operations, compared with a `BTreeSet`.
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
                prop_assert!((0..41).all(|n| set.first_from(n) == model.range(n..).next().copied()));
                prop_assert!(set.ranges().iter().all(|r| r.start < r.end));
                prop_assert!(set.ranges().windows(2).all(|w| w[0].end < w[1].start), "{:?}", set);
            }
        }

        /// Two sets, compared with two `BTreeSet`s.
        #[test]
        fn union_difference_and_intersection_are_those_of_sets(a in any_model(), b in any_model()) {
            let (set_a, set_b) = (set_of(&a), set_of(&b));
            prop_assert_eq!(Vec::from_iter(set_a.iter()), Vec::from_iter(a.iter().copied()));
            prop_assert_eq!(Vec::from_iter(set_a.clone()), Vec::from_iter(a.iter().copied()));
            prop_assert_eq!(set_a.union(&set_b), set_of(&(&a | &b)));
            prop_assert_eq!(set_a.difference(&set_b), set_of(&(&a - &b)));
            prop_assert_eq!(set_a.intersection(&set_b), set_of(&(&a & &b)));
            let mut rest = set_a;
            let first: BTreeSet<u32> = a.iter().copied().take(b.len()).collect();
            prop_assert_eq!(rest.take_first(b.len() as u32), set_of(&first));
            prop_assert_eq!(rest, set_of(&(&a - &first)));
        }

        /// Ranges in any order collect to the set of all their numbers.
        #[test]
        fn ranges_in_any_order_are_collected(ranges in prop::collection::vec((0u32..40, 0u32..8), 0..12)) {
            let ranges: Vec<_> = ranges.into_iter().map(|(start, len)| start..start + len).collect();
            let model: BTreeSet<u32> = ranges.iter().cloned().flatten().collect();
            prop_assert_eq!(RangeSet::from_iter(ranges), set_of(&model));
        }

        /// From a peer, only the form that `ranges` returns is accepted.
        #[test]
        fn only_canonical_ranges_are_accepted(ranges in prop::collection::vec((0u32..30, 0u32..30), 0..4)) {
            let ranges: Vec<_> = ranges.into_iter().map(|(start, end)| start..end).collect();
            let set = RangeSet::from_iter(ranges.iter().cloned());
            let is_canonical = set.ranges() == ranges;
            prop_assert_eq!(RangeSet::from_ranges(ranges), is_canonical.then_some(set.clone()));
            prop_assert_eq!(RangeSet::from_ranges(set.ranges().to_vec()), Some(set));
        }
    }

    #[test]
    fn ranges_in_another_form_are_refused() {
        let read = |ends: &[(u32, u32)]| RangeSet::from_ranges(ends.iter().map(|(start, end)| *start..*end));
        let hostile: [&[(u32, u32)]; 5] =
            [&[(3, 3)], &[(5, 3)], &[(0, 2), (2, 3)], &[(0, 2), (1, 3)], &[(4, 5), (0, 1)]];
        for ends in hostile {
            assert_eq!(read(ends), None, "{ends:?}");
        }
        assert_eq!(read(&[(0, u32::MAX)]).unwrap().len(), u32::MAX);
        assert!(RangeSet::from_range(3..3).is_empty());
    }

    fn any_model() -> impl Strategy<Value = BTreeSet<u32>> {
        prop::collection::btree_set(0u32..40, 0..40)
    }

    fn set_of(model: &BTreeSet<u32>) -> RangeSet {
        let mut set = RangeSet::new();
        model.iter().for_each(|number| assert!(set.insert(*number)));
        set
    }
}
