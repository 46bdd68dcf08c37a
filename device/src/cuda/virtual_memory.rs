//! Device memory mapped with the driver's virtual memory API, which can be shared as a file descriptor.

use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::{FdFlags, fcntl_setfd};

use super::{
    driver::{Driver, Physical},
    error::CudaError,
    gpu::Gpu,
    setting::Setting,
};

/// A mapping of device memory that may be shared with another process. Dropping it unmaps nothing: `end` does.
///
/// The memory lives as long as any process has it mapped, or has a descriptor of it open.
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
        let made = driver.export_physical(physical).and_then(|fd| {
            // Child processes must not inherit the descriptor and keep the memory.
            let _ = fcntl_setfd(&fd, FdFlags::CLOEXEC); // A descriptor that is open takes flags.
            Ok((Self::map(gpu, physical, len, setting)?, fd))
        });
        let_go(driver, physical, len, setting);
        made
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
        let_go(driver, physical, len, setting);
        mapped
    }

    fn map(gpu: &Gpu, physical: Physical, len: usize, setting: &Setting) -> Result<Self, CudaError> {
        let driver = gpu.driver();
        let address = driver.reserve(len)?;
        // SAFETY: reserved just above.
        let mapped = unsafe { driver.map(address, len, physical) };
        if let Err(error) = mapped {
            // SAFETY: the reservation of above, which nothing is mapped to.
            let _ = unsafe { driver.unreserve(address, len) }; // Addresses alone are lost.
            return Err(error);
        }
        let mapped = Self { address, len };
        match driver.allow(address, len, gpu.device()) {
            Ok(()) => Ok(mapped),
            Err(error) => {
                // SAFETY: nobody has its address.
                if !unsafe { mapped.end(gpu) } {
                    setting.counters.kept_bytes.add(len as u64);
                }
                Err(error)
            }
        }
    }

    /// Unmaps the memory and frees its addresses. Returns whether the driver did so; if not, it is leaked, and the
    /// caller counts what is this process's.
    ///
    /// # Safety
    ///
    /// Nobody in this process uses the memory any more.
    #[must_use]
    pub(super) unsafe fn end(self, gpu: &Gpu) -> bool {
        let Self { address, len } = self;
        // SAFETY: the caller's promise.
        let unmapped = unsafe { gpu.driver().unmap(address, len) };
        if unmapped.is_err() {
            return false;
        }
        // SAFETY: its mapping was taken away, and was all that there was.
        let _ = unsafe { gpu.driver().unreserve(address, len) }; // Addresses alone are lost.
        true
    }
}

/// Releases a handle: mappings keep the memory.
fn let_go(driver: &Driver, physical: Physical, len: usize, setting: &Setting) {
    if driver.release_physical(physical).is_err() {
        setting.counters.kept_bytes.add(len as u64);
    }
}
