use std::{any::Any, fmt, sync::Arc};

use super::{
    devices::DeviceInfo,
    error::CudaError,
    fence::Fence,
    flight::Direction,
    inbox::{Command, Inbox, Job},
    memory::CudaMemory,
    memory_owner::MemoryOwner,
    options::CudaOptions,
    probe::probe,
    stats::{Counters, CudaStats},
    stream::StreamHandle,
    thread::{self, Started},
    waiters::Waiters,
};
use crate::{
    engine::{CopyEngine, CopyError, CopySegment, Copying, check_copy},
    host_memory::AllocError,
    id::Id,
    pool::{Capacity, SlotPool},
    region::Region,
    slot::Slot,
};

/// The copy engine of one CUDA device.
///
/// It uses the device's primary context, shared with the rest of the process, PyTorch included, and streams of its own,
/// which no other stream waits for. Copies in both directions run at once.
///
/// Every driver call is made by one thread of its own. Asking for a copy is a message to it, and costs its thread a few
/// microseconds. Dropping the engine returns at once: the thread ends when all copies have, and all its memory has been
/// returned.
///
/// Nobody in the process may reset the device (`cudaDeviceReset`) while the engine lives. After a reset, copies fail
/// and their memory is leaked; slots stay readable.
pub struct CudaEngine {
    id: Id,
    info: DeviceInfo,
    inbox: Inbox,
    counters: Arc<Counters>,
    waiters: Waiters,
    options: CudaOptions,
}

impl CudaEngine {
    /// Opens the device `cuda:ordinal`. Takes some hundred milliseconds where nothing else in the process uses it yet.
    pub fn open(ordinal: usize, options: CudaOptions) -> Result<Arc<Self>, CudaError> {
        let id = Id::unique();
        let Started { info, inbox, counters, waiters } = thread::start(probe()?, ordinal, id, &options)?;
        Ok(Arc::new(Self { id, info, inbox, counters, waiters, options }))
    }

    pub(super) fn id(&self) -> Id {
        self.id
    }

    pub(super) fn inbox(&self) -> &Inbox {
        &self.inbox
    }

    /// Its options.
    pub(super) fn options(&self) -> &CudaOptions {
        &self.options
    }

    /// The device's properties.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// The engine's counters.
    pub fn stats(&self) -> CudaStats {
        self.counters.read()
    }

    /// The device failure, if it failed: every copy is refused from then on, for the rest of the process.
    pub fn failure(&self) -> Option<&CudaError> {
        self.counters.failure.get()
    }

    /// Records a fence on `stream`: passed when all work on it at the return of this call has ended. The calling thread
    /// waits for no device.
    pub fn fence(&self, stream: StreamHandle) -> Result<Fence, CudaError> {
        self.inbox.ask(|reply| Command::Fence(stream, reply))?
    }

    /// The intake: a stream of the engine's own, passed to producers of tensors as DLPack's `stream` argument. They
    /// make it wait for their work, and [`fence_intake`](Self::fence_intake) reports when that is done, so that no
    /// foreign stream waits for anything. It lives as long as the engine, and nothing else may be submitted to it.
    pub fn intake(&self) -> Result<usize, CudaError> {
        self.inbox.ask(Command::Intake)?
    }

    /// Records a fence on the intake: passed when all work that it was made to wait for has ended.
    pub fn fence_intake(&self) -> Result<Fence, CudaError> {
        self.inbox.ask(Command::FenceIntake)?
    }

    /// Lends the caller's memory to this engine, which copies from and to it in place. No copy of it begins before
    /// `after` is passed. The engine polls for that, so no stream is kept waiting; a copy that waits longer than the
    /// option `fence_timeout` fails.
    ///
    /// `owner` keeps the memory: it is dropped when no copy uses it any more and the result is dropped. That may be on
    /// the engine's thread: its destructor must not wait for a lock held by a caller of this engine.
    ///
    /// # Safety
    ///
    /// While `owner` lives, `address` and `len` name memory of this engine's device, allocated in its primary context,
    /// that stays allocated. While a copy to it runs, nobody else reads or writes it; while a copy from it runs, nobody
    /// writes it, and what was put on streams before to write it is behind `after`.
    pub unsafe fn lend(
        &self,
        address: u64,
        len: usize,
        owner: impl Any + Send + Sync,
        after: Option<Fence>,
    ) -> Arc<CudaMemory> {
        let holding = MemoryOwner::Owner(Box::new(owner));
        let memory = CudaMemory::new(self.id, address, len, holding, self.inbox.clone());
        after.into_iter().for_each(|fence| memory.hold_for(fence));
        memory
    }

    fn start(&self, direction: Direction, segments: Vec<CopySegment<CudaMemory>>, slot: Slot) -> Copying {
        let judged = check_copy(self.id, &slot, &segments, CudaMemory::len_bytes);
        let own = segments.iter().all(|segment| segment.memory.engine() == self.id);
        let judged = judged.and(if own { Ok(()) } else { Err(CopyError::ForeignMemory) });
        if let Err(error) = judged {
            return Copying::refused(error);
        }
        let (done, copying) = Copying::pair();
        let done = self.waiters.add(done);
        // If the thread is gone, the job is returned and dropped here, which reports `EngineStopped`.
        drop(self.inbox.tell(Command::Copy(Job { direction, slot, segments, done })));
        copying
    }
}

impl CopyEngine for CudaEngine {
    type Memory = CudaMemory;

    fn name(&self) -> &str {
        self.inbox.device()
    }

    fn allocate(&self, len: usize) -> Result<Arc<CudaMemory>, AllocError> {
        let answer = self.inbox.ask(|reply| Command::Allocate(len, reply));
        answer.unwrap_or_else(|source| Err(self.no_memory(source)))
    }

    fn slots(&self, capacity: Capacity) -> Result<SlotPool, AllocError> {
        let len = SlotPool::memory_len(capacity)?;
        let answer = self.inbox.ask(|reply| Command::Lock(len, reply));
        let locked = answer.unwrap_or_else(|source| Err(self.no_memory(source)))?;
        Ok(SlotPool::cut(Region::new(locked), capacity, Some(self.id)))
    }

    fn memory_len(&self, memory: &CudaMemory) -> u64 {
        memory.len_bytes()
    }

    fn copy_out(&self, from: Vec<CopySegment<CudaMemory>>, slot: Slot) -> Copying {
        self.start(Direction::Out, from, slot)
    }

    fn copy_in(&self, slot: Slot, to: Vec<CopySegment<CudaMemory>>) -> Copying {
        self.start(Direction::In, to, slot)
    }
}

impl CudaEngine {
    fn no_memory(&self, source: CudaError) -> AllocError {
        AllocError::Device { device: self.name().into(), source }
    }
}

impl fmt::Debug for CudaEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaEngine")
            .field("info", &self.info)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

impl Drop for CudaEngine {
    fn drop(&mut self) {
        // Without the thread, the engine has ended already.
        let _ = self.inbox.tell(Command::Close);
    }
}
