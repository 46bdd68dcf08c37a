use std::{
    any::Any,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

#[cfg(doc)]
use crate::cuda::{CudaEngine, CudaOptions};
use crate::{
    cuda::{
        CudaMemory,
        flight::Direction,
        inbox::{Command, Inbox},
        share::{DeviceUuid, FdMemory, ShareError},
        shares::{Ended, ExportRequest, Within},
    },
    engine::CopySegment,
    id::Id,
    spread::Rectangle,
};

/// A shareable buffer of an engine's memory, exported by file descriptor: [`CudaEngine::shared_buffer`].
#[derive(Debug)]
pub struct SharedBuffer {
    pub(super) device: DeviceUuid,
    pub(super) memory: Arc<CudaMemory>,
    pub(super) fd: OwnedFd,
    pub(super) engine: Id,
    pub(super) inbox: Inbox,
    /// The timeout for filling the buffer, waits included.
    pub(super) timeout: Duration,
}

impl SharedBuffer {
    /// The buffer's memory, for all operations of an engine. It lives as long as any clone of this `Arc`.
    pub fn memory(&self) -> &Arc<CudaMemory> {
        &self.memory
    }

    /// The buffer's descriptor for another process. It may be sent any number of times.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Duplicates the descriptor for an importer. Fails if the process has too many open descriptors.
    pub fn export(&self) -> Result<FdMemory, ShareError> {
        let no_descriptor = |error: io::Error| ShareError::NoDescriptor { text: error.to_string() };
        let fd = self.fd.try_clone().map_err(no_descriptor)?;
        Ok(FdMemory { device: self.device, fd, len: self.memory.len_bytes() })
    }

    /// Copies memories into the buffer, each to its offset, within the device: no byte moves through the host.
    /// Submitting takes a few microseconds for each large part, and for all small ones together.
    ///
    /// Waits for the streams that write the memories, up to [`CudaOptions::fence_timeout`], and for the copies, up to
    /// [`CudaOptions::copy_timeout`]. After a failure the content of the parts' ranges is unspecified, and late copies
    /// may still write to them. Nobody may read the buffer meanwhile: before filling it again, wait until the importer
    /// reports that it has released it.
    pub fn fill(&self, parts: Vec<(Arc<CudaMemory>, u64)>) -> Result<(), ShareError> {
        fill(&self.memory, parts, (false, None), (self.engine, &self.inbox, self.timeout))
    }
}

/// Copies memories into `to`, each to its offset, within the device, and optionally zeroes all other bytes of it. What is to be
/// kept is kept until the copies have ended, also if they are late.
pub(super) fn fill(
    to: &Arc<CudaMemory>,
    parts: Vec<(Arc<CudaMemory>, u64)>,
    (zeroes_gaps, _kept): (bool, Option<Arc<dyn Any + Send + Sync>>),
    (engine, inbox, timeout): (Id, &Inbox, Duration),
) -> Result<(), ShareError> {
    let segment = |(memory, offset): (Arc<CudaMemory>, u64)| {
        let rectangle = Rectangle::run(offset, 0, memory.len_bytes());
        (rectangle.run_bytes > 0).then_some(CopySegment { memory, rectangle })
    };
    let segments = parts.into_iter().filter_map(segment).collect();
    let within = Within { flat: Arc::clone(to), segments, direction: Direction::Out, zeroes_gaps, _kept };
    let request = check(engine, within)?;
    inbox.request_within(timeout, |reply| {
        let ended = move |end| drop(reply.send(end)); // Fails if the caller has stopped waiting.
        Command::Share(ExportRequest::Copy(request, Ended(Box::new(ended))))
    })?
}

/// Checks that copies are within memories of `engine`, and in their bounds.
pub(super) fn check(engine: Id, within: Within) -> Result<Within, ShareError> {
    let bytes = within.flat.len_bytes();
    let is_foreign = |memory: &CudaMemory| memory.engine() != engine;
    if is_foreign(&within.flat) || within.segments.iter().any(|segment| is_foreign(&segment.memory)) {
        return Err(ShareError::ForeignMemory);
    }
    let fits =
        |segment: &&CopySegment<CudaMemory>| segment.rectangle.fits(&(0..bytes), segment.memory.len_bytes());
    match within.segments.iter().find(|segment| !fits(segment)) {
        Some(CopySegment { rectangle: Rectangle { part: offset, run_bytes: len, .. }, .. }) => {
            Err(ShareError::OutOfBuffer { offset: *offset, len: *len, bytes })
        }
        None => Ok(within),
    }
}
