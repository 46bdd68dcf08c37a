use std::{
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
        inbox::{Command, Inbox},
        share::{DeviceUuid, FdMemory, ShareError},
        shares::{ExportRequest, Fill},
    },
    id::Id,
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
        fill(&self.memory, parts, false, (self.engine, &self.inbox, self.timeout))
    }
}

/// Copies memories into `to`, each to its offset, within the device, and optionally zeroes all other bytes of it.
pub(super) fn fill(
    to: &Arc<CudaMemory>,
    parts: Vec<(Arc<CudaMemory>, u64)>,
    zeroes_gaps: bool,
    (engine, inbox, timeout): (Id, &Inbox, Duration),
) -> Result<(), ShareError> {
    let bytes = to.len_bytes();
    for (memory, offset) in &parts {
        let (offset, len) = (*offset, memory.len_bytes());
        if memory.engine() != engine || to.engine() != engine {
            return Err(ShareError::ForeignMemory);
        }
        if offset.checked_add(len).is_none_or(|end| end > bytes) {
            return Err(ShareError::OutOfBuffer { offset, len, bytes });
        }
    }
    let parts = parts.into_iter().filter(|(memory, _)| memory.len_bytes() > 0).collect();
    let fill = Fill { to: Arc::clone(to), parts, zeroes_gaps };
    inbox.request_within(timeout, |reply| Command::Share(ExportRequest::Fill(fill, reply)))?
}
