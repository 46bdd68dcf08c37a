use std::{
    fmt,
    mem::{self, ManuallyDrop},
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::{
    error::CudaError,
    fence::Fence,
    inbox::{Command, Inbox},
    memory_owner::MemoryOwner,
    stream::StreamHandle,
};
use crate::id::Id;

/// Memory of a CUDA device that holds a tensor or a payload: the engine's own, or lent by a caller.
///
/// It is returned to its owner when it is dropped, no copy uses it any more, and every stream named to
/// [`in_use_until`](Self::in_use_until) has passed its work.
pub struct CudaMemory {
    id: Id,
    engine: Id,
    address: u64,
    len: usize,
    holding: MemoryOwner,
    /// The fences that must be passed before a copy begins or the memory is returned. Passed ones are dropped at the
    /// next check.
    fences: Mutex<Vec<Fence>>,
    inbox: Inbox,
}

impl CudaMemory {
    pub(super) fn new(engine: Id, address: u64, len: usize, holding: MemoryOwner, inbox: Inbox) -> Arc<Self> {
        let (id, fences) = (Id::unique(), Mutex::default());
        Arc::new(Self { id, engine, address, len, holding, fences, inbox })
    }

    /// Its device address. Valid for as long as this value lives; for work that outlasts it, see
    /// [`in_use_until`](Self::in_use_until).
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its size.
    pub fn len_bytes(&self) -> u64 {
        self.len as u64
    }

    /// A part of it, as memory of its own that keeps the whole; `None` if the range is out of bounds.
    ///
    /// Streams named to one of the two later are unknown to the other, and [`wait_on`](Self::wait_on) of the whole does
    /// not wait for copies of a part.
    pub fn slice(self: &Arc<Self>, range: Range<u64>) -> Option<Arc<Self>> {
        let len = range.end.checked_sub(range.start)?;
        if range.end > self.len_bytes() {
            return None;
        }
        let holding = MemoryOwner::Owner(Box::new(Arc::clone(self)));
        let address = self.address + range.start;
        let part = Self::new(self.engine, address, len as usize, holding, self.inbox.clone());
        self.fences().iter().for_each(|fence| part.hold_for(fence.clone()));
        Some(part)
    }

    /// Makes later work on `stream` wait for all copies to and from this memory requested before.
    ///
    /// Not needed after awaiting the copies: an end that the host has seen is visible to every stream. The calling
    /// thread waits for no copy, except for one that still waits for a fence. Fails after a device failure.
    pub fn wait_on(&self, stream: StreamHandle) -> Result<(), CudaError> {
        self.inbox.ask(|reply| Command::WaitMemory(self.id, stream, reply))?
    }

    /// Records that the current work on `stream` uses this memory: no later copy of it begins, and it is not returned,
    /// before that work has ended. The calling thread waits for no device.
    pub fn in_use_until(&self, stream: StreamHandle) -> Result<(), CudaError> {
        let fence = self.inbox.ask(|reply| Command::Fence(stream, reply))??;
        self.hold_for(fence);
        Ok(())
    }

    /// Releases the memory, once each of `streams` has passed the work on it when the engine's thread handles this. For
    /// destructors: it never blocks. If that cannot be determined, because the device failed or the stream is capturing
    /// a graph, the memory is leaked.
    pub fn give_up(self: Arc<Self>, streams: Vec<StreamHandle>) {
        let inbox = self.inbox.clone();
        // If the thread is gone, the memory is not reused.
        let _ = inbox.tell(Command::GiveUp(self, streams));
    }

    /// Adds a fence that must be passed first.
    pub(super) fn hold_for(&self, fence: Fence) {
        self.fences().push(fence);
    }

    /// Whether every fence is passed: `None` while one is not, an error if one failed.
    pub(super) fn is_free(&self) -> Option<Result<(), CudaError>> {
        are_passed(&mut self.fences())
    }

    pub(super) fn id(&self) -> Id {
        self.id
    }

    pub(super) fn engine(&self) -> Id {
        self.engine
    }

    fn fences(&self) -> MutexGuard<'_, Vec<Fence>> {
        self.fences.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Drops the passed fences, and tells whether all are: `None` while one is not.
pub(super) fn are_passed(fences: &mut Vec<Fence>) -> Option<Result<(), CudaError>> {
    let mut failed = None;
    fences.retain(|fence| match fence.verdict() {
        Some(Err(error)) => {
            failed = Some(error);
            true
        }
        verdict => verdict.is_none(),
    });
    match failed {
        Some(error) => Some(Err(error)),
        None => fences.is_empty().then_some(Ok(())),
    }
}

impl fmt::Debug for CudaMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaMemory")
            .field("device", &self.inbox.device())
            .field("address", &format_args!("{:#x}", self.address))
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        let holding = mem::replace(&mut self.holding, MemoryOwner::Nothing);
        let mut fences = mem::take(&mut *self.fences());
        let is_free = matches!(are_passed(&mut fences), Some(Ok(())));
        match holding {
            MemoryOwner::Nothing => {}
            // The caller's memory, which no stream uses any more.
            MemoryOwner::Owner(owner) if is_free => drop(owner),
            holding => {
                // Without the engine's thread, its users are unknown: it is leaked.
                let _ = self.inbox.tell(Command::TakeBack(ManuallyDrop::new(holding), fences));
            }
        }
    }
}
