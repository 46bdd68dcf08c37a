use std::{
    fmt,
    mem::{self, ManuallyDrop},
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::{
    error::CudaError,
    fence::{Fence, StreamHandle},
    inbox::{Command, Inbox, MemoryOwner},
};
use crate::id::Id;

/// Memory of a CUDA device that holds a tensor or a payload: the engine's own, or lent to it by a caller.
///
/// It goes back where it came from when nobody holds it any more, no copy to or from it runs, and every stream that was
/// named to [`in_use_until`](Self::in_use_until) is past its work.
pub struct CudaMemory {
    id: Id,
    engine: Id,
    address: u64,
    len: usize,
    holding: MemoryOwner,
    /// What streams must be past before a copy begins or the memory goes back. Passed ones are dropped at the next look.
    fences: Mutex<Vec<Fence>>,
    inbox: Inbox,
}

impl CudaMemory {
    pub(super) fn new(engine: Id, address: u64, len: usize, holding: MemoryOwner, inbox: Inbox) -> Arc<Self> {
        let (id, fences) = (Id::unique(), Mutex::default());
        Arc::new(Self { id, engine, address, len, holding, fences, inbox })
    }

    /// Where it is on the device. Valid for as long as this value lives; for work that outlasts it, see
    /// [`in_use_until`](Self::in_use_until).
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its bytes.
    pub fn len_bytes(&self) -> u64 {
        self.len as u64
    }

    /// A part of it, as memory of its own that keeps the whole; `None` where it does not lie in it.
    ///
    /// Streams that are named to one of the two from then on are not named to the other, and copies to a part are not
    /// among those that [`wait_on`](Self::wait_on) of the whole waits for.
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

    /// Makes what is put on `stream` from now on wait for all copies to and from this memory that were asked for before.
    ///
    /// Whoever awaited the copies need not: what the host has seen ended is seen by every stream. The calling thread
    /// waits for no copy, but where one still waits for a fence, for that. Fails when the device did.
    pub fn wait_on(&self, stream: StreamHandle) -> Result<(), CudaError> {
        self.inbox.ask(|reply| Command::WaitMemory(self.id, stream, reply))?
    }

    /// Says that what is on `stream` now uses this memory: no later copy to or from it begins, and it does not go back,
    /// before the stream is past that. The calling thread waits for no device.
    pub fn in_use_until(&self, stream: StreamHandle) -> Result<(), CudaError> {
        let fence = self.inbox.ask(|reply| Command::Fence(stream, reply))??;
        self.hold_for(fence);
        Ok(())
    }

    /// Lets the memory go, once each of `streams` is past what is on it by the time that the engine's thread hears of
    /// this. For destructors: it waits for nobody. Where that cannot be told of a stream, since the device failed or the
    /// stream is being captured into a graph, the memory is kept for good.
    pub fn give_up(self: Arc<Self>, streams: Vec<StreamHandle>) {
        let inbox = self.inbox.clone();
        // Where the thread is gone, nobody reuses the memory.
        let _ = inbox.tell(Command::GiveUp(self, streams));
    }

    /// Adds a fence to those that must be passed first.
    pub(super) fn hold_for(&self, fence: Fence) {
        self.fences().push(fence);
    }

    /// Whether every stream is past its work: `None` while one is not, an error where none can tell any more.
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

/// Drops the fences that are passed, and says whether all are: `None` while one is not.
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
                // Without the engine's thread nobody can tell when it is free: it is kept for good.
                let _ = self.inbox.tell(Command::TakeBack(ManuallyDrop::new(holding), fences));
            }
        }
    }
}
