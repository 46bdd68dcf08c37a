//! The open chunk streams of one subscription, their credit, and the retired lanes.

use crate::{ChunkHeader, ChunkIndex, LaneId, ProtocolViolation};
use std::collections::{BTreeSet, HashMap};

/// The number of a chunk's stream. The caller owns the stream and gives each stream another number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamToken(pub u64);

/// A stream whose chunk arrived before its announcement, its manifest or the version's memory.
#[derive(Debug)]
pub(super) struct EarlyStream {
    pub(super) stream: StreamToken,
    pub(super) lane: LaneId,
    pub(super) header: ChunkHeader,
}

/// The open chunk streams of one subscription. A chunk occupies one credit from its header until it is verified or
/// lost.
#[derive(Debug)]
pub(super) struct Arrivals {
    /// The streams that wait for their announcement, their manifest or memory; credit limits their number.
    early: Vec<EarlyStream>,
    /// The streams whose chunks are being received.
    receiving: HashMap<StreamToken, (ChunkIndex, LaneId)>,
    /// The number of further chunks that the server may begin.
    credit: u32,
    /// The lanes that were retired since the version began, or since its last `Fetch`.
    retired: BTreeSet<LaneId>,
}

impl Arrivals {
    pub(super) fn new(credit: u32) -> Self {
        Self { early: vec![], receiving: HashMap::new(), credit, retired: BTreeSet::new() }
    }

    /// The number of further chunks that the server may begin.
    pub(super) fn credit(&self) -> u32 {
        self.credit
    }

    pub(super) fn grant(&mut self, chunks: u32) {
        self.credit += chunks;
    }

    /// Spends the credit of one chunk.
    ///
    /// # Errors
    /// [`ProtocolViolation::CreditExceeded`] when no credit is available.
    pub(super) fn spend(&mut self) -> Result<(), ProtocolViolation> {
        self.credit = self.credit.checked_sub(1).ok_or(ProtocolViolation::CreditExceeded)?;
        Ok(())
    }

    /// Adds a stream that waits. Its credit is already spent.
    pub(super) fn push_early(&mut self, early: EarlyStream) {
        self.early.push(early);
    }

    pub(super) fn take_early(&mut self) -> Vec<EarlyStream> {
        std::mem::take(&mut self.early)
    }

    /// Records that the receipt of `chunk` begins. Its credit is already spent.
    pub(super) fn begin(&mut self, stream: StreamToken, chunk: ChunkIndex, lane: LaneId) {
        self.receiving.insert(stream, (chunk, lane));
    }

    /// Ends a stream, frees its credit and returns its chunk; `None` if no chunk of this stream is being received.
    pub(super) fn end(&mut self, stream: StreamToken) -> Option<ChunkIndex> {
        let (chunk, _) = self.receiving.remove(&stream)?;
        self.credit += 1;
        Some(chunk)
    }

    /// Whether the chunk of `stream` is being received.
    pub(super) fn is_receiving(&self, stream: StreamToken) -> bool {
        self.receiving.contains_key(&stream)
    }

    /// Retires a lane and frees the credit of its early streams. Returns these streams, which the caller discards.
    pub(super) fn retire(&mut self, lane: LaneId) -> Vec<StreamToken> {
        self.retired.insert(lane);
        let lost = self.early.extract_if(.., |early| early.lane == lane);
        let lost: Vec<_> = lost.map(|early| early.stream).collect();
        self.credit += lost.len() as u32;
        lost
    }

    /// Whether a `Fetch` is due: lanes were retired, and no chunk from them is still being received.
    pub(super) fn is_fetch_due(&self) -> bool {
        !self.retired.is_empty() && !self.receiving.values().any(|(_, lane)| self.retired.contains(lane))
    }

    /// Clears the retired lanes, whose chunks were fetched or are no longer wanted.
    pub(super) fn forget_retired_lanes(&mut self) {
        self.retired.clear();
    }

    /// Clears every stream, resets the credit to `credit`, and returns the early streams.
    pub(super) fn reset(&mut self, credit: u32) -> Vec<StreamToken> {
        self.end_version();
        self.credit = credit;
        self.take_early().into_iter().map(|early| early.stream).collect()
    }

    /// Forgets the chunks being received and the retired lanes, since the version has ended. Keeps the early streams.
    pub(super) fn end_version(&mut self) {
        self.receiving.clear();
        self.retired.clear();
    }
}
