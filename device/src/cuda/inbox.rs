use std::{
    mem::ManuallyDrop,
    os::fd::OwnedFd,
    sync::{
        Arc,
        mpsc::{self, RecvTimeoutError, Sender, SyncSender},
    },
    time::Duration,
};

use super::{
    driver::IpcHandle,
    error::CudaError,
    fence::Fence,
    flight::Direction,
    memory::CudaMemory,
    memory_owner::MemoryOwner,
    page_locked::PageLocked,
    share::{Exported, Imported, ShareError},
    shares::ExportRequest,
    stream::StreamHandle,
    waiters::WaiterHandle,
};
use crate::{engine::CopySegment, host_memory::AllocError, id::Id, mapping::Mapping, slot::Slot};

/// The command queue of an engine's thread, through which every request to the device goes.
///
/// No command is lost while the thread lives, and sending never blocks. The queue is bounded by what its commands stand
/// for: a copy owns a slot of the engine, a signal belongs to a copy in flight, memory is returned once, and a caller
/// waits for its answer.
#[derive(Debug, Clone)]
pub(super) struct Inbox {
    sender: Sender<Command>,
    /// The engine's name, for messages.
    device: Arc<str>,
    answer_timeout: Duration,
}

impl Inbox {
    pub(super) fn new(sender: Sender<Command>, device: Arc<str>, answer_timeout: Duration) -> Self {
        Self { sender, device, answer_timeout }
    }

    pub(super) fn device(&self) -> &str {
        &self.device
    }

    /// Sends a command; returns the command if the thread has ended.
    pub(super) fn send(&self, command: Command) -> Result<(), Command> {
        self.sender.send(command).map_err(|mpsc::SendError(command)| command)
    }

    /// Sends a request and waits up to `answer_timeout` for its answer. The thread handles the request even after that,
    /// and drops a late answer with the memory or fence in it. It then still uses a stream named in the request: the
    /// `StreamHandle` in it keeps the stream alive.
    pub(super) fn request<T>(&self, request: impl FnOnce(Reply<T>) -> Command) -> Result<T, CudaError> {
        self.request_within(self.answer_timeout, request)
    }

    /// Like `request`, with another timeout, for requests whose answer has to wait for streams or copies.
    pub(super) fn request_within<T>(
        &self,
        timeout: Duration,
        request: impl FnOnce(Reply<T>) -> Command,
    ) -> Result<T, CudaError> {
        let stopped = || CudaError::Stopped { device: self.device.to_string() };
        let (reply, answer) = mpsc::sync_channel(1); // Room for the one answer, so sending it never blocks.
        self.send(request(reply)).map_err(|_| stopped())?;
        answer.recv_timeout(timeout).map_err(|missing| match missing {
            RecvTimeoutError::Disconnected => stopped(),
            RecvTimeoutError::Timeout => {
                CudaError::NoAnswer { device: self.device.to_string(), waited: timeout }
            }
        })
    }
}

/// The sender of an answer.
pub(super) type Reply<T> = SyncSender<T>;

/// A command to an engine's thread.
///
/// Memory that only the thread may free is in a `ManuallyDrop`: dropping an unhandled command leaks the memory.
#[derive(Debug)]
pub(super) enum Command {
    /// Start a copy.
    Copy(Job),
    /// The device's signal that a copy of this direction has ended.
    Signal(Direction),
    /// Allocate device memory.
    Allocate(usize, Reply<Result<Arc<CudaMemory>, AllocError>>),
    /// Allocate page-locked host memory.
    Lock(usize, Reply<Result<PageLocked, AllocError>>),
    /// Allocate device memory that can be shared, with its descriptor.
    Buffer(usize, Reply<Result<(Arc<CudaMemory>, OwnedFd), ShareError>>),
    /// Allocate device memory that other processes can open, with its handle.
    OpenableBuffer(usize, Reply<Result<(Arc<CudaMemory>, IpcHandle), ShareError>>),
    /// Import memory of another process.
    Import(Exported, Reply<Result<Imported, ShareError>>),
    /// Export memory, once the streams that write it have passed their fences.
    Share(ExportRequest),
    /// Take back unused memory, to be freed once these fences are passed.
    TakeBack(ManuallyDrop<MemoryOwner>, Vec<Fence>),
    /// Release memory, once these streams have passed their current work.
    ReleaseAfter(Arc<CudaMemory>, Vec<StreamHandle>),
    /// Take back unused page-locked memory.
    Unlock(ManuallyDrop<Mapping>),
    /// Record a fence on a caller's stream.
    Fence(StreamHandle, Reply<Result<Fence, CudaError>>),
    /// Reply with the handle of the intake stream.
    Intake(Reply<Result<usize, CudaError>>),
    /// Record a fence on the intake stream.
    FenceIntake(Reply<Result<Fence, CudaError>>),
    /// Make a caller's stream wait for a fence.
    WaitFence(u64, StreamHandle, Reply<Result<(), CudaError>>),
    /// Forget a dropped fence.
    DropFence(u64),
    /// Make a caller's stream wait for all copies of a memory requested before.
    WaitMemory(Id, StreamHandle, Reply<Result<(), CudaError>>),
    /// The engine was dropped: end when all memory given out is returned.
    Close,
}

/// A checked copy. Until it begins, dropping it returns its slot and reports that the engine has stopped.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) direction: Direction,
    pub(super) slot: Slot,
    pub(super) segments: Vec<CopySegment<CudaMemory>>,
    pub(super) waiter: WaiterHandle,
}
