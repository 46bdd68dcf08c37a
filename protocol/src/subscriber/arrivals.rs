//! The chunk streams of one subscription that are open, what credit they cost, and which lanes took some with them.

use crate::{ChunkHeader, ChunkIndex, LaneId, Misbehaved};
use std::collections::{BTreeSet, HashMap};

/// Names a chunk's stream, which the caller holds. Never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamToken(pub u64);

/// A stream whose chunk cannot be placed yet, because its version or its manifest has not come.
#[derive(Debug)]
pub(super) struct EarlyStream {
    pub(super) stream: StreamToken,
    pub(super) lane: LaneId,
    pub(super) header: ChunkHeader,
}

/// The open chunk streams of one subscription. A chunk costs one credit from its header on; the credit is free again when
/// the chunk is verified, and when it is lost.
#[derive(Debug)]
pub(super) struct Arrivals {
    /// Credit bounds how many there are.
    early: Vec<EarlyStream>,
    /// The streams that are being received into their places.
    receiving: HashMap<StreamToken, (ChunkIndex, LaneId)>,
    /// How many more chunks the server may begin.
    credit: u32,
    /// Retired lanes for which no `Fetch` was sent since.
    retired: BTreeSet<LaneId>,
}

impl Arrivals {
    pub(super) fn new(credit: u32) -> Self {
        Self { early: vec![], receiving: HashMap::new(), credit, retired: BTreeSet::new() }
    }

    /// How many more chunks the server may begin.
    pub(super) fn credit(&self) -> u32 {
        self.credit
    }

    pub(super) fn grant(&mut self, chunks: u32) {
        self.credit += chunks;
    }

    /// Spends the credit of one chunk.
    ///
    /// # Errors
    /// [`Misbehaved::OverCredit`] when there is none.
    pub(super) fn spend(&mut self) -> Result<(), Misbehaved> {
        self.credit = self.credit.checked_sub(1).ok_or(Misbehaved::OverCredit)?;
        Ok(())
    }

    /// Keeps a stream until its chunk can be placed. It has cost its credit.
    pub(super) fn hold(&mut self, early: EarlyStream) {
        self.early.push(early);
    }

    pub(super) fn take_early(&mut self) -> Vec<EarlyStream> {
        std::mem::take(&mut self.early)
    }

    /// Takes the stream of `chunk`, which is received from now on. It has cost its credit.
    pub(super) fn begin(&mut self, stream: StreamToken, chunk: ChunkIndex, lane: LaneId) {
        self.receiving.insert(stream, (chunk, lane));
    }

    /// Takes the end of a stream, whose credit is free again; gives its chunk. `None` for one that is not being received
    /// any more.
    pub(super) fn end(&mut self, stream: StreamToken) -> Option<ChunkIndex> {
        let (chunk, _) = self.receiving.remove(&stream)?;
        self.credit += 1;
        Some(chunk)
    }

    /// Whether the chunk of `stream` is being received.
    pub(super) fn is_receiving(&self, stream: StreamToken) -> bool {
        self.receiving.contains_key(&stream)
    }

    /// Takes the retirement of a lane. Gives the streams of it that wait, which nobody will read.
    pub(super) fn retire(&mut self, lane: LaneId) -> Vec<StreamToken> {
        self.retired.insert(lane);
        let lost = self.early.extract_if(.., |early| early.lane == lane);
        let lost: Vec<_> = lost.map(|early| early.stream).collect();
        self.credit += lost.len() as u32;
        lost
    }

    /// Whether a `Fetch` is due: lanes were retired, and nothing that came over them is still being received.
    pub(super) fn is_fetch_due(&self) -> bool {
        !self.retired.is_empty() && !self.receiving.values().any(|(_, lane)| self.retired.contains(lane))
    }

    /// Takes the news that what the retired lanes took with them was asked for, or is of no interest any more.
    pub(super) fn forget_retired(&mut self) {
        self.retired.clear();
    }

    /// Forgets every stream; gives those that wait. The server has `credit` from now on.
    pub(super) fn reset(&mut self, credit: u32) -> Vec<StreamToken> {
        self.end_version();
        self.credit = credit;
        self.take_early().into_iter().map(|early| early.stream).collect()
    }

    /// Forgets the streams of the version under way.
    pub(super) fn end_version(&mut self) {
        self.receiving.clear();
        self.retired.clear();
    }
}
