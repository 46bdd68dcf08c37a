use std::{fmt, ops::Range, sync::Arc};

use crate::{
    engine::CopyEngine,
    id::Id,
    pool::SlotPool,
    sink::{Lent, Sink, SinkError, Target, check_range},
    source::BoxFuture,
};

/// A sink in the memory of a device. Each range is staged in a slot, and copied in when it is written.
///
/// It does not watch for overlapping ranges: those of one time leave either writer's bytes in the overlap.
pub struct EngineSink<E: CopyEngine> {
    id: Id,
    engine: Arc<E>,
    memory: Arc<E::Memory>,
    slots: SlotPool,
}

impl<E: CopyEngine> EngineSink<E> {
    /// Receives into `memory` through `slots`, which `engine` must have made. Keep another `Arc` of the
    /// memory: it is the result.
    pub fn new(engine: Arc<E>, memory: Arc<E::Memory>, slots: SlotPool) -> Self {
        Self { id: Id::unique(), engine, memory, slots }
    }

    async fn stage(&self, range: Range<u64>) -> Result<Target, SinkError> {
        check_range(&range, self.len_bytes())?;
        let asked_bytes = range.end - range.start;
        let slot_bytes = self.slots.slot_bytes();
        if asked_bytes > slot_bytes as u64 {
            return Err(SinkError::LongerThanSlot { asked_bytes, slot_bytes });
        }
        let slot = self.slots.acquire().await;
        Ok(Target { sink: self.id, range, lent: Lent::Staged { slot, len: asked_bytes as usize } })
    }

    async fn copy(&self, target: Target) -> Result<(), SinkError> {
        match target.lent {
            Lent::Staged { slot, len } if target.sink == self.id => {
                self.engine.copy_in(slot, len, &self.memory, target.range.start).await?;
                Ok(())
            }
            _ => Err(SinkError::ForeignTarget),
        }
    }
}

impl<E: CopyEngine> Sink for EngineSink<E> {
    fn len_bytes(&self) -> u64 {
        self.engine.memory_len(&self.memory)
    }

    fn open(&self, range: Range<u64>) -> BoxFuture<'_, Result<Target, SinkError>> {
        Box::pin(self.stage(range))
    }

    fn write(&self, target: Target) -> BoxFuture<'_, Result<(), SinkError>> {
        Box::pin(self.copy(target))
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
