//! The open chunk streams of one subscription, and their credit.

use crate::{ChunkHeader, ChunkIndex, ProtocolViolation, SubscriptionId};
use std::collections::{HashMap, hash_map::Entry};

/// The number of a chunk's stream. The caller owns the stream and gives each stream another number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamToken(pub u64);

/// A stream that is not read yet: its chunk arrived before its announcement, its manifest or the version's memory, or
/// another stream of the chunk is being received.
#[derive(Debug)]
pub(super) struct WaitingStream {
    pub(super) stream: StreamToken,
    pub(super) header: ChunkHeader,
}

/// The open chunk streams of one subscription. A pushed chunk occupies one credit from its header until it is verified
/// or lost.
#[derive(Debug)]
pub(super) struct Arrivals {
    /// The streams that wait for their announcement, their manifest or memory; credit limits their number.
    early: Vec<WaitingStream>,
    /// The streams whose chunks are being received, with their sources.
    receiving: HashMap<StreamToken, (ChunkIndex, SubscriptionId)>,
    /// Second streams of chunks that are being received: the first may be lost with its lane.
    spare: HashMap<ChunkIndex, WaitingStream>,
    /// The number of further chunks that the server may push.
    credit: u32,
}

impl Arrivals {
    pub(super) fn new(credit: u32) -> Self {
        Self { early: vec![], receiving: HashMap::new(), spare: HashMap::new(), credit }
    }

    /// The number of further chunks that the server may push.
    pub(super) fn credit(&self) -> u32 {
        self.credit
    }

    /// Takes all credit back: the origin was lost, and pushes nothing more of this version.
    pub(super) fn void_credit(&mut self) {
        self.credit = 0;
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

    /// Adds a stream that waits.
    pub(super) fn push_early(&mut self, early: WaitingStream) {
        self.early.push(early);
    }

    pub(super) fn take_early(&mut self) -> Vec<WaitingStream> {
        std::mem::take(&mut self.early)
    }

    /// Records that the receipt of the chunk of `header` begins.
    pub(super) fn begin(&mut self, stream: StreamToken, header: &ChunkHeader) {
        self.receiving.insert(stream, (header.chunk, header.subscription));
    }

    /// Ends a stream and returns its chunk and source; `None` if no chunk of this stream is being received. Of a version
    /// that is pushed, its credit is free again.
    pub(super) fn end(
        &mut self,
        stream: StreamToken,
        is_pushed: bool,
    ) -> Option<(ChunkIndex, SubscriptionId)> {
        let ended = self.receiving.remove(&stream)?;
        self.credit += u32::from(is_pushed);
        Some(ended)
    }

    /// Ends every stream of a source that was lost: returns the chunks that were being received, and the waiting streams.
    pub(super) fn end_source(&mut self, source: SubscriptionId) -> (Vec<ChunkIndex>, Vec<StreamToken>) {
        let lost = self.receiving.extract_if(|_, (_, of)| *of == source);
        let lost = lost.map(|(_, (chunk, _))| chunk).collect();
        let is_lost = |waiting: &WaitingStream| waiting.header.subscription == source;
        let spare = self.spare.extract_if(|_, spare| is_lost(spare)).map(|(_, spare)| spare.stream);
        let mut waiting: Vec<_> = spare.collect();
        waiting.extend(self.early.extract_if(.., |early| is_lost(early)).map(|early| early.stream));
        (lost, waiting)
    }

    /// Keeps a second stream of a chunk that is being received. Returns the stream if there is a second one already.
    pub(super) fn push_spare(&mut self, spare: WaitingStream) -> Option<StreamToken> {
        match self.spare.entry(spare.header.chunk) {
            Entry::Occupied(_) => Some(spare.stream),
            Entry::Vacant(entry) => {
                entry.insert(spare);
                None
            }
        }
    }

    /// Takes the second stream of a chunk.
    pub(super) fn take_spare(&mut self, chunk: ChunkIndex) -> Option<WaitingStream> {
        self.spare.remove(&chunk)
    }

    /// Whether the chunk of `stream` is being received.
    pub(super) fn is_receiving(&self, stream: StreamToken) -> bool {
        self.receiving.contains_key(&stream)
    }

    /// The source of the chunk that is being received on `stream`.
    pub(super) fn source(&self, stream: StreamToken) -> Option<SubscriptionId> {
        self.receiving.get(&stream).map(|(_, source)| *source)
    }

    /// The number of chunks that are being received.
    pub(super) fn receiving(&self) -> usize {
        self.receiving.len()
    }

    /// The source of each chunk that is being received.
    pub(super) fn sources(&self) -> impl Iterator<Item = SubscriptionId> + '_ {
        self.receiving.values().map(|(_, source)| *source)
    }

    /// The number of chunks that are being received from a source. Costs a pass over those from all sources.
    pub(super) fn receiving_of(&self, source: SubscriptionId) -> usize {
        self.receiving.values().filter(|(_, of)| *of == source).count()
    }

    /// Clears every stream, resets the credit to `credit`, and returns the streams that were not being received.
    pub(super) fn reset(&mut self, credit: u32) -> Vec<StreamToken> {
        self.end_version();
        self.credit = credit;
        let spare = self.spare.drain().map(|(_, spare)| spare.stream);
        let mut waiting: Vec<StreamToken> = spare.collect();
        waiting.extend(self.take_early().into_iter().map(|early| early.stream));
        waiting
    }

    /// Forgets the chunks being received, since the version has ended. Keeps the early streams.
    pub(super) fn end_version(&mut self) {
        self.receiving.clear();
    }
}
