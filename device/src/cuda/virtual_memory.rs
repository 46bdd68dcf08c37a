//! Device memory mapped with the driver's virtual memory API, which can be shared as a file descriptor.

use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::{FdFlags, fcntl_setfd};

use super::{
    driver::{Driver, Physical},
    error::CudaError,
    gpu::Gpu,
    setting::Setting,
};

/// A mapping of device memory that may be shared with another process. `unmap` undoes it; dropping it does not.
///
/// The memory lives as long as any process has it mapped or has a descriptor of it open.
#[derive(Debug)]
pub(super) struct Mapped {
    pub(super) address: u64,
    pub(super) len: usize,
}

impl Mapped {
    /// Allocates memory of a length that is a multiple of the granularity, with a descriptor.
    pub(super) fn create(gpu: &Gpu, len: usize, setting: &Setting) -> Result<(Self, OwnedFd), CudaError> {
        let driver = gpu.driver();
        let physical = driver.create_physical(gpu.device(), len)?;
        let created = driver.export_physical(physical).and_then(|fd| {
            // Child processes must not inherit the descriptor and keep the memory.
            let _ = fcntl_setfd(&fd, FdFlags::CLOEXEC); // Cannot fail for an open descriptor.
            Ok((Self::map(gpu, physical, len, setting)?, fd))
        });
        release(driver, physical, len, setting);
        created
    }

    /// Maps the first `len` bytes of a descriptor's memory, a multiple of the granularity.
    pub(super) fn import(
        gpu: &Gpu,
        fd: BorrowedFd<'_>,
        len: usize,
        setting: &Setting,
    ) -> Result<Self, CudaError> {
        let driver = gpu.driver();
        let physical = driver.import_physical(fd)?;
        let mapped = Self::map(gpu, physical, len, setting);
        release(driver, physical, len, setting);
        mapped
    }

    fn map(gpu: &Gpu, physical: Physical, len: usize, setting: &Setting) -> Result<Self, CudaError> {
        let driver = gpu.driver();
        let address = driver.reserve(len)?;
        // SAFETY: reserved just above.
        let mapped = unsafe { driver.map(address, len, physical) };
        if let Err(error) = mapped {
            // SAFETY: reserved above, and nothing is mapped there.
            let _ = unsafe { driver.unreserve(address, len) }; // If this fails, only addresses are lost.
            return Err(error);
        }
        let mapped = Self { address, len };
        match driver.allow(address, len, gpu.device()) {
            Ok(()) => Ok(mapped),
            Err(error) => {
                // SAFETY: nobody has the mapping's address.
                if !unsafe { mapped.unmap(gpu) } {
                    setting.counters.leaked_bytes.add(len as u64);
                }
                Err(error)
            }
        }
    }

    /// Unmaps the memory and frees its addresses. Returns false if the driver refuses: then the memory is leaked, and
    /// the caller counts its bytes if they are this process's.
    ///
    /// # Safety
    ///
    /// Nobody in this process uses the memory any more.
    #[must_use]
    pub(super) unsafe fn unmap(self, gpu: &Gpu) -> bool {
        let Self { address, len } = self;
        // SAFETY: the caller's promise.
        let unmapped = unsafe { gpu.driver().unmap(address, len) };
        if unmapped.is_err() {
            return false;
        }
        // SAFETY: the whole reservation was unmapped just above.
        let _ = unsafe { gpu.driver().unreserve(address, len) }; // If this fails, only addresses are lost.
        true
    }
}

/// Releases the handle of physical memory. Mappings of it keep the memory.
fn release(driver: &Driver, physical: Physical, len: usize, setting: &Setting) {
    if driver.release_physical(physical).is_err() {
        setting.counters.leaked_bytes.add(len as u64);
    }
}
