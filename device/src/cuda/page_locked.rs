use std::{mem::ManuallyDrop, ptr::NonNull};

use super::{
    error::CudaError,
    gpu::Gpu,
    inbox::{Command, Inbox},
};
use crate::{
    host_memory::AllocError,
    mapping::{Mapping, PageSize},
    region::Keeper,
};

/// Page-locked host memory, which the device accesses directly.
///
/// It is a mapping of our own whose pages the driver locks, not memory of the driver's, so that it outlives the
/// driver's context. Anybody in the process can reset the device, which would unmap the driver's memory under readers
/// of a slot.
#[derive(Debug)]
pub(super) struct PageLocked {
    /// `None` once it was returned.
    mapping: Option<Mapping>,
    start: NonNull<u8>,
    len: usize,
    inbox: Inbox,
}

impl PageLocked {
    /// Maps and locks `len` bytes, near the calling thread. Takes about a third of a second for a GiB.
    pub(super) fn new(gpu: &Gpu, len: usize, inbox: &Inbox) -> Result<Self, AllocError> {
        let mapping = Mapping::new(len, PageSize::Huge).map_err(|source| AllocError::Os { len, source })?;
        // A child that a fork leaves behind must not make the kernel copy pages away from under the device.
        mapping.keep_from_children();
        mapping.prefault();
        let (start, len) = (mapping.start(), mapping.len());
        // SAFETY: the mapping is kept until its pages are unlocked: by `PageLocked`, by the command that it sends, and
        // by the thread, which leaks it where unlocking fails.
        unsafe { gpu.driver().lock(start.as_ptr(), len) }.map_err(|source| AllocError::PageLocking {
            device: inbox.device().into(),
            asked_bytes: len as u64,
            source: CudaError::Driver(source),
        })?;
        Ok(Self { mapping: Some(mapping), start, len, inbox: inbox.clone() })
    }
}

// SAFETY: the mapping, which is constant, zeroed and nobody else's, lives until `drop` sends it away or leaks it. The
// device reaches it only in copies, each of which owns the slot that it writes or reads. `drop` calls no driver: any
// thread may do it.
unsafe impl Keeper for PageLocked {
    fn start(&self) -> NonNull<u8> {
        self.start
    }

    fn len(&self) -> usize {
        self.len
    }
}

// SAFETY: the pointer is the mapping's, which may be sent: addresses of the whole process.
unsafe impl Send for PageLocked {}
// SAFETY: `&PageLocked` gives two constant numbers.
unsafe impl Sync for PageLocked {}

impl Drop for PageLocked {
    fn drop(&mut self) {
        let Some(mapping) = self.mapping.take() else { return };
        // Without the engine's thread nobody can unlock the pages: they and the mapping are leaked.
        let _ = self.inbox.tell(Command::Unlock(ManuallyDrop::new(mapping)));
    }
}
