//! The requests of a shared version: its origin pushes, peers are asked for what they hold, and the origin for the rest
//! (PROTOCOL.md §3.15).

use super::{Arrivals, Assembly, List, Order, Pulled, Requests, Source};
use crate::{
    ChunkIndex, CodecSet, PARTIAL_RANGES_MAX, ProtocolViolation, RangeSet, SubscriptionId,
    subscriber::shared::Shared,
};
use std::time::Instant;

impl Requests {
    /// Records that the version under way is shared.
    pub(in crate::subscriber) fn share(&mut self, now: Instant) {
        self.shared = Some(Box::new(Shared::new(now)));
    }

    /// The state of a shared version.
    pub(in crate::subscriber) fn shared(&self) -> Option<&Shared> {
        self.shared.as_deref()
    }

    /// The state of a shared version.
    pub(in crate::subscriber) fn shared_mut(&mut self) -> Option<&mut Shared> {
        self.shared.as_deref_mut()
    }

    /// Whether this source is a peer that was asked for the version.
    pub(in crate::subscriber) fn is_peer(&self, source: SubscriptionId) -> bool {
        self.shared().is_some_and(|shared| shared.is_peer(source))
    }

    /// Begins to receive the version if it is shared. Returns whether it is.
    ///
    /// # Errors
    /// See [`Shared::begin`].
    pub(in crate::subscriber) fn begin_shared(
        &mut self,
        origin: SubscriptionId,
        assembly: &Assembly,
        (codecs, seed): (CodecSet, u64),
    ) -> Result<bool, ProtocolViolation> {
        let Some(shared) = &mut self.shared else { return Ok(false) };
        shared.begin(assembly, codecs, seed)?;
        let mut pulled = Pulled::default();
        pulled.sources.insert(origin, Source::default());
        self.pulled = Some(pulled);
        Ok(true)
    }

    /// The number of chunks that were ordered of a source and have not begun to arrive.
    pub(in crate::subscriber) fn ordered_of(&self, source: SubscriptionId) -> u32 {
        let source = self.pulled.as_ref().and_then(|pulled| pulled.sources.get(&source));
        source.map_or(0, |source| source.ordered.len())
    }

    /// The number of chunks that were ordered of any source and have not begun to arrive.
    pub(in crate::subscriber) fn ordered(&self) -> u32 {
        self.pulled.as_ref().map_or(0, Pulled::ordered)
    }

    /// Records that a peer cannot send these chunks any more: of those that were ordered of it, none is outstanding.
    pub(in crate::subscriber) fn forget_orders(&mut self, peer: SubscriptionId, withdrawn: &RangeSet) {
        let source = self.pulled.as_mut().and_then(|pulled| pulled.sources.get_mut(&peer));
        if let Some(source) = source.filter(|_| !withdrawn.is_empty()) {
            source.ordered = source.ordered.difference(withdrawn);
        }
    }

    /// Removes a peer, whose streams may still arrive.
    pub(in crate::subscriber) fn remove_peer(&mut self, peer: SubscriptionId) {
        if let Some(shared) = &mut self.shared {
            shared.remove_peer(peer);
        }
    }
}

impl Pulled {
    /// The next order of a shared version: first what was ordered of a lane that was lost, the list of hashes and chunks
    /// that were discarded, then peers, then the origin.
    pub(super) fn next_of_shared(
        &mut self,
        shared: &mut Shared,
        origin: SubscriptionId,
        assembly: &Assembly,
        (arrivals, allowance): (&Arrivals, u32),
    ) -> Option<Order> {
        if let Some((source, chunks)) = self.take_due(assembly) {
            shared.note_repeated(source, chunks.len());
            return Some(Order { source, chunks, hashes: false, again: false });
        }
        let has_origin = self.sources.contains_key(&origin);
        if has_origin && self.list == List::Due {
            self.list = List::Asked(origin);
            return Some(Order { source: origin, chunks: RangeSet::new(), hashes: true, again: false });
        }
        let room = self.room_of_shared(shared, (arrivals, allowance));
        if room == 0 {
            return None;
        }
        if has_origin && !self.discarded.is_empty() {
            return Some(self.order_again(origin, room));
        }
        let sources = &self.sources;
        let of_peer = shared.order_of_peers(room, assembly, |id| sources.contains_key(&id));
        let of_origin = || {
            let requested = &sources.get(&origin)?.ordered;
            let chunks = shared.order_of_origin(room, requested, assembly);
            (!chunks.is_empty()).then_some((origin, chunks))
        };
        let (source, chunks) = of_peer.or_else(of_origin)?;
        let ordered = &mut self.sources.get_mut(&source)?.ordered;
        *ordered = ordered.union(&chunks);
        Some(Order { source, chunks, hashes: false, again: false })
    }

    /// How many more chunks may be ordered: what is ordered, arriving and left to the origin stays within the allowance. One
    /// if nothing is on its way.
    fn room_of_shared(&self, shared: &Shared, (arrivals, allowance): (&Arrivals, u32)) -> u32 {
        let outstanding = self.ordered() + arrivals.receiving() as u32;
        let max = allowance.min(PARTIAL_RANGES_MAX as u32);
        let room = max.saturating_sub(outstanding + shared.reserve(arrivals.credit()));
        if outstanding == 0 { room.max(1) } else { room }
    }

    fn ordered(&self) -> u32 {
        self.sources.values().map(|source| source.ordered.len()).sum()
    }

    /// Takes what was ordered of a source that lost a lane and is still missing.
    fn take_due(&mut self, assembly: &Assembly) -> Option<(SubscriptionId, RangeSet)> {
        self.sources.iter_mut().find_map(|(id, source)| {
            let is_due = std::mem::take(&mut source.is_order_due);
            let missing = source
                .ordered
                .iter()
                .filter(|chunk| is_due && assembly.is_missing(ChunkIndex(*chunk)));
            let chunks: RangeSet = missing.map(|chunk| chunk..chunk + 1).collect();
            (!chunks.is_empty()).then_some((*id, chunks))
        })
    }
}
