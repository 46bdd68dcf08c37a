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
    error::CudaError,
    fence::Fence,
    flight::Direction,
    memory::CudaMemory,
    memory_owner::MemoryOwner,
    page_locked::PageLocked,
    share::{Exported, Imported, ShareError},
    shares::ExportRequest,
    stream::StreamHandle,
    waiters::Ticket,
};
use crate::{engine::CopySegment, host_memory::AllocError, id::Id, mapping::Mapping, slot::Slot};

/// The command queue of an engine's thread, through which every request to the device goes.
///
/// Nothing is lost in it while the thread lives, and sending never blocks. Its commands bound it: a copy owns a slot of
/// the engine, a signal belongs to a copy in flight, memory is returned once, and a caller waits for its answer.
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

    /// Sends a command; returns it if the thread has ended.
    pub(super) fn tell(&self, command: Command) -> Result<(), Command> {
        self.sender.send(command).map_err(|mpsc::SendError(command)| command)
    }

    /// Sends a request and waits for its answer up to a deadline. The thread handles the request in any case, and drops
    /// a late answer with what it carries. A stream in the request is used even then, and kept by its handle.
    pub(super) fn ask<T>(&self, question: impl FnOnce(Reply<T>) -> Command) -> Result<T, CudaError> {
        self.ask_for(self.answer_timeout, question)
    }

    /// The same with `patience`, for requests on which the thread itself waits.
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

/// The sender of an answer.
pub(super) type Reply<T> = SyncSender<T>;

/// A command to an engine's thread.
///
/// Memory that only the thread may free is in a `ManuallyDrop`: an unhandled command leaks it.
#[derive(Debug)]
pub(super) enum Command {
    /// Start a copy.
    Copy(Job),
    /// Signal from the device: a copy of this direction has ended.
    Rang(Direction),
    /// Allocate device memory.
    Allocate(usize, Reply<Result<Arc<CudaMemory>, AllocError>>),
    /// Allocate page-locked host memory.
    Lock(usize, Reply<Result<PageLocked, AllocError>>),
    /// Allocate device memory that can be shared, with its descriptor.
    Buffer(usize, Reply<Result<(Arc<CudaMemory>, OwnedFd), ShareError>>),
    /// Import another process's memory.
    Import(Exported, Reply<Result<Imported, ShareError>>),
    /// Export memory, once the streams that write it have passed their fences.
    Share(ExportRequest),
    /// Take back unused memory, to be freed once these fences are passed.
    TakeBack(ManuallyDrop<MemoryOwner>, Vec<Fence>),
    /// Release a memory, once these streams have passed their current work.
    GiveUp(Arc<CudaMemory>, Vec<StreamHandle>),
    /// Take back unused page-locked memory.
    Unlock(ManuallyDrop<Mapping>),
    /// Record a fence on a caller's stream.
    Fence(StreamHandle, Reply<Result<Fence, CudaError>>),
    /// Return the intake stream.
    Intake(Reply<Result<usize, CudaError>>),
    /// Record a fence on the intake stream.
    FenceIntake(Reply<Result<Fence, CudaError>>),
    /// Make a caller's stream wait for a fence.
    WaitFence(u64, StreamHandle, Reply<Result<(), CudaError>>),
    /// Forget a dropped fence.
    DropFence(u64),
    /// Make a caller's stream wait for all copies of a memory requested before.
    WaitMemory(Id, StreamHandle, Reply<Result<(), CudaError>>),
    /// The engine was dropped: end when everything given out is returned.
    Close,
}

/// A checked copy. Until it begins, dropping it returns its slot and reports that the engine has stopped.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) direction: Direction,
    pub(super) slot: Slot,
    pub(super) segments: Vec<CopySegment<CudaMemory>>,
    pub(super) done: Ticket,
}
