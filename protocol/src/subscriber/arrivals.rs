//! The open chunk streams of one subscription, and their credit.

use crate::{ChunkHeader, ChunkIndex, ProtocolViolation, SubscriptionId};
use std::collections::{BTreeMap, BTreeSet, btree_map::Entry};

/// The number of a chunk's stream. The caller owns the stream and gives each stream another number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamToken(pub u64);

/// A stream that is not read yet: its chunk arrived before its announcement, its manifest or the version's memory, or
/// another stream of the chunk is being received.
#[derive(Debug, Clone, Copy)]
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
    receiving: BTreeMap<StreamToken, (ChunkIndex, SubscriptionId)>,
    /// Second streams of chunks that are being received: the first may be lost with its lane.
    spare: BTreeMap<ChunkIndex, WaitingStream>,
    /// The number of further chunks that the server may push.
    credit: u32,
    /// Of a shared version: the open streams that were pushed, each of which occupies a credit.
    pushed: BTreeSet<StreamToken>,
}

impl Arrivals {
    pub(super) fn new(credit: u32) -> Self {
        Self {
            early: vec![],
            receiving: BTreeMap::new(),
            spare: BTreeMap::new(),
            credit,
            pushed: BTreeSet::new(),
        }
    }

    /// The number of further chunks that the server may push.
    pub(super) fn credit(&self) -> u32 {
        self.credit
    }

    /// Takes all credit back, and returns it: the server does not know of it, or was lost.
    pub(super) fn take_credit(&mut self) -> u32 {
        self.pushed.clear();
        std::mem::take(&mut self.credit)
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

    /// Records that a stream of a shared version was pushed.
    pub(super) fn note_pushed(&mut self, stream: StreamToken) {
        self.pushed.insert(stream);
    }

    /// Ends a stream of a shared version; returns whether it was pushed.
    pub(super) fn take_pushed(&mut self, stream: StreamToken) -> bool {
        self.pushed.remove(&stream)
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
        let lost = self.receiving.extract_if(.., |_, (_, of)| *of == source);
        let lost = lost.map(|(_, (chunk, _))| chunk).collect();
        let is_lost = |waiting: &WaitingStream| waiting.header.subscription == source;
        let spare = self
            .spare
            .extract_if(.., |_, spare| is_lost(spare))
            .map(|(_, spare)| spare.stream);
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

    /// Whether a source sends a chunk of which another stream waits.
    pub(super) fn holds_up(&self, source: SubscriptionId) -> bool {
        let mut receiving = self.receiving.values();
        receiving.any(|(chunk, of)| *of == source && self.spare.contains_key(chunk))
    }

    /// The chunk that is being received on `stream`, and its source.
    pub(super) fn receiving_at(&self, stream: StreamToken) -> Option<(ChunkIndex, SubscriptionId)> {
        self.receiving.get(&stream).copied()
    }

    /// Whether the chunk of `stream` is being received.
    pub(super) fn is_receiving(&self, stream: StreamToken) -> bool {
        self.receiving.contains_key(&stream)
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
        self.pushed.clear();
        self.credit = credit;
        let spare = std::mem::take(&mut self.spare).into_values().map(|spare| spare.stream);
        let mut waiting: Vec<StreamToken> = spare.collect();
        waiting.extend(self.take_early().into_iter().map(|early| early.stream));
        waiting
    }

    /// Forgets the chunks being received, since the version has ended. Keeps the early streams.
    pub(super) fn end_version(&mut self) {
        self.receiving.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::subscriber::fixtures::{self, SUBSCRIPTION};
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    /// The header of a chunk from one of two sources.
    fn header(chunk: u32, is_second: bool) -> ChunkHeader {
        let subscription = SubscriptionId(SUBSCRIPTION.0 + u32::from(is_second));
        ChunkHeader { subscription, ..fixtures::header(1, chunk) }
    }

    /// One call. A stream has the number of the call that passes it.
    #[derive(Debug, Clone, Copy)]
    enum Step {
        Grant(u32),
        Spend,
        VoidCredit,
        PushEarly(u32, bool),
        TakeEarly,
        Begin(u32, bool),
        /// Ends the stream of an earlier call. The flag says whether the version is pushed.
        End(usize, bool),
        EndSource(bool),
        PushSpare(u32, bool),
        TakeSpare(u32),
        EndVersion,
        Reset(u32),
    }

    fn any_step() -> impl Strategy<Value = Step> {
        let (chunk, flag) = (0u32..3, any::<bool>());
        let of = (chunk.clone(), flag);
        prop_oneof![
            2 => (0u32..3).prop_map(Step::Grant),
            2 => Just(Step::Spend),
            1 => Just(Step::VoidCredit),
            3 => of.clone().prop_map(|(chunk, of)| Step::PushEarly(chunk, of)),
            1 => Just(Step::TakeEarly),
            4 => of.clone().prop_map(|(chunk, of)| Step::Begin(chunk, of)),
            3 => (0usize..40, any::<bool>()).prop_map(|(at, is_pushed)| Step::End(at, is_pushed)),
            1 => any::<bool>().prop_map(Step::EndSource),
            3 => of.prop_map(|(chunk, of)| Step::PushSpare(chunk, of)),
            2 => chunk.prop_map(Step::TakeSpare),
            1 => Just(Step::EndVersion),
            1 => (0u32..3).prop_map(Step::Reset),
        ]
    }

    fn tokens(mut streams: Vec<StreamToken>) -> Vec<StreamToken> {
        streams.sort();
        streams
    }

    proptest! {
        /// Any calls, compared with lists of streams: each stream is early, being received or a second one, until it is
        /// taken, ended or returned.
        #[test]
        fn streams_are_returned_once(steps in prop::collection::vec(any_step(), 0..40)) {
            let mut arrivals = Arrivals::new(1);
            let mut credit = 1;
            let mut early: Vec<(StreamToken, ChunkHeader)> = vec![];
            let mut receiving: BTreeMap<StreamToken, ChunkHeader> = BTreeMap::new();
            let mut spare: BTreeMap<ChunkIndex, (StreamToken, ChunkHeader)> = BTreeMap::new();
            for (at, step) in (0u64..).zip(steps) {
                let stream = StreamToken(at);
                match step {
                    Step::Grant(chunks) => { arrivals.grant(chunks); credit += chunks; }
                    Step::Spend => {
                        prop_assert_eq!(arrivals.spend().is_ok(), credit > 0);
                        credit = credit.saturating_sub(1);
                    }
                    Step::VoidCredit => { arrivals.take_credit(); credit = 0; }
                    Step::PushEarly(chunk, of) => {
                        let header = header(chunk, of);
                        early.push((stream, header));
                        arrivals.push_early(WaitingStream { stream, header });
                    }
                    Step::TakeEarly => {
                        let taken: Vec<_> = arrivals.take_early().into_iter().map(|early| early.stream).collect();
                        prop_assert_eq!(taken, std::mem::take(&mut early).into_iter().map(|(stream, _)| stream).collect::<Vec<_>>());
                    }
                    Step::Begin(chunk, of) => {
                        let header = header(chunk, of);
                        arrivals.begin(stream, &header);
                        receiving.insert(stream, header);
                    }
                    Step::End(which, is_pushed) => {
                        let ended = receiving.remove(&StreamToken(which as u64));
                        credit += u32::from(ended.is_some() && is_pushed);
                        let ended = ended.map(|header| (header.chunk, header.subscription));
                        prop_assert_eq!(arrivals.end(StreamToken(which as u64), is_pushed), ended);
                    }
                    Step::EndSource(of) => {
                        let source = header(0, of).subscription;
                        let is_of = |header: &ChunkHeader| header.subscription == source;
                        let mut lost: Vec<_> = receiving.values().filter(|header| is_of(header)).map(|header| header.chunk).collect();
                        let waiting = early.iter().chain(spare.values()).filter(|(_, header)| is_of(header));
                        let waiting: Vec<_> = waiting.map(|(stream, _)| *stream).collect();
                        receiving.retain(|_, header| !is_of(header));
                        early.retain(|(_, header)| !is_of(header));
                        spare.retain(|_, (_, header)| !is_of(header));
                        let (mut found, ended) = arrivals.end_source(source);
                        lost.sort();
                        found.sort();
                        prop_assert_eq!((found, tokens(ended)), (lost, tokens(waiting)));
                    }
                    Step::PushSpare(chunk, of) => {
                        let header = header(chunk, of);
                        let returned = spare.contains_key(&header.chunk).then_some(stream);
                        spare.entry(header.chunk).or_insert((stream, header));
                        prop_assert_eq!(arrivals.push_spare(WaitingStream { stream, header }), returned);
                    }
                    Step::TakeSpare(chunk) => {
                        let taken = arrivals.take_spare(ChunkIndex(chunk)).map(|spare| spare.stream);
                        prop_assert_eq!(taken, spare.remove(&ChunkIndex(chunk)).map(|(stream, _)| stream));
                    }
                    Step::EndVersion => { arrivals.end_version(); receiving.clear(); }
                    Step::Reset(to) => {
                        let waiting = early.drain(..).chain(std::mem::take(&mut spare).into_values());
                        let waiting: Vec<_> = waiting.map(|(stream, _)| stream).collect();
                        receiving.clear();
                        credit = to;
                        prop_assert_eq!(tokens(arrivals.reset(to)), tokens(waiting));
                    }
                }
                prop_assert_eq!((arrivals.credit(), arrivals.receiving()), (credit, receiving.len()));
                prop_assert_eq!(arrivals.is_receiving(stream), receiving.contains_key(&stream));
                for source in [header(0, false), header(0, true)].map(|header| header.subscription) {
                    let expected = receiving.values().filter(|header| header.subscription == source).count();
                    prop_assert_eq!(arrivals.receiving_of(source), expected);
                    prop_assert_eq!(arrivals.sources().filter(|of| *of == source).count(), expected);
                }
            }
        }
    }
}
