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
    share::ShareError,
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
    source::BoxFuture,
};

/// The copy engine of one CUDA device.
///
/// It uses the device's primary context, shared with all other code in the process, PyTorch included, and streams of
/// its own. No other stream waits for these, unless a caller requests it ([`CudaMemory::wait_on`]). Copies in both
/// directions run at the same time.
///
/// One thread per engine makes all driver calls. Requesting a copy sends it a message, which takes that thread a few
/// microseconds. Dropping the engine does not block: the thread ends when all copies have ended and all memory has been
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
    /// Opens the device `cuda:ordinal`. Takes some hundred milliseconds if the process has no context on it yet.
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

    /// The engine's options.
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

    /// The error with which the device failed, if it did: every copy is refused from then on, for the rest of the
    /// process.
    pub fn failure(&self) -> Option<&CudaError> {
        self.counters.failure.get()
    }

    /// Records a fence on `stream`, which is passed when all work submitted to the stream before this call has ended.
    /// The calling thread does not wait for the device.
    pub fn fence(&self, stream: StreamHandle) -> Result<Fence, CudaError> {
        self.inbox.request(|reply| Command::Fence(stream, reply))?
    }

    /// The intake: a stream of the engine's own, passed to producers of tensors as DLPack's `stream` argument.
    /// Producers make the intake wait for their work, and [`fence_intake`](Self::fence_intake) reports when that work
    /// has ended; the producers' own streams wait for nothing. The intake lives as long as the engine, and nothing else
    /// may be submitted to it.
    pub fn intake(&self) -> Result<usize, CudaError> {
        self.inbox.request(Command::Intake)?
    }

    /// Records a fence on the intake, which is passed when all work that the intake waits for has ended.
    pub fn fence_intake(&self) -> Result<Fence, CudaError> {
        self.inbox.request(Command::FenceIntake)?
    }

    /// Lends the caller's memory to this engine, which copies from and to it in place. No copy of the memory begins
    /// before `after` is passed. The engine polls the fence, so that no stream has to wait; a copy that waits longer
    /// than the option `fence_timeout` fails.
    ///
    /// `owner` keeps the memory: it is dropped when the result is dropped, no copy uses the memory any more, and all
    /// work recorded by [`CudaMemory::record_use`] has ended, possibly on the engine's thread. So its destructor must
    /// not wait for a lock held by a caller of this engine.
    ///
    /// # Safety
    ///
    /// While `owner` lives, the `len` bytes at `address` are memory of this engine's device, allocated in its primary
    /// context, and stay allocated. While a copy to the memory runs, nobody else reads or writes it; while a copy from
    /// it runs, nobody writes it. Work submitted to streams earlier that writes the memory has ended when `after` is
    /// passed.
    pub unsafe fn lend(
        &self,
        address: u64,
        len: usize,
        owner: impl Any + Send + Sync,
        after: Option<Fence>,
    ) -> Arc<CudaMemory> {
        let owner = MemoryOwner::Caller(Box::new(owner), len as u64);
        let memory = CudaMemory::new(self.id, address, len, owner, self.inbox.clone());
        after.into_iter().for_each(|fence| memory.add_fence(fence));
        memory
    }

    fn start(&self, direction: Direction, segments: Vec<CopySegment<CudaMemory>>, slot: Slot) -> Copying {
        let checked = check_copy(self.id, &slot, &segments, CudaMemory::len_bytes);
        let own = segments.iter().all(|segment| segment.memory.engine() == self.id);
        let checked = checked.and(if own { Ok(()) } else { Err(CopyError::ForeignMemory) });
        if let Err(error) = checked {
            return Copying::refused(error);
        }
        let (completion, copying) = Copying::pair();
        let waiter = self.waiters.add(completion);
        // If the thread is gone, the job is returned and dropped here, which reports `EngineStopped`.
        drop(self.inbox.send(Command::Copy(Job { direction, slot, segments, waiter })));
        copying
    }
}

impl CopyEngine for CudaEngine {
    type Memory = CudaMemory;

    fn name(&self) -> &str {
        self.inbox.device()
    }

    fn allocate(&self, len: usize) -> Result<Arc<CudaMemory>, AllocError> {
        let answer = self.inbox.request(|reply| Command::Allocate(len, reply));
        answer.unwrap_or_else(|source| Err(self.no_memory(source)))
    }

    fn slots(&self, capacity: Capacity) -> Result<SlotPool, AllocError> {
        let len = SlotPool::memory_len(capacity)?;
        let answer = self.inbox.request(|reply| Command::Lock(len, reply));
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

    fn copy_within(
        &self,
        from: Arc<CudaMemory>,
        to: Vec<CopySegment<CudaMemory>>,
        kept: Arc<dyn Any + Send + Sync>,
    ) -> BoxFuture<'static, Result<(), ShareError>> {
        self.copy_from(from, to, kept)
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
        // Fails if the thread has ended already.
        let _ = self.inbox.send(Command::Close);
    }
}
