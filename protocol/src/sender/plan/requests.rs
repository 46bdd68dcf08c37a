//! [`Requests`]: the chunks of one version that its receiver has requested and that were not begun since.

use super::ChunkRequest;
use crate::{Credit, LaneId, PARTIAL_RANGES_MAX, ProtocolViolation, RangeSet};
use std::collections::BTreeMap;

/// The most chunks that a receiver may have requested and that were not begun.
pub(super) const REQUESTED_MAX: u32 = Credit::MAX;

/// The requests of one receiver. A chunk that was begun is queued again only after its lane was retired, or if the
/// receiver has discarded it. So requests that repeat each other cause no further sends.
#[derive(Debug, Default)]
pub(super) struct Requests {
    /// The chunks to begin.
    queued: RangeSet,
    /// Chunks that the receiver has discarded: they are sent without a base.
    discarded: RangeSet,
    /// The begun chunks, by the lane on which they were begun last. Those of retired lanes are dropped at a request.
    begun: BTreeMap<LaneId, RangeSet>,
}

impl Requests {
    /// Handles a request: queues `selected` chunks, except those that were begun on a lane that lives, unless they are
    /// requested again: they will arrive. Returns whether any was queued.
    ///
    /// # Errors
    /// [`ProtocolViolation::TooManyRequested`] when too many chunks would be queued, or in too many ranges.
    pub(super) fn handle_request(
        &mut self,
        ChunkRequest { chunks, again, .. }: &ChunkRequest,
        selected: &RangeSet,
        is_live: impl Fn(LaneId) -> bool,
    ) -> Result<bool, ProtocolViolation> {
        self.begun.retain(|lane, _| is_live(*lane));
        if *again {
            self.begun.values_mut().for_each(|begun| *begun = begun.difference(chunks));
            self.discarded = self.discarded.union(&selected.intersection(chunks));
        }
        let mut queued = selected.intersection(chunks).difference(&self.queued);
        for begun in self.begun.values() {
            queued = queued.difference(&begun.intersection(&queued));
        }
        self.queued = self.queued.union(&queued);
        if self.queued.len() > REQUESTED_MAX || self.queued.ranges().len() > PARTIAL_RANGES_MAX {
            return Err(ProtocolViolation::TooManyRequested);
        }
        Ok(!queued.is_empty())
    }

    /// Drops the queued chunks that are not `held`: the receiver learns otherwise that they cannot be sent.
    pub(super) fn retain_held(&mut self, held: &RangeSet) {
        let first = self.queued.first_from(0);
        if first.is_some_and(|first| !held.contains(first)) {
            self.queued = held.intersection(&self.queued);
        }
    }

    /// Whether no chunk is queued.
    pub(super) fn is_empty(&self) -> bool {
        self.queued.is_empty()
    }

    /// Takes the first queued chunk, of those that are `held` if not all are.
    pub(super) fn take(&mut self, held: Option<&RangeSet>) -> Option<u32> {
        let chunk = match held {
            None => self.queued.first_from(0)?,
            Some(held) => self.queued.first_common(held)?,
        };
        self.queued.remove(chunk);
        Some(chunk)
    }

    /// Records that a chunk, queued or not, is begun on a lane. Returns whether the receiver has discarded it.
    pub(super) fn handle_begun(&mut self, chunk: u32, lane: LaneId) -> bool {
        self.queued.remove(chunk);
        self.begun.entry(lane).or_default().insert(chunk);
        self.discarded.contains(chunk)
    }
}
