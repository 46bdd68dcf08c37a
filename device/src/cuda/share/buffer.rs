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
    /// The deadline for filling it, waits included.
    pub(super) patience: Duration,
}

impl SharedBuffer {
    /// Its memory, for everything that engines do with memory. The buffer lives as long as this is held.
    pub fn memory(&self) -> &Arc<CudaMemory> {
        &self.memory
    }

    /// Its descriptor for another process. It may be sent any number of times.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Duplicates the descriptor, for an importer. Fails if the process has too many open.
    pub fn export(&self) -> Result<FdMemory, ShareError> {
        let no_descriptor = |error: io::Error| ShareError::NoDescriptor { text: error.to_string() };
        let fd = self.fd.try_clone().map_err(no_descriptor)?;
        Ok(FdMemory { device: self.device, fd, len: self.memory.len_bytes() })
    }

    /// Copies memories into it: each to its offset. Costs a copy within the device, a few microseconds for each part,
    /// and no byte of the host.
    ///
    /// Waits until the streams that write the memories are past that, and until the copies have ended: up to
    /// [`CudaOptions::fence_timeout`] and [`CudaOptions::copy_timeout`]. Where it fails, what the parts' places hold is
    /// unspecified, and late copies may still write to them. Nobody may read the buffer meanwhile: have the importer
    /// say that it has let go before it is filled again.
    pub fn fill(&self, parts: Vec<(Arc<CudaMemory>, u64)>) -> Result<(), ShareError> {
        let bytes = self.memory.len_bytes();
        for (memory, offset) in &parts {
            let (offset, len) = (*offset, memory.len_bytes());
            if memory.engine() != self.engine {
                return Err(ShareError::ForeignMemory);
            }
            if offset.checked_add(len).is_none_or(|end| end > bytes) {
                return Err(ShareError::OutOfBuffer { offset, len, bytes });
            }
        }
        let parts = parts.into_iter().filter(|(memory, _)| memory.len_bytes() > 0).collect();
        let fill = Fill { to: Arc::clone(&self.memory), parts };
        self.inbox
            .ask_for(self.patience, |reply| Command::Share(ExportRequest::Fill(fill, reply)))?
    }
}
