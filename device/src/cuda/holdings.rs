mod sharing;

use std::{
    mem::{self, ManuallyDrop},
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    driver::{NOT_REGISTERED, OUT_OF_MEMORY},
    error::{CudaError, DriverError},
    fence::Fence,
    gpu::Gpu,
    memory::{CudaMemory, poll_fences},
    memory_cache::{Block, MemoryCache, NoRoom, Taken},
    memory_owner::MemoryOwner,
    opened::Opened,
    options::CudaOptions,
    page_locked::PageLocked,
    setting::Setting,
};
use crate::{host_memory::AllocError, mapping::Mapping};

/// The device and page-locked memory of an engine: given out, returned but still in use, or cached.
pub(super) struct Holdings {
    cache: MemoryCache,
    /// Opened allocations of other processes.
    opened: Opened,
    /// The number of device memories of the engine's own, and of shared ones, that are given out or in `waiting`.
    blocks: usize,
    /// The number of page-locked memories that are given out.
    locked: usize,
    /// Returned memory that a caller's stream may still use. Bounded by the memory given out.
    waiting: Vec<Waiting>,
    last_wait: Duration,
    /// Whether memory was leaked that may still be in use: then its context must be leaked too.
    has_leaked: bool,
}

struct Waiting {
    owner: ManuallyDrop<MemoryOwner>,
    fences: Vec<Fence>,
    since: Instant,
}

impl Holdings {
    pub(super) fn new(options: &CudaOptions) -> Self {
        Self {
            cache: MemoryCache::new(options.memory_limit_bytes.unwrap_or(u64::MAX)),
            opened: Opened::default(),
            blocks: 0,
            locked: 0,
            waiting: Vec::new(),
            last_wait: options.last_wait(),
            has_leaked: false,
        }
    }

    /// Allocates device memory: from the cache, or from the driver.
    pub(super) fn allocate(
        &mut self,
        len: usize,
        gpu: &Gpu,
        setting: &Setting,
        failed: Option<&CudaError>,
    ) -> Result<Arc<CudaMemory>, AllocError> {
        if let Some(error) = failed {
            return Err(AllocError::Device { device: setting.device(), source: error.clone() });
        }
        let (address, owner) = match len {
            0 => (0, MemoryOwner::Nothing),
            _ => {
                let block = self.take_block(len, gpu, setting)?;
                self.blocks += 1;
                (block.address, MemoryOwner::Block(block))
            }
        };
        self.update_counters(setting);
        Ok(CudaMemory::new(setting.engine, address, len, owner, setting.inbox.clone()))
    }

    /// Allocates page-locked host memory.
    pub(super) fn allocate_page_locked(
        &mut self,
        len: usize,
        gpu: &Gpu,
        setting: &Setting,
        failed: Option<&CudaError>,
    ) -> Result<PageLocked, AllocError> {
        if let Some(error) = failed {
            return Err(AllocError::Device { device: setting.device(), source: error.clone() });
        }
        let locked = PageLocked::new(gpu, len, &setting.inbox)?;
        self.locked += 1;
        setting.counters.pinned_bytes.add(crate::region::Keeper::len(&locked) as u64);
        Ok(locked)
    }

    /// Accepts returned memory, to be freed once its fences are passed.
    pub(super) fn take_back(&mut self, owner: ManuallyDrop<MemoryOwner>, fences: Vec<Fence>) {
        self.waiting.push(Waiting { owner, fences, since: Instant::now() });
    }

    /// Unlocks and unmaps returned memory. If the device has failed or unlocking fails, the memory stays mapped: the
    /// device may still access it.
    pub(super) fn unlock(
        &mut self,
        mapping: ManuallyDrop<Mapping>,
        gpu: &Gpu,
        setting: &Setting,
        failed: bool,
    ) {
        self.locked -= 1;
        let len_bytes = mapping.len() as u64;
        setting.counters.pinned_bytes.sub(len_bytes);
        if !failed && unlock(&mapping, gpu).or_else(|_| unlock(&mapping, gpu)).is_ok() {
            drop(ManuallyDrop::into_inner(mapping));
        } else {
            setting.counters.leaked_bytes.add(len_bytes);
        }
    }

    /// Frees the returned memory whose fences are passed, and leaks that with a failed fence. Leaks all of it after a
    /// device failure, and once the engine is closed, what has waited for `last_wait`.
    pub(super) fn poll(&mut self, now: Instant, gpu: &Gpu, setting: &Setting, failed: bool, closed: bool) {
        if self.waiting.is_empty() {
            return;
        }
        for mut waiting in mem::take(&mut self.waiting) {
            let is_late = closed && waiting.since + self.last_wait <= now;
            match poll_fences(&mut waiting.fences) {
                _ if failed => self.leak(waiting.owner, setting),
                Some(Ok(())) => self.free(ManuallyDrop::into_inner(waiting.owner), gpu, setting),
                None if !is_late => self.waiting.push(waiting),
                // A stream may still use the memory.
                _ => self.leak(waiting.owner, setting),
            }
        }
        self.update_counters(setting);
    }

    /// The deadline for returned memory once the engine is closing.
    pub(super) fn wake_at(&self) -> Option<Instant> {
        self.waiting.iter().map(|waiting| waiting.since + self.last_wait).min()
    }

    /// Whether all memory of the engine that was given out was returned, and no returned memory waits for a stream.
    pub(super) fn are_returned(&self) -> bool {
        self.blocks == 0 && self.locked == 0 && self.waiting.is_empty()
    }

    /// Gives cached memory back to the driver. The result is whether the context may be released too: not if leaked
    /// memory of it may be in use.
    pub(super) fn free_cached(mut self, gpu: &Gpu, setting: &Setting) -> bool {
        while let Some(block) = self.cache.evict() {
            free_block(block, gpu, setting);
        }
        self.update_counters(setting);
        !self.has_leaked
    }

    fn take_block(&mut self, len: usize, gpu: &Gpu, setting: &Setting) -> Result<Block, AllocError> {
        let (evicted, len_bytes) = match self.cache.take(len) {
            Ok(Taken::Reused(block)) => return Ok(block),
            Ok(Taken::Room { evicted, len_bytes }) => (evicted, len_bytes),
            Err(NoRoom { in_use_bytes, limit_bytes }) => {
                return Err(AllocError::OverDeviceBudget {
                    device: setting.device(),
                    asked_bytes: len as u64,
                    in_use_bytes,
                    budget_bytes: limit_bytes,
                });
            }
        };
        evicted.into_iter().for_each(|block| free_block(block, gpu, setting));
        let taken = self.allocate_block(len_bytes, gpu, setting);
        taken.map_err(|error| {
            self.cache.release(len_bytes);
            refusal(error, len_bytes, gpu, setting)
        })
    }

    /// Allocates memory from the driver. While the driver has none, frees one cached block after the other and retries.
    fn allocate_block(&mut self, len_bytes: u64, gpu: &Gpu, setting: &Setting) -> Result<Block, DriverError> {
        loop {
            match gpu.driver().allocate(len_bytes as usize) {
                Ok(address) => return Ok(Block { address, len_bytes }),
                Err(error) if error.code == OUT_OF_MEMORY => match self.cache.evict() {
                    Some(block) => free_block(block, gpu, setting),
                    None => return Err(error),
                },
                Err(error) => return Err(error),
            }
        }
    }

    /// Releases unused memory: the engine's own goes to the cache, a caller's to its owner; shared memory is unmapped.
    fn free(&mut self, owner: MemoryOwner, gpu: &Gpu, setting: &Setting) {
        match owner {
            MemoryOwner::Block(block) => {
                self.blocks -= 1;
                self.cache.put_back(block);
            }
            MemoryOwner::Shared(shared) => {
                self.blocks -= 1;
                self.unmap(shared, gpu, setting);
            }
            MemoryOwner::Caller(owner, _) => drop(owner),
            MemoryOwner::Nothing => {}
        }
    }

    /// Leaks memory that may still be in use.
    fn leak(&mut self, owner: ManuallyDrop<MemoryOwner>, setting: &Setting) {
        let (is_own, bytes) = match &*owner {
            MemoryOwner::Block(block) => (true, block.len_bytes),
            MemoryOwner::Shared(shared) => (true, shared.own_bytes()),
            MemoryOwner::Caller(_, len_bytes) => (false, *len_bytes),
            MemoryOwner::Nothing => (false, 0),
        };
        self.blocks -= usize::from(is_own);
        setting.counters.leaked_bytes.add(bytes);
        self.has_leaked = true;
    }

    fn update_counters(&self, setting: &Setting) {
        setting.counters.device_bytes.set(self.cache.in_use_bytes());
        setting.counters.cached_bytes.set(self.cache.cached_bytes());
    }
}

/// Unlocks the pages of memory. Succeeds for pages that are not locked, too.
fn unlock(mapping: &Mapping, gpu: &Gpu) -> Result<(), DriverError> {
    // SAFETY: the memory's last owner has returned it, so no slot of it exists, and no copy runs, since each copy owns
    // its slot.
    match unsafe { gpu.driver().unlock(mapping.start().as_ptr()) } {
        Err(error) if error.code == NOT_REGISTERED => Ok(()),
        unlocked => unlocked,
    }
}

/// Gives memory back to the driver.
fn free_block(block: Block, gpu: &Gpu, setting: &Setting) {
    // SAFETY: the block was in the cache: its last owner was dropped, so no copy of it runs, since each copy is an
    // owner; and every stream that was named as using it has passed its work (`poll`).
    if unsafe { gpu.driver().free(block.address) }.is_err() {
        // Not retried: the memory may have been freed despite the error, and its address reused.
        setting.counters.leaked_bytes.add(block.len_bytes);
    }
}

/// The error for missing device memory, with the device's numbers if it reports them.
fn refusal(error: DriverError, asked_bytes: u64, gpu: &Gpu, setting: &Setting) -> AllocError {
    let device = setting.device();
    match gpu.driver().memory() {
        Ok((free_bytes, total_bytes)) if error.code == OUT_OF_MEMORY => {
            AllocError::DeviceFull { device, asked_bytes, free_bytes, total_bytes }
        }
        _ => AllocError::Device { device, source: error.into() },
    }
}
