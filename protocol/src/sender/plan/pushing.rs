//! [`Pushing`]: the chunks of one version that are pushed by credit.

use crate::{ChunkIndex, RangeSet};

/// The chunks to be pushed that were never begun.
#[derive(Debug, Default)]
pub(super) struct Pushing {
    /// Those of them from `next` on; others before it have been begun.
    left: RangeSet,
    next: u32,
}

impl Pushing {
    pub(super) fn new(wanted: RangeSet) -> Self {
        Self { left: wanted, next: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.left.first_from(self.next).is_none()
    }

    /// The chunks.
    pub(super) fn left(&mut self) -> &RangeSet {
        if self.next > 0 {
            self.left = self.left.difference(&RangeSet::from_range(0..self.next));
            self.next = 0;
        }
        &self.left
    }

    /// Takes all chunks.
    pub(super) fn take(&mut self) -> RangeSet {
        self.left();
        std::mem::take(&mut self.left)
    }

    /// Takes the first chunk, of those that are `held` if not all are. Costs O(log n), and a pass over the ranges if
    /// only some are held.
    pub(super) fn take_first(&mut self, held: Option<&RangeSet>) -> Option<ChunkIndex> {
        let chunk = match held {
            None => {
                let chunk = self.left.first_from(self.next)?;
                self.next = chunk + 1;
                chunk
            }
            Some(held) => {
                let chunk = self.left().first_common(held)?;
                self.left.remove(chunk);
                chunk
            }
        };
        Some(ChunkIndex(chunk))
    }

    /// Takes this chunk; returns whether it was there.
    pub(super) fn take_chunk(&mut self, chunk: ChunkIndex) -> bool {
        chunk.0 >= self.next && self.left.remove(chunk.0)
    }
}
