//! [`SendPlan`]: the sends of one version to one client (PROTOCOL.md §6.3, §6.8).

mod pushing;
mod requests;

#[cfg(test)]
mod tests;

use super::{ChunkRequest, Here, Pick};
use crate::{ChunkIndex, Credit, LaneId, ProtocolViolation, RangeSet};
use pushing::Pushing;
use requests::Requests;
use std::ops::Range;

/// The number of hashes that are sent in one message. Each costs a read of its chunk, so that a longer message would
/// keep the receiver waiting.
const HASHES_PER_MESSAGE: u32 = 64;

/// A send of the version under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SendAction {
    /// The manifest, before all chunks.
    Manifest,
    /// This chunk, on this lane.
    Chunk(ChunkIndex, LaneId),
    /// This chunk, on this lane, without a base, because the receiver has discarded what it received of it.
    Again(ChunkIndex, LaneId),
    /// The hashes of selected chunks, from the place `first` among them to before the place `end`.
    Hashes {
        /// The first place.
        first: u32,
        /// The place after the last.
        end: u32,
    },
    /// `Complete`: every chunk that the receiver lacks was begun, and passed to the transport or lost with its lane.
    Complete,
}

/// The send state of one version. It decides the order of chunks, which chunks are sent again, and when the version is
/// complete.
///
/// At first, chunks are pushed in the order of their index, one for each credit. The first request of the receiver ends
/// that: from then on only what it requests is sent, without credit. A chunk is begun once, and again only if it is
/// requested after its lane was retired. So requests that repeat each other cause no further sends.
///
/// Of a shared version the topic picks the chunks that are pushed, and requests do not end the pushing.
#[derive(Debug)]
pub(super) struct SendPlan {
    needs_manifest: bool,
    /// Whether the version is shared among its receivers.
    is_shared: bool,
    /// Whether the wanted chunks are known.
    is_selected: bool,
    /// Whether the receiver maps the bytes, so that no chunk is pushed.
    is_lent: bool,
    /// Whether the receiver requested chunks.
    is_requested: bool,
    /// The wanted chunks that were not begun when the pushing ended, nor since.
    unsent: RangeSet,
    pushing: Pushing,
    requests: Requests,
    /// The places among the selected chunks whose hashes were not sent and are due.
    unsent_hashes: Range<u32>,
    /// Whether hashes are being sent.
    is_hashing: bool,
    /// The number of chunks that are being sent.
    in_flight: u32,
    /// Whether [`SendAction::Complete`] was returned.
    complete: bool,
    given_up: bool,
}

impl SendPlan {
    /// A plan for a version, shared or not, whose wanted chunks are not known yet.
    pub(super) fn new(needs_manifest: bool, is_shared: bool) -> Self {
        Self {
            needs_manifest,
            is_shared,
            is_selected: false,
            is_lent: false,
            is_requested: false,
            unsent: RangeSet::new(),
            pushing: Pushing::default(),
            requests: Requests::default(),
            unsent_hashes: 0..0,
            is_hashing: false,
            in_flight: 0,
            complete: false,
            given_up: false,
        }
    }

    /// Handles the chunks that the receiver wants: it selected them, and does not hold them.
    pub(super) fn handle_selected(&mut self, wanted: RangeSet) {
        self.pushing = Pushing::new(wanted);
        self.is_selected = true;
    }

    /// Whether the version is shared among its receivers.
    pub(super) fn is_shared(&self) -> bool {
        self.is_shared
    }

    /// Handles that the receiver was told to map the bytes.
    pub(super) fn handle_lent(&mut self) {
        self.is_lent = true;
    }

    /// Handles that the receiver declined the memory: chunks are pushed. Returns whether that is progress.
    ///
    /// # Errors
    /// [`ProtocolViolation::OutOfTurn`] when nothing was lent, or was declined before.
    pub(super) fn handle_declined(&mut self) -> Result<bool, ProtocolViolation> {
        match std::mem::take(&mut self.is_lent) {
            true => Ok(!self.given_up),
            false => Err(ProtocolViolation::OutOfTurn { found: "Decline", expected: "a version in memory" }),
        }
    }

    /// The next send; `None` if none is possible before the next event. `lane` is the lane for the next chunk; without
    /// one, no chunk is begun. Spends `credit` for a chunk that is pushed: of a shared version the one that `pick`
    /// picks of those that were not begun. Only chunks that are `here` are begun.
    pub(super) fn poll(
        &mut self,
        credit: &mut Credit,
        lane: Option<LaneId>,
        here: &Here,
        pick: impl FnOnce(&RangeSet) -> Pick,
    ) -> Option<SendAction> {
        if self.given_up {
            return None;
        }
        if std::mem::take(&mut self.needs_manifest) {
            return Some(SendAction::Manifest);
        }
        if !self.is_selected || self.is_lent {
            return None;
        }
        if !self.is_hashing && !self.unsent_hashes.is_empty() && !here.is_growing() {
            self.is_hashing = true;
            let first = self.unsent_hashes.start;
            let end = self.unsent_hashes.end.min(first + HASHES_PER_MESSAGE);
            return Some(SendAction::Hashes { first, end });
        }
        if let Here::Only(held) = here {
            self.requests.retain_held(held);
        }
        if !self.requests.is_empty() || !self.pushing.is_empty() {
            let lane = lane?;
            let held = here.chunks();
            let chunk = self.next_requested(held).or_else(|| self.next_pushed(credit, held, pick))?;
            self.in_flight += 1;
            return Some(match self.requests.handle_begun(chunk.0, lane) {
                true => SendAction::Again(chunk, lane),
                false => SendAction::Chunk(chunk, lane),
            });
        }
        let is_complete =
            self.unsent.is_empty() && self.in_flight == 0 && !self.complete && !here.is_growing();
        self.complete |= is_complete;
        is_complete.then_some(SendAction::Complete)
    }

    fn next_requested(&mut self, held: Option<&RangeSet>) -> Option<ChunkIndex> {
        let chunk = self.requests.take(held)?;
        self.unsent.remove(chunk);
        self.pushing.take_chunk(ChunkIndex(chunk));
        Some(ChunkIndex(chunk))
    }

    /// The next chunk to be pushed, if there is credit for it.
    fn next_pushed(
        &mut self,
        credit: &mut Credit,
        held: Option<&RangeSet>,
        pick: impl FnOnce(&RangeSet) -> Pick,
    ) -> Option<ChunkIndex> {
        if credit.available() == 0 || self.pushing.is_empty() {
            return None;
        }
        let picked = match (self.is_shared, held) {
            (false, _) => Pick::InOrder,
            (true, None) => pick(self.pushing.left()),
            (true, Some(held)) => match self.pushing.left().intersection(held) {
                none if none.is_empty() => Pick::Wait,
                wanted => pick(&wanted),
            },
        };
        let chunk = match picked {
            Pick::InOrder => self.pushing.take_first(held),
            Pick::Chunk(chunk) => self.pushing.take_chunk(chunk).then_some(chunk),
            Pick::Wait => None,
        }?;
        credit.spend();
        Some(chunk)
    }

    /// Handles the end of a send. A chunk was passed to the transport completely, or was lost with its lane and will be
    /// requested by the receiver.
    pub(super) fn handle_sent(&mut self, sent: SendAction) {
        match sent {
            SendAction::Chunk(..) | SendAction::Again(..) => self.in_flight -= 1,
            SendAction::Hashes { end, .. } => {
                self.unsent_hashes.start = end;
                self.is_hashing = false;
            }
            SendAction::Manifest | SendAction::Complete => {}
        }
    }

    /// Handles the receiver's request for the hashes of the `selected` chunks, this many. They are sent once.
    pub(super) fn handle_hashes_requested(&mut self, selected: u32) {
        if self.unsent_hashes.end == 0 {
            self.unsent_hashes.end = selected;
        }
    }

    /// Handles that the receiver requests chunks, which ends the pushing, unless the version is shared. Returns true if
    /// the pushing ends now.
    pub(super) fn end_pushing(&mut self) -> bool {
        self.is_lent = false;
        let was_requested = std::mem::replace(&mut self.is_requested, true);
        if was_requested || self.is_shared {
            return false;
        }
        self.unsent = self.pushing.take();
        true
    }

    /// Handles the receiver's request for `selected` chunks: those are queued that will not arrive otherwise. Returns
    /// true if a chunk was queued that was not requested again, and the plan was not given up.
    ///
    /// # Errors
    /// [`ProtocolViolation::TooManyRequested`] when too many chunks would be queued, or in too many ranges.
    pub(super) fn handle_request(
        &mut self,
        request: &ChunkRequest,
        selected: &RangeSet,
        is_live: impl Fn(LaneId) -> bool,
    ) -> Result<bool, ProtocolViolation> {
        let is_queued = self.requests.handle_request(request, selected, is_live)?;
        Ok(is_queued && !request.again && !self.given_up)
    }

    /// Ends the plan: [`poll`](Self::poll) returns no more sends. The driver cancels chunks in flight.
    pub(super) fn give_up(&mut self) {
        self.given_up = true;
    }

    /// Whether [`give_up`](Self::give_up) was called.
    pub(super) fn is_given_up(&self) -> bool {
        self.given_up
    }

    /// Whether the receiver may commit: [`SendAction::Complete`] was returned, the bytes were lent, or it may have received
    /// chunks from another source: it requests chunks, or the version is shared.
    pub(super) fn may_be_committed(&self) -> bool {
        self.complete || self.is_requested || self.is_lent || self.is_shared
    }
}
