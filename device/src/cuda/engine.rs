use std::{any::Any, fmt, sync::Arc};

use super::{
    devices::DeviceInfo,
    error::CudaError,
    fence::{Fence, StreamHandle},
    flight::Direction,
    inbox::{Command, Inbox, Job, MemoryOwner},
    memory::CudaMemory,
    options::CudaOptions,
    probe::probe,
    stats::{Counters, CudaStats},
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
/// It works in the device's primary context, which it shares with whatever else in the process uses the device, PyTorch
/// among it; and on streams of its own, which no other waits for. Copies in both directions run at once.
///
/// Every driver call is made by one thread of its own. Asking for a copy is a message to it, and costs its thread a few
/// microseconds. Dropping the engine returns at once: the thread ends when all copies have, and everything that the engine
/// gave out is back.
///
/// Nobody in the process may reset the device (`cudaDeviceReset`) while the engine lives. Where somebody does, copies
/// fail, and what they used is kept for good; slots stay memory that may be read.
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

    /// How it behaves.
    pub(super) fn options(&self) -> &CudaOptions {
        &self.options
    }

    /// Which device it is.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// What the engine did so far, and what it holds.
    pub fn stats(&self) -> CudaStats {
        self.counters.read()
    }

    /// Why the device does nothing any more, once it failed: every copy is refused then, for the rest of the process.
    pub fn failure(&self) -> Option<&CudaError> {
        self.counters.failure.get()
    }

    /// Makes a fence of the place where `stream` is now: passed when all has ended that is on it before this returns. The
    /// calling thread waits for no device.
    pub fn fence(&self, stream: StreamHandle) -> Result<Fence, CudaError> {
        self.inbox.ask(|reply| Command::Fence(stream, reply))?
    }

    /// The handle of a stream of the engine's own, for those who hand tensors over: they make it wait for their work, as
    /// DLPack's `stream` asks for, and [`fence_intake`](Self::fence_intake) tells when that is done. So no stream of
    /// anybody else's waits for anything. It lives as long as the engine, and nothing else may be put on it.
    pub fn intake(&self) -> Result<usize, CudaError> {
        self.inbox.ask(Command::Intake)?
    }

    /// Makes a fence of the place where that stream is now: passed when all is done that it was made to wait for.
    pub fn fence_intake(&self) -> Result<Fence, CudaError> {
        self.inbox.ask(Command::FenceIntake)?
    }

    /// Makes memory of the caller's a memory that this engine copies from and to, in place. No copy of it begins before
    /// `after` is passed. The engine waits for that by asking now and then, so no stream is kept waiting; a copy that
    /// waits for longer than the option `fence_timeout` fails.
    ///
    /// `owner` keeps the memory: it is dropped when no copy uses it any more and nobody holds the result. That may be on
    /// the engine's thread: dropping it must not wait for a lock that somebody holds who asks this engine for something.
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

    fn start(&self, direction: Direction, stretches: Vec<CopySegment<CudaMemory>>, slot: Slot) -> Copying {
        let judged = check_copy(self.id, &slot, &stretches, CudaMemory::len_bytes);
        let own = stretches.iter().all(|stretch| stretch.memory.engine() == self.id);
        let judged = judged.and(if own { Ok(()) } else { Err(CopyError::ForeignMemory) });
        if let Err(error) = judged {
            return Copying::refused(error);
        }
        let (done, copying) = Copying::pair();
        let done = self.waiters.add(done);
        // Where the thread is gone the job comes back and is dropped here, which reports `EngineStopped`.
        drop(self.inbox.tell(Command::Copy(Job { direction, slot, stretches, done })));
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
        // Where the thread is gone, it has ended already.
        let _ = self.inbox.tell(Command::Close);
    }
}
