use crate::Lock;
use std::{
    fmt,
    mem::{self, ManuallyDrop},
    ops::Range,
    sync::Arc,
};

use super::{
    error::CudaError,
    fence::Fence,
    inbox::{Command, Inbox},
    memory_owner::MemoryOwner,
    stream::StreamHandle,
};
use crate::id::Id;

/// Memory of a CUDA device that holds a tensor or a payload: the engine's own, lent by a caller, or imported from
/// another process.
///
/// It goes back to its owner when it is dropped, no copy uses it any more, and all work recorded by
/// [`record_use`](Self::record_use) has ended.
pub struct CudaMemory {
    id: Id,
    engine: Id,
    address: u64,
    len: usize,
    owner: MemoryOwner,
    /// The fences that must be passed before a copy begins or the memory goes back to its owner. Passed fences are
    /// dropped at the next check.
    fences: Lock<Vec<Fence>>,
    inbox: Inbox,
}

impl CudaMemory {
    pub(super) fn new(engine: Id, address: u64, len: usize, owner: MemoryOwner, inbox: Inbox) -> Arc<Self> {
        let (id, fences) = (Id::unique(), Lock::default());
        Arc::new(Self { id, engine, address, len, owner, fences, inbox })
    }

    /// The device address, valid for as long as this value lives. For work on streams that outlasts this value, see
    /// [`record_use`](Self::record_use).
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The size of the memory.
    pub fn len_bytes(&self) -> u64 {
        self.len as u64
    }

    /// The memory of `range`, as a value of its own that keeps `self` alive; `None` if the range is out of bounds.
    ///
    /// A stream that is passed to [`record_use`](Self::record_use) of one of the two values later does not delay copies
    /// of the other, and [`wait_on`](Self::wait_on) of `self` does not wait for copies of the part.
    pub fn slice(self: &Arc<Self>, range: Range<u64>) -> Option<Arc<Self>> {
        let len = range.end.checked_sub(range.start)?;
        if range.end > self.len_bytes() {
            return None;
        }
        let owner = MemoryOwner::Caller(Box::new(Arc::clone(self)), len);
        let address = self.address + range.start;
        let part = Self::new(self.engine, address, len as usize, owner, self.inbox.clone());
        self.fences.lock().iter().for_each(|fence| part.add_fence(fence.clone()));
        Some(part)
    }

    /// Makes later work on `stream` wait for all copies to and from this memory requested before.
    ///
    /// Not needed after awaiting the copies: the bytes of an awaited copy are visible to every stream. Blocks the
    /// calling thread only until copies that are still waiting for a fence have been submitted; it does not wait for
    /// copies already on the device. Fails after a device failure.
    pub fn wait_on(&self, stream: StreamHandle) -> Result<(), CudaError> {
        self.inbox.request(|reply| Command::WaitMemory(self.id, stream, reply))?
    }

    /// Records that the current work on `stream` uses this memory: before that work has ended, no later copy of the
    /// memory begins, and the memory does not go back to its owner. The calling thread does not wait for the device.
    pub fn record_use(&self, stream: StreamHandle) -> Result<(), CudaError> {
        let fence = self.inbox.request(|reply| Command::Fence(stream, reply))??;
        self.add_fence(fence);
        Ok(())
    }

    /// Drops this reference to the memory, and lets the memory go back to its owner only when each of `streams` has
    /// finished the work submitted before the engine's thread handles this request. Never blocks: for destructors. If
    /// the end of that work cannot be determined, because the device failed, the engine has ended or a stream is being
    /// captured into a graph, the memory is leaked.
    pub fn release_after(self: Arc<Self>, streams: Vec<StreamHandle>) {
        let (inbox, is_used) = (self.inbox.clone(), !streams.is_empty());
        if let Err(command) = inbox.send(Command::ReleaseAfter(self, streams))
            && is_used
        {
            mem::forget(command); // The thread has ended, so the end of the work is unknown.
        }
    }

    /// Adds a fence that must be passed before a copy begins or the memory goes back to its owner.
    pub(super) fn add_fence(&self, fence: Fence) {
        self.fences.lock().push(fence);
    }

    /// Drops the passed fences. Returns an error if one failed, otherwise `None` while any is not passed.
    pub(super) fn poll_fences(&self) -> Option<Result<(), CudaError>> {
        poll_fences(&mut self.fences.lock())
    }

    pub(super) fn id(&self) -> Id {
        self.id
    }

    pub(super) fn engine(&self) -> Id {
        self.engine
    }
}

/// Drops the passed fences. Returns an error if one failed, otherwise `None` while any is not passed.
pub(super) fn poll_fences(fences: &mut Vec<Fence>) -> Option<Result<(), CudaError>> {
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
        let owner = mem::replace(&mut self.owner, MemoryOwner::Nothing);
        let mut fences = mem::take(&mut *self.fences.lock());
        let is_free = matches!(poll_fences(&mut fences), Some(Ok(())));
        match owner {
            MemoryOwner::Nothing => {}
            // A caller's memory that no stream uses any more needs no command.
            MemoryOwner::Caller(owner, _) if is_free => drop(owner),
            owner => {
                // If the engine's thread has ended, nobody can tell who uses the memory: it is leaked.
                let _ = self.inbox.send(Command::TakeBack(ManuallyDrop::new(owner), fences));
            }
        }
    }
}
