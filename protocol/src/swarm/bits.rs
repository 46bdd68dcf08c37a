//! [`Bits`]: a set of numbers below a bound, as a tree of words.

use super::random::Random;
use crate::RangeSet;

const WORD: usize = u64::BITS as usize;

/// 64⁶ numbers are more than there are.
const LEVELS_MAX: usize = 6;

/// How often a number is drawn blindly before the set is searched. It is found at once in a set that is half full.
const DRAWS: u32 = 4;

/// A set of numbers below a bound. Each word of a level has a bit for each word of the level below it that is not zero,
/// so that a number is added, removed or found in four steps among 2²⁰. Needs 1 1/63 bits of memory for each number.
#[derive(Debug, Clone)]
pub(super) struct Bits {
    /// The words of the lowest level, then those of the next one, and so on to the highest, which has one word.
    words: Vec<u64>,
    /// Where each level begins; the lowest is first.
    starts: [u32; LEVELS_MAX],
    levels: usize,
    count: u32,
    bound: u32,
}

impl Bits {
    /// The empty set.
    pub(super) fn new(bound: u32) -> Self {
        let (mut starts, mut levels) = ([0; LEVELS_MAX], 0);
        let (mut words, mut total) = (bound as usize, 0);
        while levels == 0 || words > 1 {
            words = words.div_ceil(WORD).max(1);
            starts[levels] = total as u32;
            total += words;
            levels += 1;
        }
        Self { words: vec![0; total], starts, levels, count: 0, bound }
    }

    /// The set of all numbers below the bound.
    pub(super) fn full(bound: u32) -> Self {
        let mut bits = Self::new(bound);
        for (word, mask) in words(&RangeSet::from_range(0..bound), bound) {
            bits.insert_word(word, mask);
        }
        bits
    }

    /// The size of the set.
    pub(super) fn len(&self) -> u32 {
        self.count
    }

    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub(super) fn contains(&self, number: u32) -> bool {
        number < self.bound && self.words[number as usize / WORD] >> (number as usize % WORD) & 1 == 1
    }

    /// Adds a number; returns false if it was there, or is not below the bound.
    pub(super) fn insert(&mut self, number: u32) -> bool {
        if number >= self.bound || self.contains(number) {
            return false;
        }
        self.insert_word(number as usize / WORD, 1 << (number as usize % WORD));
        true
    }

    /// Removes a number; returns false if it was not there.
    pub(super) fn remove(&mut self, number: u32) -> bool {
        if !self.contains(number) {
            return false;
        }
        self.remove_word(number as usize / WORD, 1 << (number as usize % WORD));
        true
    }

    /// Adds 64 numbers, as bits, which are below the bound. Costs as much as one.
    pub(super) fn insert_word(&mut self, word: usize, mask: u64) {
        let before = self.words[word];
        self.words[word] |= mask;
        self.count += (mask & !before).count_ones();
        let (mut at, mut is_first) = (word, before == 0 && mask != 0);
        for start in self.starts[..self.levels].iter().skip(1) {
            if !is_first {
                break;
            }
            let above = &mut self.words[*start as usize + at / WORD];
            is_first = *above == 0;
            *above |= 1 << (at % WORD);
            at /= WORD;
        }
    }

    /// Removes 64 numbers, as bits. Costs as much as one.
    pub(super) fn remove_word(&mut self, word: usize, mask: u64) {
        let before = self.words[word];
        self.words[word] &= !mask;
        self.count -= (mask & before).count_ones();
        let (mut at, mut is_empty) = (word, before != 0 && before & !mask == 0);
        for start in self.starts[..self.levels].iter().skip(1) {
            if !is_empty {
                break;
            }
            let above = &mut self.words[*start as usize + at / WORD];
            *above &= !(1 << (at % WORD));
            is_empty = *above == 0;
            at /= WORD;
        }
    }

    /// The first number from `from` on.
    pub(super) fn first_from(&self, from: u32) -> Option<u32> {
        let mut at = from as usize;
        // Up, until a word has a bit at `at` or behind it.
        let mut height = 0;
        loop {
            let rest = self
                .level(height)?
                .get(at / WORD)
                .map_or(0, |word| word & (u64::MAX << (at % WORD)));
            if rest != 0 {
                at = at / WORD * WORD + rest.trailing_zeros() as usize;
                break;
            }
            at = at / WORD + 1;
            height += 1;
        }
        // Down, to the first bit below.
        for level in (0..height).rev() {
            at = at * WORD + self.words[self.starts[level] as usize + at].trailing_zeros() as usize;
        }
        Some(at as u32)
    }

    /// The words of a level.
    fn level(&self, level: usize) -> Option<&[u64]> {
        let ends = self.starts[..self.levels].iter().skip(1).map(|start| *start as usize);
        let end = ends.chain([self.words.len()]).nth(level)?;
        Some(&self.words[self.starts[level] as usize..end])
    }

    /// The first ranges, at most `max`. Costs a step for each word that they reach into.
    pub(super) fn ranges(&self, max: usize) -> RangeSet {
        let after = |end: u32| self.first_from(end).map(|start| start..self.end_of_range(start));
        let ranges = std::iter::successors(after(0), |range| after(range.end));
        ranges.take(max).collect()
    }

    /// The first number behind `number` that is not in the set, or the bound.
    fn end_of_range(&self, number: u32) -> u32 {
        let mut at = number as usize;
        while at < self.bound as usize {
            let missing = !self.words[at / WORD] & (u64::MAX << (at % WORD));
            at = at / WORD * WORD + missing.trailing_zeros() as usize;
            if missing != 0 {
                break;
            }
        }
        (at as u32).min(self.bound)
    }

    /// The numbers, ascending.
    pub(super) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        std::iter::successors(self.first_from(0), |last| self.first_from(last + 1))
    }

    /// A number of the set. In a sparse set, one behind a gap is likelier, the likelier the longer the gap is.
    pub(super) fn draw(&self, random: &mut Random) -> Option<u32> {
        if self.is_empty() {
            return None;
        }
        let mut drawn = 0;
        for _ in 0..DRAWS {
            drawn = random.below(self.bound as usize) as u32;
            if self.contains(drawn) {
                return Some(drawn);
            }
        }
        self.first_from(drawn).or_else(|| self.first_from(0))
    }

    /// The words with numbers of the set, each with 64 numbers as bits.
    pub(super) fn iter_words(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        let words = self.level(0).into_iter().flatten().copied().enumerate();
        words.filter(|(_, bits)| *bits != 0)
    }

    /// 64 numbers of the set, as bits.
    pub(super) fn word(&self, word: usize) -> u64 {
        self.words[word]
    }
}

/// The words that numbers of these ranges are in, each with the bits of the ranges, without numbers from `bound` on.
pub(super) fn words(ranges: &RangeSet, bound: u32) -> impl Iterator<Item = (usize, u64)> {
    ranges.ranges().iter().flat_map(move |range| {
        let (start, end) = (range.start as usize, range.end.min(bound) as usize);
        (start / WORD..end.div_ceil(WORD)).map(move |word| {
            let below = |number: usize| match number.saturating_sub(word * WORD) {
                bits if bits >= WORD => u64::MAX,
                bits => (1 << bits) - 1,
            };
            (word, below(end) & !below(start))
        })
    })
}

/// The numbers of the bits of `mask` in this word.
pub(super) fn numbers(word: usize, mask: u64) -> impl Iterator<Item = u32> {
    let first = (word * WORD) as u32;
    let next = |rest: &u64| Some(rest & (rest - 1)).filter(|rest| *rest != 0);
    std::iter::successors(Some(mask).filter(|mask| *mask != 0), next)
        .map(move |rest| first + rest.trailing_zeros())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        /// Any operations, compared with a `BTreeSet`, for bounds of one to three levels.
        #[test]
        fn behaves_like_a_set(
            bound in prop_oneof![0u32..130, 4_000u32..5_000],
            steps in prop::collection::vec((any::<bool>(), any::<prop::sample::Index>(), prop::option::weighted(0.2, any::<u64>())), 0..300),
            seed: u64,
        ) {
            let (mut bits, mut model, mut random) = (Bits::new(bound), BTreeSet::new(), Random::new(seed));
            for (insert, number, mask) in steps {
                let number = number.index(bound as usize + 2) as u32;
                match (insert, mask.filter(|_| number < bound)) {
                    (true, None) => prop_assert_eq!(bits.insert(number), number < bound && model.insert(number)),
                    (false, None) => prop_assert_eq!(bits.remove(number), model.remove(&number)),
                    (insert, Some(mask)) => {
                        let word = number as usize / WORD;
                        let below = numbers(word, mask).filter(|number| *number < bound);
                        let mask = below.fold(0, |mask, number| mask | 1 << (number as usize % WORD));
                        match insert {
                            true => {
                                bits.insert_word(word, mask);
                                model.extend(numbers(word, mask));
                            }
                            false => {
                                bits.remove_word(word, mask);
                                model.retain(|number| numbers(word, mask).all(|removed| removed != *number));
                            }
                        }
                    }
                }
                prop_assert_eq!(bits.first_from(number), model.range(number..).next().copied());
                prop_assert_eq!(bits.contains(number), model.contains(&number));
                let drawn = bits.draw(&mut random);
                prop_assert!(drawn.map_or(model.is_empty(), |drawn| model.contains(&drawn)));
            }
            prop_assert_eq!(bits.len() as usize, model.len());
            let ranges: RangeSet = model.iter().map(|number| *number..number + 1).collect();
            prop_assert_eq!(bits.ranges(3), ranges.ranges().iter().take(3).cloned().collect::<RangeSet>());
            let by_words = bits.iter_words().flat_map(|(word, bits)| numbers(word, bits));
            prop_assert!(by_words.eq(model.iter().copied()));
            prop_assert!(bits.iter().eq(model));
        }

        /// Ranges in words have the numbers of the ranges.
        #[test]
        fn words_cover_ranges(bound in 0u32..300, ranges in prop::collection::vec((0u32..310, 0u32..310), 0..4)) {
            let set: RangeSet = ranges.into_iter().map(|(start, len)| start..start + len).collect();
            let found = words(&set, bound).flat_map(|(word, mask)| numbers(word, mask));
            prop_assert!(found.eq(set.iter().filter(|number| *number < bound)));
        }
    }

    #[test]
    fn every_number_is_drawn() {
        let (bits, mut random) = (Bits::full(100), Random::new(1));
        let drawn: BTreeSet<_> = (0..2_000).filter_map(|_| bits.draw(&mut random)).collect();
        assert_eq!(drawn.len(), 100);
    }
}
