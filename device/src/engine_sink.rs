use std::{fmt, ops::Range, sync::Arc};

use crate::{
    engine::CopyEngine,
    engine_source::stretches,
    host_memory::HostMemory,
    id::Id,
    parts::{Parts, PartsError},
    pool::SlotPool,
    region::Region,
    sink::{Lent, Sink, SinkError, Target, check_range},
    source::BoxFuture,
};

/// A sink in the memory of a device: in one piece, or with each tensor where its user wants it. Each range is staged in
/// a slot, and copied in when it is written.
///
/// A range longer than a slot is staged in ordinary memory, and goes through one slot piece by piece: slower, and right.
/// The bytes between parts are padding, and go nowhere. It does not watch for overlapping ranges: those of one time
/// leave either writer's bytes in the overlap.
pub struct EngineSink<E: CopyEngine> {
    id: Id,
    engine: Arc<E>,
    parts: Parts<Arc<E::Memory>>,
    slots: SlotPool,
    /// For ranges longer than a slot. Its bound is how many of them their writer opens at once.
    overlong: HostMemory,
}

impl<E: CopyEngine> EngineSink<E> {
    /// Receives into all of `memory` through `slots`, which `engine` must have made. Keep another `Arc` of the
    /// memory: it is the result.
    pub fn new(engine: Arc<E>, memory: Arc<E::Memory>, slots: SlotPool) -> Self {
        let len_bytes = engine.memory_len(&memory);
        Self::of(engine, Parts::whole(len_bytes, memory), slots)
    }

    /// Receives a payload of `len_bytes` into `parts`: where each lies in the payload, and its memory. Fails unless they
    /// are sorted, disjoint, inside of the payload, and each as long as its memory. Costs one look at each.
    pub fn scatter(
        engine: Arc<E>,
        len_bytes: u64,
        parts: impl IntoIterator<Item = (Range<u64>, Arc<E::Memory>)>,
        slots: SlotPool,
    ) -> Result<Self, PartsError> {
        let parts = Parts::measured(len_bytes, parts, |memory| engine.memory_len(memory))?;
        Ok(Self::of(engine, parts, slots))
    }

    fn of(engine: Arc<E>, parts: Parts<Arc<E::Memory>>, slots: SlotPool) -> Self {
        Self { id: Id::unique(), engine, parts, slots, overlong: HostMemory::new(u64::MAX) }
    }

    async fn stage(&self, range: Range<u64>) -> Result<Target, SinkError> {
        check_range(&range, self.len_bytes())?;
        let lent = match usize::try_from(range.end - range.start) {
            Ok(len @ 1..) if len <= self.slots.slot_bytes() => {
                Lent::Staged { slot: self.slots.acquire().await, len }
            }
            // What no address can hold is refused by the allocation.
            len => Lent::Overlong { staging: self.overlong.allocate(len.unwrap_or(usize::MAX))? },
        };
        Ok(Target { sink: self.id, range, lent })
    }

    async fn put(&self, target: Target) -> Result<(), SinkError> {
        let Target { sink, range, lent } = target;
        match lent {
            Lent::Staged { slot, .. } if sink == self.id => {
                self.engine.copy_in(slot, stretches(&self.parts, &range)).await?;
                Ok(())
            }
            Lent::Overlong { staging } if sink == self.id => self.piece_by_piece(range, &staging).await,
            _ => Err(SinkError::ForeignTarget),
        }
    }

    async fn piece_by_piece(&self, range: Range<u64>, staging: &Region) -> Result<(), SinkError> {
        let mut start = range.start;
        for piece in staging.chunks(self.slots.slot_bytes()) {
            let end = start + piece.len() as u64;
            let mut slot = self.slots.acquire().await;
            slot[..piece.len()].copy_from_slice(piece);
            self.engine.copy_in(slot, stretches(&self.parts, &(start..end))).await?;
            start = end;
        }
        Ok(())
    }
}

impl<E: CopyEngine> Sink for EngineSink<E> {
    fn len_bytes(&self) -> u64 {
        self.parts.len_bytes()
    }

    fn open(&self, range: Range<u64>) -> BoxFuture<'_, Result<Target, SinkError>> {
        Box::pin(self.stage(range))
    }

    fn write(&self, target: Target) -> BoxFuture<'_, Result<(), SinkError>> {
        Box::pin(self.put(target))
    }
}

impl<E: CopyEngine> fmt::Debug for EngineSink<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineSink")
            .field("engine", &self.engine.name())
            .field("len_bytes", &self.len_bytes())
            .field("slots", &self.slots)
            .finish()
    }
}
