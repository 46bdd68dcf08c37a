//! Memory of other processes that this one has opened, shared by its users.

use std::collections::BTreeMap;

use super::{driver::IpcHandle, error::CudaError, gpu::Gpu};

/// The opened allocations of other processes, each once, with a count of its users.
///
/// Why: many tensors lie in one allocation, and a driver may refuse to open it again.
#[derive(Debug, Default)]
pub(super) struct Opened {
    /// One for each that is in use, which bounds it.
    open: BTreeMap<IpcHandle, Allocation>,
}

/// Another process's allocation.
#[derive(Debug, Clone, Copy)]
pub(super) struct Allocation {
    pub(super) start: u64,
    pub(super) len: u64,
    users: usize,
}

impl Opened {
    /// Opens an allocation for one more user, and returns its address.
    pub(super) fn open(&mut self, handle: &IpcHandle, gpu: &Gpu) -> Result<Allocation, CudaError> {
        if let Some(known) = self.open.get_mut(handle) {
            known.users += 1;
            return Ok(*known);
        }
        let start = gpu.driver().open_ipc(handle)?;
        // The peer's description is not trusted: a copy out of bounds would break the context.
        match gpu.driver().allocation_of(start) {
            Ok((first, all)) => {
                let len = all.saturating_sub(start.saturating_sub(first));
                let allocation = Allocation { start, len, users: 1 };
                self.open.insert(*handle, allocation);
                Ok(allocation)
            }
            Err(error) => {
                // SAFETY: opened just above, and nobody has its address.
                let _ = unsafe { gpu.driver().close_ipc(start) }; // It stays open, and takes nothing of the device.
                Err(error)
            }
        }
    }

    /// Closes an allocation for one user who no longer uses its memory; the last one closes it for good. Returns
    /// whether the driver did so: if not, it stays open, which takes no device memory.
    pub(super) fn close(&mut self, handle: &IpcHandle, gpu: &Gpu) -> bool {
        let Some(known) = self.open.get_mut(handle) else { return false };
        known.users -= 1;
        if known.users > 0 {
            return true;
        }
        let start = known.start;
        self.open.remove(handle);
        // SAFETY: its last user is gone, with it all copies, each of which is one, and the streams that were named.
        unsafe { gpu.driver().close_ipc(start) }.is_ok()
    }
}
