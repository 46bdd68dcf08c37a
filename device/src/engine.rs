use std::{
    any::Any,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use tokio::sync::oneshot;

use crate::{
    cuda::{CudaError, share::ShareError},
    host_memory::AllocError,
    id::Id,
    pool::{Capacity, SlotPool},
    slot::Slot,
    source::BoxFuture,
    spread::Rectangle,
};

/// An engine that copies bytes between slots and the memory of one kind of device.
///
/// The contract of every engine, tested by the module `cases` (feature `engine-cases`):
///
/// - The request alone starts a copy. It runs to its end, whether its future is polled or dropped.
/// - Until it has ended, a copy owns its slot and holds its tensor memory: dropping a [`Copying`] early, or the engine
///   itself, frees nothing under a running copy. The slot is returned afterwards.
/// - An engine that cannot tell whether a copy has ended, because its device failed, reports an error and leaks slot
///   and memory: memory freed under a copy would corrupt other data.
/// - Copies of one engine may end in any order. The bytes of a copy are visible when its future resolves.
/// - One call is one copy, however many segments it has: the copy ends with its last segment. All bounds are checked
///   before any segment is copied. A refused copy returns its slot to the pool at once.
/// - Requesting a copy never blocks. The queue is bounded: every copy in flight owns a slot of this engine.
/// - A device can hang. An engine whose copies may take for ever has a deadline for them: a late copy reports an error,
///   and releases its slot and memory if it ends after all.
pub trait CopyEngine: Send + Sync + 'static {
    /// Memory of this engine's device that holds a tensor or a payload.
    type Memory: Send + Sync + 'static;

    /// A short name for messages and metrics: `host`, `cuda:0`.
    fn name(&self) -> &str;

    /// Allocates `len` bytes of device memory, of unspecified content. May block for milliseconds: call it once per
    /// payload, and not where latency counts. The memory is returned with the last clone of the `Arc`.
    fn allocate(&self, len: usize) -> Result<Arc<Self::Memory>, AllocError>;

    /// Makes a pool of slots that this engine can copy from and to: page-locked if the device requires it. May block
    /// for as long as page-locking takes, so make pools at the start.
    fn slots(&self, capacity: Capacity) -> Result<SlotPool, AllocError>;

    /// The length of `memory` in bytes.
    fn memory_len(&self, memory: &Self::Memory) -> u64;

    /// Copies each segment to its place in `slot`. Bytes between these places are not changed.
    fn copy_out(&self, from: Vec<CopySegment<Self::Memory>>, slot: Slot) -> Copying;

    /// Copies each segment from its place in `slot`.
    ///
    /// After concurrent copies to overlapping ranges of one memory, each byte of the overlap comes from one of them.
    fn copy_in(&self, slot: Slot, to: Vec<CopySegment<Self::Memory>>) -> Copying;

    /// Copies each segment from its place in `from`, which is memory of the same device, within it. Keeps `kept` until
    /// the copy has ended. The future alone starts nothing and cancels nothing, as for other copies. An engine that
    /// cannot do it refuses.
    fn copy_within(
        &self,
        from: Arc<Self::Memory>,
        to: Vec<CopySegment<Self::Memory>>,
        kept: Arc<dyn Any + Send + Sync>,
    ) -> BoxFuture<'static, Result<(), ShareError>> {
        drop((from, to, kept));
        let refused = ShareError::NotShareable { device: self.name().into() };
        Box::pin(std::future::ready(Err(refused)))
    }
}

/// A rectangle of device memory, and its place in a slot.
///
/// A chunk within one large tensor has one segment of one run; a chunk of many small tensors, each in its own memory, has
/// many; a chunk of which a reader wants some columns has one of many runs.
#[derive(Debug)]
pub struct CopySegment<M> {
    /// The memory, which the copy keeps until it has ended.
    pub memory: Arc<M>,
    /// The runs in the slot (`part`) and in the memory.
    pub rectangle: Rectangle,
}

impl<M> CopySegment<M> {
    /// The segment of `len` bytes at `offset` of `memory`, at the start of a slot.
    pub fn new(memory: &Arc<M>, offset: u64, len: usize) -> Self {
        Self { memory: Arc::clone(memory), rectangle: Rectangle::run(0, offset, len as u64) }
    }

    /// The same bytes of the memory, from `at` of a slot.
    #[must_use]
    pub fn at(mut self, at: usize) -> Self {
        self.rectangle.part = at as u64;
        self
    }
}

/// A copy in flight: resolves to its slot when the bytes are in place.
///
/// Dropping it cancels nothing; the slot then returns to its pool when the copy has ended.
#[derive(Debug)]
#[must_use = "the bytes are in place only when this resolves"]
pub struct Copying {
    end: oneshot::Receiver<Result<Slot, CopyError>>,
}

impl Copying {
    /// Makes both halves of a copy's handle: the engine reports the copy's end through the first, the caller awaits the
    /// second.
    pub fn pair() -> (Completion, Self) {
        let (completion, end) = oneshot::channel();
        (Completion { end: completion }, Self { end })
    }

    /// A copy that was refused. The engine that calls this drops the slot, which returns it to its pool.
    pub fn refused(error: CopyError) -> Self {
        let (completion, copying) = Self::pair();
        completion.finish(Err(error));
        copying
    }
}

impl Future for Copying {
    type Output = Result<Slot, CopyError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.end)
            .poll(cx)
            .map(|end| end.unwrap_or(Err(CopyError::EngineStopped)))
    }
}

/// The engine's half of a [`Copying`]. Dropping it unused reports [`CopyError::EngineStopped`].
#[derive(Debug)]
pub struct Completion {
    end: oneshot::Sender<Result<Slot, CopyError>>,
}

impl Completion {
    /// Reports how the copy ended. With `Ok`, the bytes are in place. If the waiter is gone, the slot returns to its
    /// pool here.
    pub fn finish(self, end: Result<Slot, CopyError>) {
        drop(self.end.send(end));
    }
}

/// Why a copy failed.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum CopyError {
    /// The caller's range is out of bounds of the memory or the slot. Nothing was written, and the slot is back in its
    /// pool.
    #[error(
        "A copy of {} times {} bytes, between offset {} of memory of {memory_bytes} bytes and offset {} of a slot of \
         {slot_bytes} bytes, is out of bounds. The chunk lies outside its tensor memory, or the pool's slots are too \
         short for it.",
        rectangle.runs,
        rectangle.run_bytes,
        rectangle.memory,
        rectangle.part
    )]
    OutOfBounds {
        /// The runs in the slot (`part`) and in the memory.
        rectangle: Rectangle,
        /// The length of the memory.
        memory_bytes: u64,
        /// The length of the slot.
        slot_bytes: usize,
    },
    /// The slot belongs to another engine, or to none. From memory that is not page-locked the copy would succeed but
    /// be slow, and nobody would notice. Nothing was written, and the slot is back in its pool.
    #[error(
        "The slot belongs to another engine, or to none. Take it from a pool that this engine's slots() made."
    )]
    ForeignSlot,
    /// The memory belongs to another engine, usually that of another device. Nothing was written, and the slot is back
    /// in its pool.
    #[error(
        "The memory belongs to another engine. Copy it with the engine that allocated it, or that it was lent to."
    )]
    ForeignMemory,
    /// The copy is so late that the device must have a problem. Its slot and memory are released if it ends after all.
    #[error(
        "A copy on {device} did not end within {waited:?}. The device has a problem, or other transfers fill its bus: look \
         at nvidia-smi, and at the kernel's log for Xid messages."
    )]
    TimedOut {
        /// The name of the engine.
        device: String,
        /// The time that the engine waited.
        waited: Duration,
    },
    /// The work on the caller's stream, which the copy waits for, takes too long. Nothing was written, and the slot is
    /// back in its pool.
    #[error(
        "A stream on {device} that a copy had to wait for did not finish its work within {waited:?}. The kernels on it take \
         that long, or hang: raise the fence timeout, or hand tensors over later."
    )]
    FenceTimedOut {
        /// The name of the engine.
        device: String,
        /// The time that the engine waited.
        waited: Duration,
    },
    /// The device has no memory that short runs could pass through. Nothing was written, and the slot is back in its pool.
    /// A retry may succeed.
    #[error(
        "{device} has no memory for one more slot, which chunks pass through that lie in short runs: {reason}. Raise the \
         engine's memory limit, or free device memory."
    )]
    NoScratch {
        /// The name of the engine.
        device: String,
        /// The allocation's error.
        reason: String,
    },
    /// The driver refused the copy. A retry may succeed. The content of the destination is unspecified.
    #[error("A copy on {device} was refused: {source}")]
    Refused {
        /// The name of the engine.
        device: String,
        /// The driver's error.
        source: CudaError,
    },
    /// The device failed, for the rest of this process. The content of the destination is unspecified.
    #[error("{device} has failed, and copies nothing any more: {source}")]
    DeviceFailed {
        /// The name of the engine.
        device: String,
        /// The failure.
        source: CudaError,
    },
    /// The engine ended before the copy did. The content of the destination is unspecified.
    #[error(
        "The copy engine has stopped before the copy ended. Make a new engine, and look for its first error."
    )]
    EngineStopped,
}

impl CopyError {
    /// Whether every later copy of the same bytes fails as well: the engine or its device is gone, or the request is
    /// invalid. A late or refused copy may succeed the next time.
    pub fn is_final(&self) -> bool {
        !matches!(
            self,
            Self::TimedOut { .. }
                | Self::FenceTimedOut { .. }
                | Self::NoScratch { .. }
                | Self::Refused { .. }
        )
    }

    /// Whether the copy may still write, because its end is unknown. Its memory must not be trusted or reused until the
    /// engine has released it.
    pub fn may_still_write(&self) -> bool {
        matches!(self, Self::TimedOut { .. } | Self::DeviceFailed { .. } | Self::EngineStopped)
    }
}

/// Checks the slot and all segments of a copy before it starts.
pub(crate) fn check_copy<M>(
    engine: Id,
    slot: &Slot,
    segments: &[CopySegment<M>],
    memory_len: impl Fn(&M) -> u64,
) -> Result<(), CopyError> {
    if slot.engine() != Some(engine) {
        return Err(CopyError::ForeignSlot);
    }
    let slot_bytes = slot.len();
    segments.iter().try_for_each(|segment| {
        let (rectangle, memory_bytes) = (segment.rectangle, memory_len(&segment.memory));
        let is_inside = rectangle.fits(&(0..slot_bytes as u64), memory_bytes);
        let refused = CopyError::OutOfBounds { rectangle, memory_bytes, slot_bytes };
        is_inside.then_some(()).ok_or(refused)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new_slot(engine: Id) -> Slot {
        let pool = SlotPool::of_engine(Capacity { slots: 1, slot_bytes: 100 }, engine).unwrap();
        pool.try_acquire().unwrap()
    }

    #[test]
    fn bounds_are_exact() {
        let engine = Id::unique();
        let slot = new_slot(engine);
        let memory = Arc::new(());
        let fits = |offset, len, at| {
            let segments = [CopySegment::new(&memory, 0, 1), CopySegment::new(&memory, offset, len).at(at)];
            check_copy(engine, &slot, &segments, |()| 150).is_ok()
        };
        assert!(fits(0, 100, 0) && fits(50, 100, 0) && fits(50, 99, 1) && fits(150, 0, 100));
        for (offset, len, at) in [(0, 101, 0), (51, 100, 0), (151, 0, 0), (0, 100, 1), (0, 0, 101)] {
            assert!(!fits(offset, len, at), "{offset} {len} {at}");
        }
        for (offset, len, at) in [(u64::MAX, 100, 0), (1, usize::MAX, 0), (0, 1, usize::MAX)] {
            assert!(!fits(offset, len, at), "{offset} {len} {at}");
        }
    }

    #[test]
    fn a_slot_of_another_engine_is_refused() {
        let segments = [CopySegment::new(&Arc::new(()), 0, 1)];
        let refused = check_copy(Id::unique(), &new_slot(Id::unique()), &segments, |()| 100);
        assert_eq!(refused, Err(CopyError::ForeignSlot));
    }

    #[tokio::test]
    async fn a_dropped_completion_reports_a_stopped_engine() {
        let (completion, copying) = Copying::pair();
        drop(completion);
        assert_eq!(copying.await.unwrap_err(), CopyError::EngineStopped);
    }
}
