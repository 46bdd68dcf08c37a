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
/// This crate maps the memory, and the driver only locks its pages, so that the memory outlives the driver's context:
/// any code in the process can reset the device, which would unmap memory of the driver's own while a slot is read.
#[derive(Debug)]
pub(super) struct PageLocked {
    /// `None` only while this is dropped.
    mapping: Option<Mapping>,
    start: NonNull<u8>,
    len: usize,
    inbox: Inbox,
}

impl PageLocked {
    /// Maps and locks `len` bytes on the calling thread's NUMA node. Takes about a third of a second for each GiB.
    pub(super) fn new(gpu: &Gpu, len: usize, inbox: &Inbox) -> Result<Self, AllocError> {
        let mapping = Mapping::new(len, PageSize::Huge).map_err(|source| AllocError::Os { len, source })?;
        // Otherwise a write after a fork could give this process a copy of the page, while the device accesses the
        // original.
        mapping.keep_from_children();
        mapping.prefault();
        let (start, len) = (mapping.start(), mapping.len());
        // SAFETY: the mapping is kept until its pages are unlocked: by `PageLocked`, then by the command that its drop
        // sends, then by the engine's thread, which leaks the mapping if unlocking fails.
        unsafe { gpu.driver().lock(start.as_ptr(), len) }.map_err(|source| AllocError::PageLocking {
            device: inbox.device().into(),
            asked_bytes: len as u64,
            source: CudaError::Driver(source),
        })?;
        Ok(Self { mapping: Some(mapping), start, len, inbox: inbox.clone() })
    }
}

// SAFETY: the mapping, whose range is constant, initialised by the kernel and nobody else's, lives until `drop` sends
// it to the engine's thread or leaks it. The device accesses it only in copies, each of which owns the slot that it
// reads or writes. `drop` does not call the driver, so any thread may drop this.
unsafe impl Keeper for PageLocked {
    fn start(&self) -> NonNull<u8> {
        self.start
    }

    fn len(&self) -> usize {
        self.len
    }
}

// SAFETY: the pointer is that of the mapping, which is `Send`: its addresses are valid in the whole process.
unsafe impl Send for PageLocked {}
// SAFETY: `&PageLocked` returns only a constant address and length.
unsafe impl Sync for PageLocked {}

impl Drop for PageLocked {
    fn drop(&mut self) {
        let Some(mapping) = self.mapping.take() else { return };
        // If the engine's thread has ended, nobody can unlock the pages: the mapping is leaked.
        let _ = self.inbox.send(Command::Unlock(ManuallyDrop::new(mapping)));
    }
}
