//! [`Requests`]: the chunks that the receiver requests of a version that is not pushed any more (PROTOCOL.md §6.8).

use super::Assembly;
use crate::{ChunkIndex, PARTIAL_RANGES_MAX, RangeSet};

/// The requests of the current version. A version begins pushed: the sender begins chunks in order while there is
/// credit. After a loss, the receiver requests what it lacks, so many chunks at a time that those requested and those
/// arriving stay within its allowance.
#[derive(Debug, Default)]
pub(super) struct Requests {
    /// Whether a lane was retired since the version began: until then, a stream that ends early belongs to a version
    /// that the server gave up.
    is_lane_retired: bool,
    /// Whether chunks may have been lost since `remaining` was determined.
    is_loss_possible: bool,
    /// Whether a request was sent, which ended the pushing.
    is_pushing_ended: bool,
    /// The chunks that were requested and whose headers have not arrived.
    outstanding: RangeSet,
    /// The chunks that were missing at the last loss and were not requested since.
    remaining: RangeSet,
}

impl Requests {
    /// Records that a lane was retired, so that chunks of the version may have been lost.
    pub(super) fn handle_retired(&mut self) {
        (self.is_lane_retired, self.is_loss_possible) = (true, true);
    }

    /// Records that a stream ended early.
    pub(super) fn handle_stream_lost(&mut self) {
        self.is_loss_possible |= self.is_lane_retired;
    }

    /// Whether a request was sent, so that the version is not pushed any more.
    pub(super) fn is_pushing_ended(&self) -> bool {
        self.is_pushing_ended
    }

    /// Records that the header of a chunk arrived; returns whether the chunk was requested, so that it costs no credit.
    pub(super) fn handle_header(&mut self, chunk: ChunkIndex) -> bool {
        self.outstanding.remove(chunk.0)
    }

    /// The chunks to request now; `None` if there are none. Of `assembly`, `arriving` chunks are being received; those
    /// and the requested ones are at most `allowance`. Costs a pass over all chunks after a loss.
    pub(super) fn next(&mut self, assembly: &Assembly, arriving: usize, allowance: u32) -> Option<RangeSet> {
        if std::mem::take(&mut self.is_loss_possible) {
            // The sender passes over those that are under way.
            (self.outstanding, self.remaining) = (RangeSet::new(), assembly.missing());
        }
        // At most as many chunks as ranges, so that any of them may be requested.
        let max = (allowance as usize).clamp(1, PARTIAL_RANGES_MAX);
        let mut requested = RangeSet::new();
        while arriving + (self.outstanding.len() as usize) < max {
            let next = self.remaining.iter().next();
            let Some(chunk) = next else { break };
            self.remaining.remove(chunk);
            if assembly.is_missing(ChunkIndex(chunk)) {
                self.outstanding.insert(chunk);
                requested.insert(chunk);
            }
        }
        self.is_pushing_ended |= !requested.is_empty();
        (!requested.is_empty()).then_some(requested)
    }
}
