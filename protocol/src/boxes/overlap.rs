//! The bytes that two boxes of one tensor have in common.

use super::Bounds;
use crate::Dtype;
use std::ops::Range;

/// The common bytes of two boxes of one tensor, `from` and `to`, each of them a dense, row-major array: a piece of the
/// payload, and memory.
///
/// They are *runs* of bytes that lie together in both. Runs may be as short as an element, and there may be millions;
/// they are computed, in a time proportional to the number of dimensions, and never listed. In both arrays the common
/// bytes have the same order, so they are numbered, and a range of one array has a range of these numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Overlap {
    /// The length of a run.
    run_bytes: u64,
    /// How often the run is repeated, outermost first.
    levels: Vec<Level>,
    /// The place of the first run in each array.
    from: u64,
    to: u64,
}

/// Repetitions at equal distances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Level {
    count: u64,
    /// The distance in each array.
    from: u64,
    to: u64,
}

/// Runs of equal length, at equal distances in each of two arrays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rectangle {
    /// The offset of the first run in each array.
    pub from: u64,
    /// See `from`.
    pub to: u64,
    /// The length of a run.
    pub run_bytes: u64,
    /// The number of runs.
    pub runs: u64,
    /// The distance between the starts of two runs in each array; at least `run_bytes`, or unused for a single run.
    pub from_stride: u64,
    /// See `from_stride`.
    pub to_stride: u64,
}

/// Two boxes whose common elements, of fewer than 8 bits each, do not begin and end at whole bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotWholeBytes;

impl Overlap {
    /// The common bytes of two boxes of a tensor of this dtype; `None` if there are none.
    ///
    /// # Errors
    /// [`NotWholeBytes`]: never for elements of whole bytes.
    pub fn new(dtype: Dtype, from: &Bounds, to: &Bounds) -> Result<Option<Self>, NotWholeBytes> {
        let common = from.common(to);
        match common.is_empty() {
            true => Ok(None),
            false => Bits::new(dtype, &common, from, to).into_bytes().map(Some),
        }
    }

    /// The number of common bytes.
    pub fn bytes(&self) -> u64 {
        self.run_bytes * self.levels.iter().map(|level| level.count).product::<u64>()
    }

    /// If all common bytes are one run: its range in `from`.
    pub fn as_run(&self) -> Option<Range<u64>> {
        self.levels.is_empty().then(|| self.from..self.from + self.run_bytes)
    }

    /// Whether a range of `from` has a common byte.
    pub fn meets(&self, range: &Range<u64>) -> bool {
        self.before(range.start) < self.before(range.end)
    }

    /// Calls `each` with the rectangles that make up the common bytes in a range of `from`, in order. A range within a
    /// matrix has at most three.
    pub fn rectangles(&self, range: Range<u64>, mut each: impl FnMut(Rectangle)) {
        let (mut at, end) = (self.before(range.start), self.before(range.end));
        while at < end {
            let rectangle = self.rectangle(at, end);
            at += rectangle.run_bytes * rectangle.runs;
            each(rectangle);
        }
    }

    /// The number of common bytes before an offset in `from`.
    fn before(&self, offset: u64) -> u64 {
        let Some(mut offset) = offset.checked_sub(self.from) else { return 0 };
        let (mut before, mut each_bytes) = (0, self.bytes());
        for level in &self.levels {
            let index = offset / level.from;
            if index >= level.count {
                return before + each_bytes;
            }
            each_bytes /= level.count;
            before += index * each_bytes;
            offset -= index * level.from;
        }
        before + offset.min(self.run_bytes)
    }

    /// The largest rectangle that begins with common byte `at` and ends before `end`.
    fn rectangle(&self, at: u64, end: u64) -> Rectangle {
        let (run, offset) = (at / self.run_bytes, at % self.run_bytes);
        let (from, to, following) = self.place(run);
        let whole_runs = (end - at) / self.run_bytes;
        let (run_bytes, runs) = match offset == 0 && whole_runs > 0 {
            true => (self.run_bytes, whole_runs.min(following)),
            false => ((self.run_bytes - offset).min(end - at), 1),
        };
        let (from_stride, to_stride) = self
            .levels
            .last()
            .map_or((run_bytes, run_bytes), |level| (level.from, level.to));
        Rectangle { from: from + offset, to: to + offset, run_bytes, runs, from_stride, to_stride }
    }

    /// The places of a run in both arrays, and the number of runs from it to the end of the innermost level.
    fn place(&self, mut run: u64) -> (u64, u64, u64) {
        let following = self.levels.last().map_or(1, |level| level.count - run % level.count);
        let (mut from, mut to) = (self.from, self.to);
        for level in self.levels.iter().rev() {
            let index = run % level.count;
            (from, to, run) = (from + index * level.from, to + index * level.to, run / level.count);
        }
        (from, to, following)
    }
}

/// An overlap in bits.
struct Bits {
    overlap: Overlap,
    /// Whether the last run ends with both arrays, whose last byte is padded.
    is_end: bool,
}

impl Bits {
    fn new(dtype: Dtype, common: &Bounds, from: &Bounds, to: &Bounds) -> Self {
        let bits = u64::from(dtype.bits());
        // The sizes of one index of the dimension in hand, in both arrays.
        let (mut from_bits, mut to_bits) = (bits, bits);
        let mut overlap = Overlap { run_bytes: bits, levels: vec![], from: 0, to: 0 };
        let dimensions = common.ranges().iter().zip(from.ranges().iter().zip(to.ranges()));
        for (common, (in_from, in_to)) in dimensions.rev() {
            overlap.from += (common.start - in_from.start) * from_bits;
            overlap.to += (common.start - in_to.start) * to_bits;
            overlap.repeat(Level { count: common.end - common.start, from: from_bits, to: to_bits });
            from_bits *= in_from.end - in_from.start;
            to_bits *= in_to.end - in_to.start;
        }
        overlap.levels.reverse();
        let is_end = overlap.levels.is_empty()
            && overlap.from + overlap.run_bytes == from_bits
            && overlap.to + overlap.run_bytes == to_bits;
        Self { overlap, is_end }
    }

    fn into_bytes(self) -> Result<Overlap, NotWholeBytes> {
        let Self { mut overlap, is_end } = self;
        let mut is_whole = is_end || overlap.run_bytes.is_multiple_of(8);
        overlap.run_bytes = overlap.run_bytes.div_ceil(8);
        let strides = overlap.levels.iter_mut().flat_map(|level| [&mut level.from, &mut level.to]);
        for bits in strides.chain([&mut overlap.from, &mut overlap.to]) {
            is_whole &= bits.is_multiple_of(8);
            *bits /= 8;
        }
        is_whole.then_some(overlap).ok_or(NotWholeBytes)
    }
}

impl Overlap {
    /// Repeats all of it, as a new outermost level while levels are in the order from the innermost. What lies together
    /// is joined.
    fn repeat(&mut self, level: Level) {
        let Level { count, from, to } = level;
        let inner = self.levels.last_mut();
        match inner {
            _ if count == 1 => {}
            None if (from, to) == (self.run_bytes, self.run_bytes) => self.run_bytes *= count,
            Some(inner) if (from, to) == (inner.from * inner.count, inner.to * inner.count) => {
                inner.count *= count;
            }
            _ => self.levels.push(level),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{any_bounds, any_shape};
    use super::*;
    use proptest::prelude::*;
    use std::iter::once;

    /// The bit offset of each element of `of` in its dense array, by index.
    fn offsets(of: &Bounds, bits: u64) -> Vec<(Vec<u64>, u64)> {
        let mut indices = vec![vec![]];
        for range in of.ranges() {
            let extend = |index: Vec<u64>| range.clone().map(move |at| [&index[..], &[at]].concat());
            indices = indices.into_iter().flat_map(extend).collect();
        }
        (0..).zip(indices).map(|(number, index)| (index, number * bits)).collect()
    }

    /// The pairs of bit offsets of the common elements.
    fn common_bits(from: &Bounds, to: &Bounds, bits: u64) -> Vec<(u64, u64)> {
        let to: std::collections::HashMap<_, _> = offsets(to, bits).into_iter().collect();
        let pairs = offsets(from, bits).into_iter();
        pairs.filter_map(|(index, from)| Some((from, *to.get(&index)?))).collect()
    }

    fn any_pair() -> impl Strategy<Value = (Bounds, Bounds)> {
        any_shape().prop_flat_map(|shape| (any_bounds(&shape), any_bounds(&shape)))
    }

    fn bytes_of(overlap: &Overlap, range: Range<u64>) -> Vec<(u64, u64)> {
        let mut bytes = vec![];
        overlap.rectangles(range, |r| {
            for run in 0..r.runs {
                let (from, to) = (r.from + run * r.from_stride, r.to + run * r.to_stride);
                bytes.extend((0..r.run_bytes).map(|at| (from + at, to + at)));
            }
        });
        bytes
    }

    #[test]
    fn columns_of_a_matrix_are_one_rectangle() {
        let (whole, columns) = (Bounds::new([0..100, 0..64]), Bounds::new([0..100, 16..24]));
        let overlap = Overlap::new(Dtype::Bf16, &whole, &columns).unwrap().unwrap();
        let mut found = vec![];
        overlap.rectangles(0..12_800, |rectangle| found.push(rectangle));
        let expected =
            Rectangle { from: 32, to: 0, run_bytes: 16, runs: 100, from_stride: 128, to_stride: 16 };
        assert_eq!(found, [expected]);
        assert!(overlap.as_run().is_none() && !overlap.meets(&(48..160)) && overlap.meets(&(47..48)));
    }

    #[test]
    fn rows_are_one_run() {
        let (whole, rows) = (Bounds::new([0..8, 0..3, 0..5]), Bounds::new([2..4, 0..3, 0..5]));
        let overlap = Overlap::new(Dtype::F32, &whole, &rows).unwrap().unwrap();
        assert_eq!(overlap.as_run(), Some(120..240));
    }

    #[test]
    fn half_bytes_are_refused() {
        let overlap = |from: Range<u64>| {
            Overlap::new(Dtype::U4, &Bounds::new([0..3, 0..5]), &Bounds::new([0..3, from]))
        };
        assert_eq!(overlap(0..2), Err(NotWholeBytes), "a row has two bytes and a half");
        assert_eq!(overlap(0..5).unwrap().unwrap().as_run(), Some(0..8), "the last byte is padded");
        let halves = Overlap::new(Dtype::U4, &Bounds::new(once(0..6)), &Bounds::new(once(0..3)));
        assert_eq!(halves, Err(NotWholeBytes));
    }

    proptest! {
        /// For any two boxes and dtype: the common bytes are those of the common elements, in order, in any range.
        #[test]
        fn runs_are_the_common_elements(
            (from, to) in any_pair(),
            dtype in prop::sample::select(vec![Dtype::U4, Dtype::U8, Dtype::Bf16, Dtype::F64]),
            ends in (0u64..4000, 0u64..4000),
        ) {
            let bits = u64::from(dtype.bits());
            let pairs = common_bits(&from, &to, bits);
            let Ok(overlap) = Overlap::new(dtype, &from, &to) else {
                prop_assert!(bits < 8);
                return Ok(());
            };
            let Some(overlap) = overlap else {
                prop_assert!(pairs.is_empty());
                return Ok(());
            };
            let mut bytes: Vec<_> = pairs.iter().flat_map(|(from, to)| {
                (0..bits.div_ceil(8)).map(move |byte| (from / 8 + byte, to / 8 + byte))
            }).collect();
            bytes.dedup();
            prop_assert_eq!(overlap.bytes(), bytes.len() as u64);
            prop_assert_eq!(&bytes_of(&overlap, 0..u64::MAX), &bytes);
            let range = ends.0.min(ends.1)..ends.0.max(ends.1);
            bytes.retain(|(from, _)| range.contains(from));
            prop_assert_eq!(overlap.meets(&range), !bytes.is_empty());
            prop_assert_eq!(bytes_of(&overlap, range), bytes);
        }
    }
}
