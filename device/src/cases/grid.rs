use std::ops::Range;

use crate::{Rectangle, Spread};

/// A [`Spread`] for tests: rows of a part and of memory, each with one run. With a run shorter than the rows of the part
/// it is a cut by columns, with rows of the memory longer than the run it is one of interleaved pieces.
#[derive(Debug, Clone, Default)]
pub struct Grid {
    /// How many rows there are.
    pub rows: u64,
    /// The length of the run of each row.
    pub run_bytes: u64,
    /// Where the first run begins in the part.
    pub part: u64,
    /// The length of a row in the part.
    pub part_stride: u64,
    /// Where the first run begins in the memory.
    pub memory: u64,
    /// The length of a row in the memory.
    pub memory_stride: u64,
}

impl Grid {
    /// The places in the part and in the memory of each byte that has both.
    pub fn bytes(&self) -> impl Iterator<Item = (u64, u64)> {
        let bytes = (0..self.rows).flat_map(|row| (0..self.run_bytes).map(move |byte| (row, byte)));
        bytes.map(|(row, byte)| {
            (self.part + row * self.part_stride + byte, self.memory + row * self.memory_stride + byte)
        })
    }

    /// The run of a row, in the part.
    fn run(&self, row: u64) -> Range<u64> {
        let start = self.part + row * self.part_stride;
        start..start + self.run_bytes
    }

    /// The bytes of one row's run that lie in `range`.
    fn piece(&self, row: u64, range: &Range<u64>) -> Rectangle {
        let run = self.run(row);
        let common = run.start.max(range.start)..run.end.min(range.end);
        let memory = self.memory + row * self.memory_stride + (common.start - run.start);
        Rectangle::run(common.start, memory, common.end - common.start)
    }

    fn whole(&self, rows: Range<u64>) -> Rectangle {
        let Self { run_bytes, part_stride, memory_stride, .. } = *self;
        Rectangle {
            part: self.part + rows.start * part_stride,
            memory: self.memory + rows.start * memory_stride,
            run_bytes,
            runs: rows.end - rows.start,
            part_stride,
            memory_stride,
        }
    }
}

impl Spread for Grid {
    fn rectangles(&self, range: Range<u64>, each: &mut dyn FnMut(Rectangle)) {
        let is_touched = |row: &u64| self.run(*row).start < range.end && range.start < self.run(*row).end;
        let is_inside = |row: &u64| range.start <= self.run(*row).start && self.run(*row).end <= range.end;
        let touched = (0..self.rows).filter(is_touched);
        let (inside, cut): (Vec<_>, Vec<_>) = touched.partition(is_inside);
        cut.into_iter().for_each(|row| each(self.piece(row, &range)));
        if let (Some(first), Some(last)) = (inside.first(), inside.last()) {
            each(self.whole(*first..last + 1));
        }
    }
}
