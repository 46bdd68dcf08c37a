use std::{ops::Range, sync::Arc};

use super::Grid;
use crate::{Spread, SpreadParts};

/// A payload's spread parts, as plain values: each with its range, its memory and its grid. Among them are cuts by
/// columns and pieces that share a memory, and their ranges overlap. No two bytes of one part, and no two pieces,
/// share a byte of memory.
#[derive(Debug, Clone, Default)]
pub(crate) struct Places {
    pub(crate) memories: Vec<u64>,
    pub(crate) parts: Vec<(Range<u64>, usize, Grid)>,
}

impl Places {
    /// The parts over memories that `make` makes of their lengths.
    pub(crate) fn over<M>(&self, make: impl FnMut(u64) -> M) -> SpreadParts<M> {
        let memories = self.memories.iter().copied().map(make).collect();
        let part = |(range, memory, grid): &(Range<u64>, usize, Grid)| {
            (range.clone(), *memory, Arc::new(grid.clone()) as Arc<dyn Spread>)
        };
        SpreadParts::new(memories, self.parts.iter().map(part)).expect("each part has its memory")
    }

    /// Calls `each` with the place in the payload, the memory and the place there, of every byte that has both.
    pub(crate) fn bytes(&self, mut each: impl FnMut(usize, usize, usize)) {
        for (range, memory, grid) in &self.parts {
            grid.bytes()
                .for_each(|(part, at)| each((range.start + part) as usize, *memory, at as usize));
        }
    }

    /// Adds a tensor of which the memory holds some columns: those after `before` bytes of each row.
    pub(crate) fn add_columns(&mut self, start: u64, rows: u64, [before, run_bytes, after]: [u64; 3]) {
        let part_stride = before + run_bytes + after;
        let grid = Grid { rows, run_bytes, part: before, part_stride, memory: 0, memory_stride: run_bytes };
        self.parts.push((start..start + rows * part_stride, self.memories.len(), grid));
        self.memories.push(rows * run_bytes);
    }

    /// Adds a tensor in three pieces, each some columns of the memory.
    pub(crate) fn add_pieces(&mut self, start: u64, rows: u64, widths: [u64; 3]) {
        let (mut start, mut memory, memory_stride) = (start, 0, widths.iter().sum());
        for run_bytes in widths {
            let end = start + rows * run_bytes;
            let grid = Grid { rows, run_bytes, part: 0, part_stride: run_bytes, memory, memory_stride };
            self.parts.push((start..end, self.memories.len(), grid));
            (start, memory) = (end, memory + run_bytes);
        }
        self.memories.push(rows * memory_stride);
    }
}
