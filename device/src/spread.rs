use std::{fmt, ops::Range};

/// How the bytes of a part lie in its memory, when they are not one run: the columns that a reader wants of a tensor, or
/// a block of a tensor that its publisher lays out in blocks.
///
/// Why a function and not a list: a cut by columns may have millions of runs. They are computed for one chunk at a
/// time, and stored nowhere.
pub trait Spread: Send + Sync + fmt::Debug {
    /// Calls `each` for the rectangles that are, together, those bytes of `range` (of the part, from 0) that the memory
    /// holds. Bytes of the part that the memory does not hold are passed over. A range is at most one chunk long.
    ///
    /// A rectangle that leaves the range or the memory is refused with a [`SpreadError`] before its bytes are copied.
    fn rectangles(&self, range: Range<u64>, each: &mut dyn FnMut(Rectangle));
}

/// `runs` runs of `run_bytes` each, at equal distances, in a part and in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rectangle {
    /// Where the first run begins in the part; in a copy between a slot and a device, in the slot.
    pub part: u64,
    /// Where the first run begins in the memory.
    pub memory: u64,
    /// The length of each run.
    pub run_bytes: u64,
    /// How many runs there are.
    pub runs: u64,
    /// The bytes from the start of a run to the start of the next one, in the part. At least `run_bytes`, unless there is
    /// only one run.
    pub part_stride: u64,
    /// Likewise in the memory.
    pub memory_stride: u64,
}

impl Rectangle {
    /// One run of `run_bytes`.
    pub fn run(part: u64, memory: u64, run_bytes: u64) -> Self {
        Self { part, memory, run_bytes, runs: 1, part_stride: run_bytes, memory_stride: run_bytes }
    }

    /// Whether all runs lie in `range` of the part and in memory of `memory_bytes`, and share no byte.
    pub(crate) fn fits(&self, range: &Range<u64>, memory_bytes: u64) -> bool {
        let part_end = self.end(self.part, self.part_stride);
        let memory_end = self.end(self.memory, self.memory_stride);
        range.start <= self.part
            && part_end.is_some_and(|end| end <= range.end)
            && memory_end.is_some_and(|end| end <= memory_bytes)
    }

    /// The same bytes as one run, if each run touches the next one in the part and in the memory.
    pub(crate) fn joined(self) -> Self {
        match [self.part_stride, self.memory_stride] == [self.run_bytes; 2] {
            true => Self::run(self.part, self.memory, self.run_bytes * self.runs),
            false => self,
        }
    }

    /// These of its runs, if the rectangle fits.
    pub(crate) fn rows(self, rows: Range<u64>) -> Self {
        let part = self.part + rows.start * self.part_stride;
        let memory = self.memory + rows.start * self.memory_stride;
        Self { part, memory, runs: rows.end - rows.start, ..self }
    }

    /// The bytes of the part from the first run to the last, if the rectangle fits.
    pub(crate) fn hull(&self) -> Range<u64> {
        let before_last = self.runs.saturating_sub(1) * self.part_stride;
        self.part..self.part + before_last + self.run_bytes
    }

    /// Likewise of the memory.
    pub(crate) fn memory_hull(&self) -> Range<u64> {
        let before_last = self.runs.saturating_sub(1) * self.memory_stride;
        self.memory..self.memory + before_last + self.run_bytes
    }

    /// One past the last byte of the runs, if the first begins at `start`. `None` if that exceeds 64 bits, or runs
    /// overlap.
    fn end(&self, start: u64, stride: u64) -> Option<u64> {
        if self.runs > 1 && stride < self.run_bytes {
            return None;
        }
        let before_last = self.runs.saturating_sub(1).checked_mul(stride)?;
        start.checked_add(before_last)?.checked_add(self.run_bytes)
    }
}

/// A [`Spread`] named bytes that its part or its memory does not have: whoever computed it made an error.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{rectangle:?} is not within the bytes {start}..{end} of a part and its memory of {memory_bytes} bytes. The layout of \
     this tensor was computed wrongly by this program: report it, with the tensor's shape and the box that was asked for."
)]
pub struct SpreadError {
    /// What was named.
    pub rectangle: Rectangle,
    /// The first byte of the part that was asked for.
    pub start: u64,
    /// One past the last one.
    pub end: u64,
    /// The length of the memory.
    pub memory_bytes: u64,
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_rectangle_fits_if_each_byte_of_its_runs_does(
            (part, memory, run_bytes, runs) in (0u64..40, 0u64..40, 0u64..12, 0u64..6),
            (part_stride, memory_stride) in (0u64..20, 0u64..20),
            (start, len, memory_bytes) in (0u64..30, 0u64..90, 0u64..120),
        ) {
            let rectangle = Rectangle { part, memory, run_bytes, runs, part_stride, memory_stride };
            let range = start..start + len;
            let ends = |start, stride| (0..runs.max(1)).map(move |run| (start + run * stride, start + run * stride + run_bytes));
            let inside = |(begin, end): (u64, u64), range: &Range<u64>| range.start <= begin && end <= range.end;
            let apart = runs < 2 || part_stride.min(memory_stride) >= run_bytes;
            let expected = apart
                && ends(part, part_stride).all(|run| inside(run, &range))
                && ends(memory, memory_stride).all(|run| inside(run, &(0..memory_bytes)));
            prop_assert_eq!(rectangle.fits(&range, memory_bytes), expected);
        }
    }

    #[test]
    fn numbers_beyond_64_bits_do_not_fit() {
        let fitting = Rectangle { runs: 2, ..Rectangle::run(0, 0, 8) };
        assert!(fitting.fits(&(0..u64::MAX), u64::MAX));
        for rectangle in [
            Rectangle { part: u64::MAX, ..fitting },
            Rectangle { memory: u64::MAX - 8, ..fitting },
            Rectangle { runs: u64::MAX, ..fitting },
            Rectangle { memory_stride: u64::MAX, ..fitting },
        ] {
            assert!(!rectangle.fits(&(0..u64::MAX), u64::MAX), "{rectangle:?}");
        }
    }
}
