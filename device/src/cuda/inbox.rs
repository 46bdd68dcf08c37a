use std::{
    any::Any,
    fmt,
    mem::ManuallyDrop,
    os::fd::OwnedFd,
    sync::{
        Arc,
        mpsc::{self, RecvTimeoutError, Sender, SyncSender},
    },
    time::Duration,
};

use super::{
    error::CudaError,
    fence::{Fence, StreamHandle},
    flight::Direction,
    holdings::Shared,
    memory::CudaMemory,
    memory_cache::Block,
    page_locked::PageLocked,
    share::{Exported, Imported, ShareError},
    shares::ExportRequest,
    waiters::Ticket,
};
use crate::{engine::CopySegment, host_memory::AllocError, id::Id, mapping::Mapping, slot::Slot};

/// The way to an engine's thread: everything that wants something of the device puts it here.
///
/// Nothing is lost in it while the thread lives, and putting something in never waits. Its bound is in what it carries:
/// a copy owns a slot of the engine, a ring belongs to a copy in flight, a gift comes once for each thing that was given
/// out, and who asks a question waits for the answer.
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

    /// Tells the thread; gives the command back where there is no thread any more.
    pub(super) fn tell(&self, command: Command) -> Result<(), Command> {
        self.sender.send(command).map_err(|mpsc::SendError(command)| command)
    }

    /// Asks the thread, and waits for its answer up to a deadline. The thread comes to the question all the same: an
    /// answer after that is dropped by it, and so is what it carries. A stream in the question is used even then, and kept
    /// by its handle.
    pub(super) fn ask<T>(&self, question: impl FnOnce(Reply<T>) -> Command) -> Result<T, CudaError> {
        self.ask_for(self.answer_timeout, question)
    }

    /// The same for what the thread itself waits for: `patience` is longer than that.
    pub(super) fn ask_for<T>(
        &self,
        patience: Duration,
        question: impl FnOnce(Reply<T>) -> Command,
    ) -> Result<T, CudaError> {
        let stopped = || CudaError::Stopped { device: self.device.to_string() };
        let (reply, answer) = mpsc::sync_channel(1); // One answer: sending it never waits.
        self.tell(question(reply)).map_err(|_| stopped())?;
        answer.recv_timeout(patience).map_err(|missing| match missing {
            RecvTimeoutError::Disconnected => stopped(),
            RecvTimeoutError::Timeout => {
                CudaError::NoAnswer { device: self.device.to_string(), waited: patience }
            }
        })
    }
}

/// Where an answer goes.
pub(super) type Reply<T> = SyncSender<T>;

/// What an engine's thread is told.
///
/// What must not be freed without the thread is in a `ManuallyDrop`: a command that nobody handles keeps it for good.
#[derive(Debug)]
pub(super) enum Command {
    /// Begin a copy.
    Copy(Job),
    /// The device rings: a copy of this direction has ended, or will have by the time it is asked after.
    Rang(Direction),
    /// Give device memory.
    Allocate(usize, Reply<Result<Arc<CudaMemory>, AllocError>>),
    /// Give page-locked host memory.
    Lock(usize, Reply<Result<PageLocked, AllocError>>),
    /// Give memory that another process can have too, and a descriptor of it.
    Buffer(usize, Reply<Result<(Arc<CudaMemory>, OwnedFd), ShareError>>),
    /// Give memory that another process has shared.
    Import(Exported, Reply<Result<Imported, ShareError>>),
    /// Share memory, once the streams that write it are past that.
    Share(ExportRequest),
    /// Take back memory that nobody uses any more, once the streams that may still do are past these fences.
    TakeBack(ManuallyDrop<MemoryOwner>, Vec<Fence>),
    /// Let a memory go, once these streams are past what is on them by now.
    GiveUp(Arc<CudaMemory>, Vec<StreamHandle>),
    /// Take back page-locked memory that nobody uses any more.
    Unlock(ManuallyDrop<Mapping>),
    /// Record where a caller's stream is now.
    Fence(StreamHandle, Reply<Result<Fence, CudaError>>),
    /// Name the stream that those who hand tensors over make wait for their work.
    Intake(Reply<Result<usize, CudaError>>),
    /// Record where that stream is now.
    FenceIntake(Reply<Result<Fence, CudaError>>),
    /// Let a caller's stream wait for a fence.
    WaitFence(u64, StreamHandle, Reply<Result<(), CudaError>>),
    /// Nobody has this fence any more.
    DropFence(u64),
    /// Let a caller's stream wait for all copies to and from a memory that were asked for before.
    WaitMemory(Id, StreamHandle, Reply<Result<(), CudaError>>),
    /// The engine was dropped: end when everything that was given out is back.
    Close,
}

/// A copy that was judged good. Until it begins, dropping it returns its slot and reports that the engine has stopped.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) direction: Direction,
    pub(super) slot: Slot,
    pub(super) stretches: Vec<CopySegment<CudaMemory>>,
    pub(super) done: Ticket,
}

/// What somebody's memory consists of.
pub(super) enum MemoryOwner {
    /// Memory of the engine's own.
    Block(Block),
    /// Memory that another process has too.
    Shared(Shared),
    /// A caller's memory: whatever keeps it alive.
    Owner(Box<dyn Any + Send + Sync>),
    /// No byte.
    Nothing,
}

impl fmt::Debug for MemoryOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Block(block) => block.fmt(f),
            Self::Shared(shared) => shared.fmt(f),
            Self::Owner(_) => f.write_str("Owner"),
            Self::Nothing => f.write_str("Nothing"),
        }
    }
}
