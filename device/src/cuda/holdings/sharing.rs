//! Memory that an engine shares with other processes: buffers of its own, and imported memory.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

use super::{Holdings, free_block};
use crate::cuda::{
    driver::{IpcHandle, OUT_OF_MEMORY},
    error::CudaError,
    gpu::Gpu,
    memory::CudaMemory,
    memory_cache::{Block, NoRoom},
    memory_owner::{MemoryOwner, SharedMemory},
    setting::Setting,
    share::{FdMemory, Imported, IpcMemory, ShareError},
    virtual_memory::Mapped,
};
use crate::loan::Loan;

impl Holdings {
    /// Allocates memory that can be shared, with its descriptor.
    pub(in crate::cuda) fn buffer(
        &mut self,
        len: usize,
        gpu: &Gpu,
        setting: &Setting,
    ) -> Result<(Arc<CudaMemory>, OwnedFd), ShareError> {
        let no_buffer = |source| ShareError::NoBuffer { device: setting.device(), source };
        let rounded_len = round_up(len, gpu).map_err(no_buffer)?;
        self.make_room(rounded_len as u64, gpu, setting)?;
        match self.allocate_buffer(rounded_len, gpu, setting) {
            Ok((mapped, fd)) => {
                let address = mapped.address;
                Ok((self.new_memory(address, len, SharedMemory::Buffer(mapped), setting), fd))
            }
            Err(error) => {
                self.cache.release(rounded_len as u64);
                Err(no_buffer(error))
            }
        }
    }

    /// Allocates plain memory that other processes can open, with its handle. It has blocks of the driver's to itself.
    pub(in crate::cuda) fn openable_buffer(
        &mut self,
        len: usize,
        gpu: &Gpu,
        setting: &Setting,
    ) -> Result<(Arc<CudaMemory>, IpcHandle), ShareError> {
        let len_bytes = (len as u64).checked_next_multiple_of(DRIVER_BLOCK_BYTES).unwrap_or(u64::MAX);
        self.make_room(len_bytes, gpu, setting)?;
        let allocated = self.allocate_block(len_bytes, gpu, setting).map_err(CudaError::from);
        let exported = allocated.and_then(|block| match gpu.driver().ipc_handle(block.address) {
            Ok(handle) => Ok((block, handle)),
            Err(error) => {
                free_block(block, gpu, setting);
                Err(error)
            }
        });
        match exported {
            Ok((block, handle)) => {
                let (address, shared) = (block.address, SharedMemory::Openable(block));
                Ok((self.new_memory(address, len, shared, setting), handle))
            }
            Err(source) => {
                self.cache.release(len_bytes);
                Err(ShareError::NoBuffer { device: setting.device(), source })
            }
        }
    }

    fn make_room(&mut self, asked_bytes: u64, gpu: &Gpu, setting: &Setting) -> Result<(), ShareError> {
        let made = self.cache.make_room(asked_bytes);
        let evicted = made.map_err(|NoRoom { in_use_bytes, limit_bytes: budget_bytes }| {
            ShareError::OverBudget { device: setting.device(), asked_bytes, in_use_bytes, budget_bytes }
        })?;
        evicted.into_iter().for_each(|block| free_block(block, gpu, setting));
        Ok(())
    }

    /// Imports another process's buffer.
    pub(in crate::cuda) fn import_fd(
        &mut self,
        shared: &FdMemory,
        gpu: &Gpu,
        setting: &Setting,
    ) -> Result<Imported, ShareError> {
        let not_mapped = |source| ShareError::NotMapped { device: setting.device(), source };
        let len = usize::try_from(shared.len).unwrap_or(usize::MAX);
        let rounded_len = round_up(len, gpu).map_err(not_mapped)?;
        let mapped = Mapped::import(gpu, shared.fd.as_fd(), rounded_len, setting).map_err(not_mapped)?;
        let address = mapped.address;
        let (loan, returned) = Loan::new();
        let memory = self.new_memory(address, len, SharedMemory::Imported(mapped, loan), setting);
        Ok(Imported { memory, returned })
    }

    /// Imports a part of another process's allocation. Refuses a range outside of the allocation.
    pub(in crate::cuda) fn import_ipc(
        &mut self,
        shared: &IpcMemory,
        gpu: &Gpu,
        setting: &Setting,
    ) -> Result<Imported, ShareError> {
        let IpcMemory { handle, offset, len, .. } = shared;
        let opened = self.opened.open(handle, gpu);
        let allocation =
            opened.map_err(|source| ShareError::NotOpened { device: setting.device(), source })?;
        if offset.checked_add(*len).is_none_or(|end| end > allocation.len) {
            self.opened.close(handle, gpu); // If this fails, it stays open, at no cost in memory.
            return Err(ShareError::OutOfBounds { offset: *offset, len: *len, bytes: allocation.len });
        }
        let address = allocation.start + offset;
        let (loan, returned) = Loan::new();
        // At most the length of an allocation, so it fits into a `usize`.
        let memory = self.new_memory(address, *len as usize, SharedMemory::Opened(*handle, loan), setting);
        Ok(Imported { memory, returned })
    }

    /// Unmaps shared memory that this process no longer uses.
    ///
    /// A buffer of another process counts as returned only if the driver unmapped it, a part of an allocation only if
    /// the driver closed the allocation or another part of it is still imported: the owner must not free memory that is
    /// open here.
    pub(super) fn unmap(&mut self, shared: SharedMemory, gpu: &Gpu, setting: &Setting) {
        match shared {
            SharedMemory::Buffer(mapped) => {
                let bytes = mapped.len as u64;
                self.cache.release(bytes);
                if !unmap_unused(mapped, gpu) {
                    setting.counters.leaked_bytes.add(bytes);
                }
            }
            SharedMemory::Openable(block) => {
                self.cache.release(block.len_bytes);
                free_block(block, gpu, setting);
            }
            SharedMemory::Imported(mapped, loan) => end_loan(loan, unmap_unused(mapped, gpu)),
            SharedMemory::Opened(handle, loan) => end_loan(loan, self.opened.close(&handle, gpu)),
        }
    }

    fn new_memory(
        &mut self,
        address: u64,
        len: usize,
        shared: SharedMemory,
        setting: &Setting,
    ) -> Arc<CudaMemory> {
        self.blocks += 1;
        self.update_counters(setting);
        CudaMemory::new(setting.engine, address, len, MemoryOwner::Shared(shared), setting.inbox.clone())
    }

    /// Allocates a buffer from the driver. While the driver has no memory, frees one cached block after the other and
    /// retries.
    fn allocate_buffer(
        &mut self,
        rounded_len: usize,
        gpu: &Gpu,
        setting: &Setting,
    ) -> Result<(Mapped, OwnedFd), CudaError> {
        loop {
            match Mapped::create(gpu, rounded_len, setting) {
                Err(CudaError::Driver(error)) if error.code == OUT_OF_MEMORY => match self.cache.evict() {
                    Some(block) => free_block(block, gpu, setting),
                    None => return Err(error.into()),
                },
                created => return created,
            }
        }
    }
}

impl SharedMemory {
    /// The bytes of this process's own device memory that are lost if this is leaked.
    pub(super) fn own_bytes(&self) -> u64 {
        match self {
            Self::Buffer(mapped) => mapped.len as u64,
            Self::Openable(Block { len_bytes, .. }) => *len_bytes,
            Self::Imported(..) | Self::Opened(..) => 0,
        }
    }
}

/// What the driver maps at once: smaller allocations of a process share such a block, and another process that opens
/// one of them has all of it.
const DRIVER_BLOCK_BYTES: u64 = 2 << 20;

/// A length rounded up to the driver's granularity, which is the same in the exporter and the importer.
fn round_up(len: usize, gpu: &Gpu) -> Result<usize, CudaError> {
    let granularity = gpu.driver().granularity(gpu.device())?;
    // On overflow the result is a length that no device has, which the driver refuses.
    Ok(len
        .checked_next_multiple_of(granularity)
        .unwrap_or(usize::MAX / granularity * granularity))
}

fn end_loan(loan: Loan, is_closed: bool) {
    match is_closed {
        true => drop(loan),
        false => std::mem::forget(loan),
    }
}

fn unmap_unused(mapped: Mapped, gpu: &Gpu) -> bool {
    // SAFETY: the mapping's last owner was dropped, so no copy of it runs, since each copy is an owner; and every
    // stream that was named as using it has passed its work (`Holdings::poll`).
    unsafe { mapped.unmap(gpu) }
}
