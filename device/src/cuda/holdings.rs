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
    memory::{CudaMemory, are_passed},
    memory_cache::{Block, MemoryCache, NoRoom, Taken},
    memory_owner::MemoryOwner,
    opened::Opened,
    options::CudaOptions,
    page_locked::PageLocked,
    setting::Setting,
};
use crate::{host_memory::AllocError, mapping::Mapping};

/// The memory that an engine gave out, and returned memory that is not free yet.
pub(super) struct Holdings {
    shelf: MemoryCache,
    /// Opened allocations of other processes.
    opened: Opened,
    /// Device memory that is held, or that waits below.
    blocks: usize,
    /// Page-locked memory that is held.
    locked: usize,
    /// Returned memory that a caller's stream may still use. Each was given out once, which bounds it.
    waiting: Vec<Waiting>,
    last_wait: Duration,
    /// Whether leaked memory may still be in use: then its context must stay.
    kept: bool,
}

struct Waiting {
    holding: ManuallyDrop<MemoryOwner>,
    fences: Vec<Fence>,
    since: Instant,
}

impl Holdings {
    pub(super) fn new(options: &CudaOptions) -> Self {
        Self {
            shelf: MemoryCache::new(options.memory_limit_bytes.unwrap_or(u64::MAX)),
            opened: Opened::default(),
            blocks: 0,
            locked: 0,
            waiting: Vec::new(),
            last_wait: options.last_wait(),
            kept: false,
        }
    }

    /// Allocates device memory: reused, or the driver's.
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
        let (address, holding) = match len {
            0 => (0, MemoryOwner::Nothing),
            _ => {
                let block = self.block(len, gpu, setting)?;
                self.blocks += 1;
                (block.address, MemoryOwner::Block(block))
            }
        };
        self.count(setting);
        Ok(CudaMemory::new(setting.engine, address, len, holding, setting.inbox.clone()))
    }

    /// Allocates page-locked host memory.
    pub(super) fn lock(
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
    pub(super) fn take_back(&mut self, holding: ManuallyDrop<MemoryOwner>, fences: Vec<Fence>) {
        self.waiting.push(Waiting { holding, fences, since: Instant::now() });
    }

    /// Unlocks returned memory. If that fails it stays mapped: the device may reach it.
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
            setting.counters.kept_bytes.add(len_bytes);
        }
    }

    /// Frees the memory whose fences are passed by now. Long after the engine is closed, the rest is leaked.
    pub(super) fn look(&mut self, now: Instant, gpu: &Gpu, setting: &Setting, failed: bool, closed: bool) {
        if self.waiting.is_empty() {
            return;
        }
        for mut waiting in mem::take(&mut self.waiting) {
            let given_up = closed && waiting.since + self.last_wait <= now;
            match are_passed(&mut waiting.fences) {
                _ if failed => self.keep(waiting.holding, setting),
                Some(Ok(())) => self.free(ManuallyDrop::into_inner(waiting.holding), gpu, setting),
                None if !given_up => self.waiting.push(waiting),
                // Its users are unknown.
                _ => self.keep(waiting.holding, setting),
            }
        }
        self.count(setting);
    }

    /// The deadline for returned memory once the engine is closing.
    pub(super) fn wake_at(&self) -> Option<Instant> {
        self.waiting.iter().map(|waiting| waiting.since + self.last_wait).min()
    }

    /// Whether everything given out has been returned.
    pub(super) fn are_back(&self) -> bool {
        self.blocks == 0 && self.locked == 0 && self.waiting.is_empty()
    }

    /// Returns cached memory to the driver; the result tells whether the context may be released too: not while leaked
    /// memory of it may be in use.
    pub(super) fn free_all(mut self, gpu: &Gpu, setting: &Setting) -> bool {
        while let Some(block) = self.shelf.evict() {
            free_block(block, gpu, setting);
        }
        self.count(setting);
        !self.kept
    }

    fn block(&mut self, len: usize, gpu: &Gpu, setting: &Setting) -> Result<Block, AllocError> {
        let (evicted, len_bytes) = match self.shelf.take(len) {
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
        let taken = self.ask_driver(len_bytes, gpu, setting);
        taken.map_err(|error| {
            self.shelf.give_up(len_bytes);
            refusal(error, len_bytes, gpu, setting)
        })
    }

    /// Asks the driver for memory; if it has none, again after returning each cached block.
    fn ask_driver(&mut self, len_bytes: u64, gpu: &Gpu, setting: &Setting) -> Result<Block, DriverError> {
        loop {
            match gpu.driver().allocate(len_bytes as usize) {
                Ok(address) => return Ok(Block { address, len_bytes }),
                Err(error) if error.code == OUT_OF_MEMORY => match self.shelf.evict() {
                    Some(block) => free_block(block, gpu, setting),
                    None => return Err(error),
                },
                Err(error) => return Err(error),
            }
        }
    }

    /// Frees unused memory: the engine's own goes to the cache, a caller's to its owner; shared memory is unmapped.
    fn free(&mut self, holding: MemoryOwner, gpu: &Gpu, setting: &Setting) {
        match holding {
            MemoryOwner::Block(block) => {
                self.blocks -= 1;
                self.shelf.put_back(block);
            }
            MemoryOwner::Shared(shared) => {
                self.blocks -= 1;
                self.unmap(shared, gpu, setting);
            }
            MemoryOwner::Owner(owner) => drop(owner),
            MemoryOwner::Nothing => {}
        }
    }

    /// Leaks memory that may still be in use.
    fn keep(&mut self, holding: ManuallyDrop<MemoryOwner>, setting: &Setting) {
        let own_bytes = match &*holding {
            MemoryOwner::Block(block) => Some(block.len_bytes),
            MemoryOwner::Shared(shared) => Some(shared.own_bytes()),
            MemoryOwner::Owner(_) | MemoryOwner::Nothing => None,
        };
        if let Some(own_bytes) = own_bytes {
            self.blocks -= 1;
            setting.counters.kept_bytes.add(own_bytes);
        }
        self.kept = true;
    }

    fn count(&self, setting: &Setting) {
        setting.counters.device_bytes.set(self.shelf.in_use_bytes());
        setting.counters.cached_bytes.set(self.shelf.cached_bytes());
    }
}

/// Unlocks the pages of memory. Pages that are not locked are fine too.
fn unlock(mapping: &Mapping, gpu: &Gpu) -> Result<(), DriverError> {
    // SAFETY: its last owner has sent it, so no slot of it is left, and no copy either: each owns its slot.
    match unsafe { gpu.driver().unlock(mapping.start().as_ptr()) } {
        Err(error) if error.code == NOT_REGISTERED => Ok(()),
        unlocked => unlocked,
    }
}

/// Returns memory to the driver.
fn free_block(block: Block, gpu: &Gpu, setting: &Setting) {
    // SAFETY: it was on the shelf: its last owner is gone, with it all copies, each of which is an owner, and every
    // stream that was named as using it is past that (`look`).
    if unsafe { gpu.driver().free(block.address) }.is_err() {
        // It is not retried: it may have been freed, and its address reused by then.
        setting.counters.kept_bytes.add(block.len_bytes);
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
