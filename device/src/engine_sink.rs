use std::{any::Any, fmt, ops::Range, sync::Arc};

use crate::{
    DeviceBuffer,
    cuda::share::ShareError,
    device_parts::DeviceParts,
    engine::{CopyEngine, CopySegment, Copying},
    host_memory::HostMemory,
    id::Id,
    ledger::{Entry, Ledger},
    parts::PartsError,
    pool::SlotPool,
    region::Region,
    sink::{Lent, Sink, SinkError, Target, check_range},
    slot::Slot,
    source::BoxFuture,
    spread::SpreadError,
    spread_parts::SpreadParts,
};

/// A sink in device memory: all in one allocation, or each tensor in its own. Each range is staged in a slot, and
/// copied to the device when it is written.
///
/// A range longer than a slot is staged in ordinary memory and copied piece by piece, through one slot at a time, which
/// is slower. The bytes between parts are padding, and are dropped.
///
/// A copy cannot be cancelled, so it counts as a writer until it has ended, even if its future was dropped: until then
/// [`open`](Sink::open) of an overlapping range waits, and [`commit`](Self::commit) fails.
pub struct EngineSink {
    id: Id,
    len_bytes: u64,
    /// Copies from a slot to a range of the payload.
    copy_in: Box<CopyIn>,
    /// Copies from memory of the device to ranges of the payload.
    copy_within: Box<CopyWithin>,
    slots: SlotPool,
    /// Staging memory for ranges longer than a slot. Bounded by the number of ranges that the caller opens at a time.
    overlong: HostMemory,
    ledger: Arc<Ledger>,
}

type CopyIn = dyn Fn(Slot, Range<u64>) -> Result<Copying, SpreadError> + Send + Sync;

type CopyWithin =
    dyn Fn(&DeviceBuffer, &[(u64, Range<u64>)], Arc<Entry>) -> Result<Within, SinkError> + Send + Sync;

type Within = BoxFuture<'static, Result<(), ShareError>>;

impl EngineSink {
    /// Receives into all of `memory` through `slots`, which `engine` must have made. Keep another `Arc` of the
    /// memory: it is the result.
    pub fn new<E: CopyEngine>(engine: Arc<E>, memory: Arc<E::Memory>, slots: SlotPool) -> Self {
        let parts = DeviceParts::whole(&*engine, memory);
        Self::of(engine, parts, slots)
    }

    /// Receives a payload of `len_bytes` into `parts`: the range of each in the payload, and its memory. Fails unless
    /// they are sorted, disjoint, within the payload, and each as long as its memory. Linear in the parts.
    pub fn scatter<E: CopyEngine>(
        engine: Arc<E>,
        len_bytes: u64,
        parts: impl IntoIterator<Item = (Range<u64>, Arc<E::Memory>)>,
        slots: SlotPool,
    ) -> Result<Self, PartsError> {
        Self::spread(engine, len_bytes, parts, SpreadParts::default(), slots)
    }

    /// Like [`scatter`](Self::scatter), with parts that lie spread over memories.
    pub fn spread<E: CopyEngine>(
        engine: Arc<E>,
        len_bytes: u64,
        parts: impl IntoIterator<Item = (Range<u64>, Arc<E::Memory>)>,
        spread: SpreadParts<Arc<E::Memory>>,
        slots: SlotPool,
    ) -> Result<Self, PartsError> {
        let parts = DeviceParts::new(&*engine, len_bytes, parts, spread)?;
        Ok(Self::of(engine, parts, slots))
    }

    fn of<E: CopyEngine>(engine: Arc<E>, parts: DeviceParts<E>, slots: SlotPool) -> Self {
        let parts = Arc::new(parts);
        let copy_in = {
            let (engine, parts) = (Arc::clone(&engine), Arc::clone(&parts));
            move |slot, range| Ok(engine.copy_in(slot, parts.segments(&engine, &range)?))
        };
        let len_bytes = parts.len_bytes();
        let copy_within = move |from: &DeviceBuffer, places: &[(u64, Range<u64>)], entry: Arc<Entry>| {
            let foreign = || ShareError::NotShareable { device: from.device().name().into() };
            let from = from.memory::<E::Memory>().ok_or_else(foreign)?;
            let mut to = vec![];
            for (offset, range) in places {
                check_range(range, len_bytes)?;
                let moved = |mut segment: CopySegment<E::Memory>| {
                    segment.rectangle.part = segment.rectangle.part.saturating_add(*offset);
                    segment
                };
                to.extend(parts.segments(&engine, range)?.into_iter().map(moved));
            }
            Ok(engine.copy_within(from, to, entry))
        };
        Self {
            id: Id::unique(),
            len_bytes,
            copy_in: Box::new(copy_in),
            copy_within: Box::new(copy_within),
            slots,
            overlong: HostMemory::new(u64::MAX),
            ledger: Arc::default(),
        }
    }

    /// Like [`write`](Sink::write), and keeps `kept` alive until the copy has ended, even if this future is dropped;
    /// for ever if the end of the copy is unknown.
    pub async fn write_keeping(&self, target: Target, kept: impl Any + Send + Sync) -> Result<(), SinkError> {
        let Target { sink, range, lent } = target;
        match lent {
            Lent::Staged { slot, entry, .. } if sink == self.id => {
                self.copy(slot, range, entry.begin_copy(kept)).await
            }
            Lent::Overlong { staging, entry } if sink == self.id => {
                self.piece_by_piece(range, &staging, &entry.begin_copy(kept)).await
            }
            _ => Err(SinkError::ForeignTarget),
        }
    }

    /// Like [`copy_within`](Sink::copy_within), and keeps `kept` as [`write_keeping`](Self::write_keeping) does.
    pub async fn copy_within_keeping(
        &self,
        from: &DeviceBuffer,
        places: &[(u64, Range<u64>)],
        kept: impl Any + Send + Sync,
    ) -> Result<(), SinkError> {
        let mut entry = self.ledger.enter(&(0..self.len_bytes)).await?;
        entry.lend();
        Ok((self.copy_within)(from, places, entry.begin_copy(kept))?.await?)
    }

    /// Ends the writing. Succeeds when no byte is lent and no copy is in flight; otherwise it fails and changes
    /// nothing. Whether all bytes were filled is for the caller to track. After success, opening a range and committing
    /// again fail with [`SinkError::Committed`].
    pub fn commit(&self) -> Result<(), SinkError> {
        self.ledger.commit(self.len_bytes)
    }

    /// Whether this sink waits for the device: a range waits for a slot, or a copy has not ended. A lent target does
    /// not count: it waits for its writer.
    pub fn waits_for_device(&self) -> bool {
        self.ledger.waits()
    }

    async fn stage(&self, range: Range<u64>) -> Result<Target, SinkError> {
        check_range(&range, self.len_bytes)?;
        let mut entry = self.ledger.enter(&range).await?;
        let lent = match usize::try_from(range.end - range.start) {
            Ok(len @ 1..) if len <= self.slots.slot_bytes() => {
                let slot = self.slots.acquire().await;
                entry.lend();
                Lent::Staged { slot, len, entry }
            }
            // An empty range needs no memory. A length beyond the address space is refused by the allocation.
            len => {
                let staging = self.overlong.allocate(len.unwrap_or(usize::MAX))?;
                entry.lend();
                Lent::Overlong { staging, entry }
            }
        };
        Ok(Target { sink: self.id, range, lent })
    }

    async fn copy(&self, mut slot: Slot, range: Range<u64>, entry: Arc<Entry>) -> Result<(), SinkError> {
        slot.attach(entry);
        drop((self.copy_in)(slot, range)?.await?);
        Ok(())
    }

    async fn piece_by_piece(
        &self,
        range: Range<u64>,
        staging: &Region,
        entry: &Arc<Entry>,
    ) -> Result<(), SinkError> {
        let mut start = range.start;
        for piece in staging.chunks(self.slots.slot_bytes()) {
            let end = start + piece.len() as u64;
            let mut slot = self.slots.acquire().await;
            slot[..piece.len()].copy_from_slice(piece);
            self.copy(slot, start..end, Arc::clone(entry)).await?;
            start = end;
        }
        Ok(())
    }
}

impl Sink for EngineSink {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn open(&self, range: Range<u64>) -> BoxFuture<'_, Result<Target, SinkError>> {
        Box::pin(self.stage(range))
    }

    fn write(&self, target: Target) -> BoxFuture<'_, Result<(), SinkError>> {
        Box::pin(self.write_keeping(target, ()))
    }

    fn copy_within<'a>(
        &'a self,
        from: &'a DeviceBuffer,
        places: &'a [(u64, Range<u64>)],
    ) -> BoxFuture<'a, Result<(), SinkError>> {
        Box::pin(self.copy_within_keeping(from, places, ()))
    }
}

impl fmt::Debug for EngineSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineSink")
            .field("len_bytes", &self.len_bytes)
            .field("slots", &self.slots)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::{AllocError, Capacity, Completion, CopyError, CopySegment};

    /// An engine without real memory, whose copies end when the test ends them.
    #[derive(Default)]
    struct Gated {
        copies: Mutex<Vec<(Slot, Completion)>>,
    }

    impl Gated {
        /// Ends the oldest copy with success, and returns its slot.
        fn end_oldest(&self) {
            let (slot, completion) = self.copies.lock().unwrap().remove(0);
            completion.finish(Ok(slot));
        }

        /// Fails the engine: the end of every copy is unknown, and its slot's memory is leaked and replaced.
        fn fail(&self) {
            for (slot, completion) in self.copies.lock().unwrap().drain(..) {
                slot.forfeit();
                completion.finish(Err(CopyError::EngineStopped));
            }
        }
    }

    impl CopyEngine for Gated {
        /// The length.
        type Memory = u64;

        fn name(&self) -> &str {
            "gated"
        }

        fn allocate(&self, len: usize) -> Result<Arc<u64>, AllocError> {
            Ok(Arc::new(len as u64))
        }

        fn slots(&self, capacity: Capacity) -> Result<SlotPool, AllocError> {
            SlotPool::new(capacity)
        }

        fn memory_len(&self, memory: &u64) -> u64 {
            *memory
        }

        fn copy_out(&self, _: Vec<CopySegment<u64>>, _: Slot) -> Copying {
            Copying::refused(CopyError::ForeignMemory)
        }

        fn copy_in(&self, slot: Slot, _: Vec<CopySegment<u64>>) -> Copying {
            let (completion, copying) = Copying::pair();
            self.copies.lock().unwrap().push((slot, completion));
            copying
        }
    }

    /// A sink of 100 bytes with two slots of 20.
    fn new_sink() -> (Arc<Gated>, EngineSink) {
        let engine = Arc::new(Gated::default());
        let slots = engine.slots(Capacity { slots: 2, slot_bytes: 20 }).unwrap();
        let sink = EngineSink::new(Arc::clone(&engine), Arc::new(100), slots);
        (engine, sink)
    }

    /// Polls `future` once and drops it.
    async fn poll_once<F: Future>(future: F) -> Option<F::Output> {
        tokio::select! {
            biased;
            output = future => Some(output),
            () = tokio::task::yield_now() => None,
        }
    }

    #[tokio::test]
    async fn a_copy_whose_future_is_dropped_is_a_writer_until_it_has_ended() {
        let (engine, sink) = new_sink();
        let kept = Arc::new(());
        let target = sink.open(5..15).await.unwrap();
        assert!(!sink.waits_for_device());
        assert!(poll_once(sink.write_keeping(target, Arc::clone(&kept))).await.is_none());
        assert!(sink.open(15..30).await.is_ok() && sink.waits_for_device());
        assert!(poll_once(sink.open(14..30)).await.is_none());
        assert!(matches!(sink.commit(), Err(SinkError::StillLent { lent_bytes: 10, len_bytes: 100 })));
        assert_eq!(Arc::strong_count(&kept), 2);
        let (opened, ()) = tokio::join!(sink.open(14..30), async { engine.end_oldest() });
        assert_eq!(Arc::strong_count(&kept), 1);
        drop(opened.unwrap());
        sink.commit().unwrap();
        assert!(matches!(sink.open(0..1).await, Err(SinkError::Committed)));
    }

    #[tokio::test]
    async fn a_lent_range_is_busy_and_does_not_wait_for_the_device() {
        let (_, sink) = new_sink();
        let held = [sink.open(0..20).await.unwrap(), sink.open(20..40).await.unwrap()];
        assert!(!sink.waits_for_device());
        for range in [0..1, 19..21, 30..50] {
            let Range { start, end } = range;
            let busy = sink.open(range).await;
            assert!(matches!(busy, Err(SinkError::Busy { start: s, end: e }) if (s, e) == (start, end)));
        }
        assert!(sink.open(7..7).await.is_ok(), "an empty range is never busy");
        let mut waiting = std::pin::pin!(sink.open(40..60));
        assert!(poll_once(&mut waiting).await.is_none() && sink.waits_for_device());
        drop(held);
        drop(waiting.await.unwrap());
        sink.commit().unwrap();
    }

    #[tokio::test]
    async fn a_range_longer_than_a_slot_is_lent_until_its_last_piece_is_copied() {
        let (engine, sink) = new_sink();
        let target = sink.open(0..50).await.unwrap();
        let mut writing = std::pin::pin!(sink.write(target));
        for _ in 0..2 {
            assert!(poll_once(&mut writing).await.is_none());
            assert!(poll_once(sink.open(0..1)).await.is_none());
            engine.end_oldest();
        }
        assert!(poll_once(&mut writing).await.is_none());
        engine.end_oldest();
        writing.await.unwrap();
        sink.commit().unwrap();
    }

    #[tokio::test]
    async fn a_range_that_a_failed_device_may_write_is_never_opened_again() {
        let (engine, sink) = new_sink();
        let kept = Arc::new(());
        let target = sink.open(5..15).await.unwrap();
        let (written, ()) =
            tokio::join!(sink.write_keeping(target, Arc::clone(&kept)), async { engine.fail() });
        assert!(matches!(written, Err(SinkError::Copy(CopyError::EngineStopped))));
        assert!(poll_once(sink.open(14..30)).await.is_none() && sink.waits_for_device());
        assert!(sink.open(15..30).await.is_ok() && sink.commit().is_err());
        assert_eq!(Arc::strong_count(&kept), 2, "it is kept for ever");
        assert_eq!(sink.slots.available(), 2);
    }
}
