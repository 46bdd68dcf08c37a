use std::collections::BTreeMap;

use super::{driver::IpcHandle, error::CudaError, gpu::Gpu};

/// The allocations of other processes that are open here, each once, whoever has a part of it.
///
/// Why: many tensors lie in one allocation, and asking a driver that counts, or refuses to open again, is saved.
#[derive(Debug, Default)]
pub(super) struct Opened {
    /// One for each that somebody has memory in: they bound this.
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
    /// Opens an allocation for one user more, and says where it is.
    pub(super) fn open(&mut self, handle: &IpcHandle, gpu: &Gpu) -> Result<Allocation, CudaError> {
        if let Some(known) = self.open.get_mut(handle) {
            known.users += 1;
            return Ok(*known);
        }
        let start = gpu.driver().open_ipc(handle)?;
        // What is said of the memory by whom it belongs to is not believed: a copy that leaves it would end the context.
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

    /// Closes an allocation for one user, whose memory nobody uses any more; with the last it is closed for good. Says
    /// whether the driver did so: if not, it stays open, and takes nothing of the device.
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
