use std::{
    ops::Range,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use tokio::sync::oneshot;

use crate::{
    host_memory::AllocError,
    id::Id,
    pool::{Capacity, SlotPool},
    slot::Slot,
};

/// Copies bytes between slots and the memory of one kind of device.
///
/// The contract, which every engine keeps, and which the module `cases` tests (feature `engine-cases`):
///
/// - A copy starts when it is asked for, not when its future is first polled, and it runs to its end, whether
///   or not anybody waits for it.
/// - Until then it owns its slot and holds its tensor memory: dropping a [`Copying`] early, or the engine
///   itself, frees nothing under a running copy. Only afterwards does the slot come back.
/// - An engine that cannot tell whether a copy has ended, because its device failed, reports an error and
///   keeps slot and memory for good: what leaks is lost once, what is freed under a copy corrupts somebody
///   else.
/// - Copies of one engine may end in any order. The bytes of a copy are visible when its future resolves.
/// - Bounds are checked before anything starts. A refused copy gives its slot back to the pool at once.
/// - Asking for a copy never blocks and never waits. No queue is needed that could be full: every copy in
///   flight owns a slot that this engine made, so there are never more than these.
/// - A device can hang. The engine sets no deadline: the caller puts one around the future.
pub trait CopyEngine: Send + Sync + 'static {
    /// Memory of this engine's device that holds a tensor or a payload.
    type Memory: Send + Sync + 'static;

    /// A short name for messages and metrics: `host`, `cuda:0`.
    fn name(&self) -> &str;

    /// Takes `len` bytes of device memory, of unspecified content. May block for milliseconds: call it once
    /// per payload, and not where latency counts. The memory is given back with the last clone of the `Arc`.
    fn allocate(&self, len: usize) -> Result<Arc<Self::Memory>, AllocError>;

    /// Makes a pool of slots that this engine can copy from and to: page-locked where the device asks for it.
    /// May block for as long as page-locking takes, so make pools at the start.
    fn slots(&self, capacity: Capacity) -> Result<SlotPool, AllocError>;

    /// The bytes that `memory` holds.
    fn memory_len(&self, memory: &Self::Memory) -> u64;

    /// Copies `len` bytes at `offset` of `src` to the start of `slot`. The rest of the slot stays as it is.
    fn copy_out(&self, src: &Arc<Self::Memory>, offset: u64, len: usize, slot: Slot) -> Copying;

    /// Copies the first `len` bytes of `slot` to `offset` of `dst`.
    ///
    /// Copies of overlapping ranges of one memory at one time leave either's bytes in the overlap.
    fn copy_in(&self, slot: Slot, len: usize, dst: &Arc<Self::Memory>, offset: u64) -> Copying;
}

/// A copy in flight: resolves to its slot when the bytes are in place.
///
/// It is a view of the copy, not the copy: dropping it cancels nothing, and the slot goes to its pool when
/// the copy has ended.
#[derive(Debug)]
#[must_use = "the bytes are in place only when this resolves"]
pub struct Copying {
    end: oneshot::Receiver<Result<Slot, CopyError>>,
}

impl Copying {
    /// Makes a copy's two ends: the engine reports to the first, the caller waits for the second.
    pub fn pair() -> (Completion, Self) {
        let (completion, end) = oneshot::channel();
        (Completion { end: completion }, Self { end })
    }

    /// A copy that ended before it began. The caller of this drops the slot.
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

/// The engine's end of a [`Copying`]. Dropping it unused reports [`CopyError::EngineStopped`].
#[derive(Debug)]
pub struct Completion {
    end: oneshot::Sender<Result<Slot, CopyError>>,
}

impl Completion {
    /// Reports how the copy ended. With `Ok`, the bytes are in place. Where nobody waits any more, the slot
    /// goes to its pool here.
    pub fn finish(self, end: Result<Slot, CopyError>) {
        // A refused send hands the slot back, and dropping that is all there is left to do.
        drop(self.end.send(end));
    }
}

/// Why a copy did not happen.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum CopyError {
    /// The caller asked for bytes that the memory or the slot does not have. Nothing was written, and the
    /// slot is back in its pool.
    #[error(
        "A copy of {len} bytes at offset {offset} does not fit into memory of {memory_bytes} bytes and a slot of \
         {slot_bytes} bytes. The chunk lies outside its tensor memory, or the pool's slots are too short for it."
    )]
    OutOfBounds {
        /// Where the copy was to begin in the memory.
        offset: u64,
        /// The bytes to copy.
        len: usize,
        /// The bytes that the memory has.
        memory_bytes: u64,
        /// The bytes that the slot has.
        slot_bytes: usize,
    },
    /// The caller gave a slot that this engine did not make, which need not be page-locked: the copy could be
    /// slow without a word. Nothing was written, and the slot is back in its pool.
    #[error(
        "The slot belongs to another engine, or to none. Take it from a pool that this engine's slots() made."
    )]
    ForeignSlot,
    /// The engine ended before the copy did. What the copy was to write is unspecified, in part or in whole.
    #[error(
        "The copy engine has stopped before the copy ended. Make a new engine, and look for its first error."
    )]
    EngineStopped,
}

/// Judges a copy before it starts, and gives the range of the memory that it touches.
pub(crate) fn check_copy(
    engine: Id,
    slot: &Slot,
    memory_bytes: usize,
    offset: u64,
    len: usize,
) -> Result<Range<usize>, CopyError> {
    if slot.engine() != Some(engine) {
        return Err(CopyError::ForeignSlot);
    }
    let slot_bytes = slot.len();
    let begin = usize::try_from(offset).ok();
    let range = begin.and_then(|begin| Some(begin..begin.checked_add(len)?));
    range
        .filter(|range| range.end <= memory_bytes && len <= slot_bytes)
        .ok_or(CopyError::OutOfBounds { offset, len, memory_bytes: memory_bytes as u64, slot_bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(engine: Id) -> Slot {
        let pool = SlotPool::of_engine(Capacity { slots: 1, slot_bytes: 100 }, engine).unwrap();
        pool.try_acquire().unwrap()
    }

    #[test]
    fn bounds_hold_at_their_edges() {
        let engine = Id::unique();
        let slot = slot(engine);
        let check = |offset, len| check_copy(engine, &slot, 150, offset, len).ok();
        assert_eq!(check(0, 100), Some(0..100));
        assert_eq!(check(50, 100), Some(50..150));
        assert_eq!(check(150, 0), Some(150..150));
        assert_eq!(check(0, 101), None);
        assert_eq!(check(51, 100), None);
        assert_eq!(check(151, 0), None);
        assert_eq!(check(u64::MAX, 100), None);
        assert_eq!(check(1, usize::MAX), None);
    }

    #[test]
    fn a_slot_of_another_engine_is_refused() {
        let refused = check_copy(Id::unique(), &slot(Id::unique()), 100, 0, 1);
        assert_eq!(refused, Err(CopyError::ForeignSlot));
    }

    #[tokio::test]
    async fn an_engine_that_forgets_a_copy_has_stopped() {
        let (completion, copying) = Copying::pair();
        drop(completion);
        assert_eq!(copying.await.unwrap_err(), CopyError::EngineStopped);
    }
}
