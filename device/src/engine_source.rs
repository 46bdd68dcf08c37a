use std::{fmt, ops::Range, sync::Arc};

use bytes::Bytes;

use crate::{
    device_parts::DeviceParts,
    engine::CopyEngine,
    parts::PartsError,
    pool::{Capacity, SlotPool},
    slot::Slot,
    source::{BoxFuture, Source, SourceError, check_range},
    spread_parts::SpreadParts,
};

/// A source in device memory: all in one allocation, or each tensor in its own. Each read waits for a slot, into which
/// the bytes are copied.
///
/// The result of a read is the slot itself, without a host copy, as long as a quarter of the pool's slots, and at least
/// one, are still free. Otherwise the bytes are copied to ordinary memory and the slot goes back to the pool at once: a
/// reader with a slow network then uses memory within its own bound, and never blocks other readers. A range longer
/// than a slot is copied through one slot, piece by piece.
///
/// The bytes between parts are padding, and zero.
pub struct EngineSource<E: CopyEngine> {
    engine: Arc<E>,
    parts: DeviceParts<E>,
    slots: SlotPool,
}

impl<E: CopyEngine> EngineSource<E> {
    /// Serves all of `memory` through `slots`, which `engine` must have made.
    pub fn new(engine: Arc<E>, memory: Arc<E::Memory>, slots: SlotPool) -> Self {
        let parts = DeviceParts::whole(&*engine, memory);
        Self { engine, parts, slots }
    }

    /// Serves a payload of `len_bytes` from `parts`: the range of each in the payload, and its memory. Fails unless
    /// they are sorted, disjoint, within the payload, and each as long as its memory. Linear in the parts.
    pub fn gather(
        engine: Arc<E>,
        len_bytes: u64,
        parts: impl IntoIterator<Item = (Range<u64>, Arc<E::Memory>)>,
        slots: SlotPool,
    ) -> Result<Self, PartsError> {
        Self::spread(engine, len_bytes, parts, SpreadParts::default(), slots)
    }

    /// Like [`gather`](Self::gather), with parts that lie spread over memories. Where parts overlap, their bytes must be
    /// the same.
    pub fn spread(
        engine: Arc<E>,
        len_bytes: u64,
        parts: impl IntoIterator<Item = (Range<u64>, Arc<E::Memory>)>,
        spread: SpreadParts<Arc<E::Memory>>,
        slots: SlotPool,
    ) -> Result<Self, PartsError> {
        let parts = DeviceParts::new(&*engine, len_bytes, parts, spread)?;
        Ok(Self { engine, parts, slots })
    }

    async fn bytes(&self, range: Range<u64>) -> Result<Bytes, SourceError> {
        check_range(&range, self.parts.len_bytes())?;
        let asked_bytes = range.end - range.start;
        match usize::try_from(asked_bytes) {
            Ok(0) => Ok(Bytes::new()),
            Ok(len) if len <= self.slots.slot_bytes() => Ok(self.hand_out(self.copy(range).await?, len)?),
            _ => self.piece_by_piece(range).await,
        }
    }

    /// Copies `range`, which is no longer than a slot, into a slot.
    async fn copy(&self, range: Range<u64>) -> Result<Slot, SourceError> {
        let mut slot = self.slots.acquire().await;
        let segments = self.parts.segments(&self.engine, &range)?;
        for gap in self.parts.gaps(&range) {
            slot[gap].fill(0);
        }
        Ok(self.engine.copy_out(segments, slot).await?)
    }

    /// The first `len` bytes of a slot: the slot itself while enough slots are free, otherwise a copy.
    fn hand_out(&self, slot: Slot, len: usize) -> Result<Bytes, SourceError> {
        let Capacity { slots, .. } = self.slots.capacity();
        if self.slots.available() >= (slots / 4).max(1) {
            return Ok(slot.freeze(len));
        }
        let mut copy = reserve(len as u64)?;
        copy.extend_from_slice(&slot[..len]);
        Ok(copy.into())
    }

    async fn piece_by_piece(&self, range: Range<u64>) -> Result<Bytes, SourceError> {
        let mut all = reserve(range.end - range.start)?;
        let mut start = range.start;
        while start < range.end {
            let end = range.end.min(start + self.slots.slot_bytes() as u64);
            let slot = self.copy(start..end).await?;
            all.extend_from_slice(&slot[..(end - start) as usize]);
            start = end;
        }
        Ok(all.into())
    }
}

impl<E: CopyEngine> Source for EngineSource<E> {
    fn len_bytes(&self) -> u64 {
        self.parts.len_bytes()
    }

    fn read(&self, range: Range<u64>) -> BoxFuture<'_, Result<Bytes, SourceError>> {
        Box::pin(self.bytes(range))
    }

    fn slots(&self) -> Option<&SlotPool> {
        Some(&self.slots)
    }
}

impl<E: CopyEngine> fmt::Debug for EngineSource<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineSource")
            .field("engine", &self.engine.name())
            .field("len_bytes", &self.len_bytes())
            .field("slots", &self.slots)
            .finish()
    }
}

/// Allocates memory for a host copy. A length beyond the address space is refused like missing memory.
fn reserve(asked_bytes: u64) -> Result<Vec<u8>, SourceError> {
    let mut copy = Vec::new();
    let len = usize::try_from(asked_bytes).unwrap_or(usize::MAX);
    copy.try_reserve_exact(len)
        .map_err(|source| SourceError::NoMemory { asked_bytes, source })?;
    Ok(copy)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HostEngine, HostMemory};

    /// A source of `len` zeros, and its slots.
    fn new_source(len: usize, capacity: Capacity) -> (EngineSource<HostEngine>, SlotPool) {
        let engine = Arc::new(HostEngine::inline(HostMemory::new(1 << 20)));
        let slots = engine.slots(capacity).unwrap();
        (EngineSource::new(Arc::clone(&engine), engine.allocate(len).unwrap(), slots.clone()), slots)
    }

    #[tokio::test]
    async fn a_reader_holds_slots_only_while_there_are_enough() {
        let (source, slots) = new_source(100, Capacity { slots: 8, slot_bytes: 10 });
        let mut held = Vec::new();
        for i in 0..10 {
            held.push(source.read(i * 10..(i + 1) * 10).await.unwrap());
        }
        assert_eq!(slots.available(), 2, "a quarter of the slots always comes back");
        drop(held);
        assert_eq!(slots.available(), 8);
    }

    #[tokio::test]
    async fn the_last_slot_always_comes_back() {
        for slots in 1..4 {
            let (source, pool) = new_source(100, Capacity { slots, slot_bytes: 10 });
            let mut held = Vec::new();
            for i in 0..10 {
                held.push(source.read(i * 10..(i + 1) * 10).await.unwrap());
            }
            assert_eq!(pool.available(), 1);
        }
    }

    #[tokio::test]
    async fn an_empty_range_is_read_without_a_slot() {
        let (source, slots) = new_source(100, Capacity { slots: 1, slot_bytes: 10 });
        let held = slots.acquire().await;
        assert!(source.read(50..50).await.unwrap().is_empty());
        drop(held);
        assert!(source.is_costly());
    }
}
