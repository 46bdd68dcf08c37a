//! Allocations of other processes that this process has opened.

use std::collections::BTreeMap;

use super::{driver::IpcHandle, error::CudaError, gpu::Gpu};

/// The opened allocations of other processes, each opened once, with a count of its users.
///
/// Why: many tensors lie in one allocation, and a driver may refuse to open it again.
#[derive(Debug, Default)]
pub(super) struct Opened {
    /// The allocations that are in use. Each user holds memory, which bounds them.
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
    /// Opens an allocation, or adds a user if it is open already.
    pub(super) fn open(&mut self, handle: &IpcHandle, gpu: &Gpu) -> Result<Allocation, CudaError> {
        if let Some(allocation) = self.open.get_mut(handle) {
            allocation.users += 1;
            return Ok(*allocation);
        }
        let start = gpu.driver().open_ipc(handle)?;
        // The length is the driver's, since the peer's is not trusted: a copy out of bounds would break the context.
        match gpu.driver().allocation_of(start) {
            Ok((first_address, all_bytes)) => {
                let len = all_bytes.saturating_sub(start.saturating_sub(first_address));
                let allocation = Allocation { start, len, users: 1 };
                self.open.insert(*handle, allocation);
                Ok(allocation)
            }
            Err(error) => {
                // SAFETY: opened just above, and nobody has its address.
                let _ = unsafe { gpu.driver().close_ipc(start) }; // If this fails, it stays open, at no cost in memory.
                Err(error)
            }
        }
    }

    /// Removes a user that no longer uses the memory, and closes the allocation with its last user. Returns false if
    /// the driver refuses: then it stays open, which takes no device memory.
    pub(super) fn close(&mut self, handle: &IpcHandle, gpu: &Gpu) -> bool {
        let Some(allocation) = self.open.get_mut(handle) else { return false };
        allocation.users -= 1;
        if allocation.users > 0 {
            return true;
        }
        let start = allocation.start;
        self.open.remove(handle);
        // SAFETY: the last user was dropped, so no copy of the memory runs, since each copy is a user, and every stream
        // that was named as using it has passed its work.
        unsafe { gpu.driver().close_ipc(start) }.is_ok()
    }
}
