use crate::Lock;
use std::{
    io,
    ptr::NonNull,
    sync::{Arc, MutexGuard, Weak},
};

use super::sharing::{SHAREABLE_BYTES_MIN, Sharing};
use super::{AllocError, HostMemory, linger::Linger, populated::Populated};
use crate::{mapping::Mapping, region::Keeper, shared_range::SharedFile};

/// The state shared by all clones of a `HostMemory`: the bytes in use, and the cached mappings.
pub(super) struct Cache {
    pub(super) budget_bytes: u64,
    /// Whether large mappings are populated in advance.
    pub(super) prefault: bool,
    state: Lock<State>,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) in_use_bytes: u64,
    pub(super) cached_bytes: u64,
    pub(super) fresh_count: u64,
    pub(super) reused_count: u64,
    /// Cached mappings, least recently used first. The budget bounds their number, since each counts a page or more.
    pub(super) cached: Vec<Arc<Populated>>,
    pub(super) keep: Keep,
    pub(super) linger: Linger,
    pub(super) sharing: Sharing,
}

/// The policy that limits cached memory, within the budget.
#[derive(Debug, Clone, Copy, Default)]
pub(super) enum Keep {
    #[default]
    All,
    /// All memory while there are [`CacheLease`](super::CacheLease)s, whose number this is, and for the linger time
    /// afterwards; then none.
    OnDemand(u64),
    /// As much memory as is in use when a region is dropped.
    InProportion,
}

pub(super) enum Taken {
    Reused(Arc<Populated>),
    /// Budget for a new mapping, already counted as in use. Drop `evicted` before mapping, so that the budget
    /// holds, and outside the lock, since unmapping is slow.
    Room {
        evicted: Vec<Arc<Populated>>,
        mapped_len: usize,
    },
}

impl Cache {
    pub(super) fn new(budget_bytes: u64, prefault: bool, keep: Keep) -> Self {
        Self { budget_bytes, prefault, state: Lock::new(State { keep, ..State::default() }) }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    pub(super) fn take(&self, len: usize) -> Result<Taken, AllocError> {
        let mapped_len = Mapping::mapped_len(len)
            .ok_or_else(|| AllocError::Os { len, source: io::ErrorKind::OutOfMemory.into() })?;
        let mut state = self.state();
        if let Some(mapping) = state.take_cached(mapped_len) {
            return Ok(Taken::Reused(mapping));
        }
        let evicted = self.make_room(&mut state, len, mapped_len)?;
        Ok(Taken::Room { evicted, mapped_len })
    }

    /// Counts `mapped_len` more bytes as in use, for a new mapping, if the next allocation of that length will need one:
    /// none is cached, and none that is in use beside the newest will come back. Returns false without budget for one that
    /// evicts no other.
    pub(super) fn take_beside(&self, mapped_len: usize) -> bool {
        let (mut state, len) = (self.state(), mapped_len as u64);
        let free_bytes = self.budget_bytes - state.in_use_bytes - state.cached_bytes;
        let is_needed = state.find_cached(mapped_len).is_none() && state.in_use_bytes < len.saturating_mul(2);
        let takes = is_needed && len <= free_bytes;
        state.in_use_bytes += if takes { len } else { 0 };
        takes
    }

    /// Counts `mapped_len` more bytes as in use, and returns the evicted mappings.
    pub(super) fn make_room(
        &self,
        state: &mut State,
        len: usize,
        mapped_len: usize,
    ) -> Result<Vec<Arc<Populated>>, AllocError> {
        let free_bytes = self.budget_bytes - state.in_use_bytes;
        if mapped_len as u64 > free_bytes {
            return Err(AllocError::OverBudget {
                asked_bytes: len as u64,
                in_use_bytes: state.in_use_bytes,
                budget_bytes: self.budget_bytes,
            });
        }
        let evicted = state.shrink_cache(free_bytes - mapped_len as u64);
        state.in_use_bytes += mapped_len as u64;
        Ok(evicted)
    }
}

impl State {
    /// The smallest cached mapping that fits, unless more than half of it would be unused.
    fn find_cached(&self, mapped_len: usize) -> Option<usize> {
        let fits = mapped_len..=mapped_len.saturating_mul(2);
        let candidates = self
            .cached
            .iter()
            .enumerate()
            .filter(|(_, mapping)| fits.contains(&mapping.len()));
        candidates.min_by_key(|(_, mapping)| mapping.len()).map(|(index, _)| index)
    }

    fn take_cached(&mut self, mapped_len: usize) -> Option<Arc<Populated>> {
        let mapping = self.cached.remove(self.find_cached(mapped_len)?);
        self.cached_bytes -= mapping.len() as u64;
        self.in_use_bytes += mapping.len() as u64;
        self.reused_count += 1;
        Some(mapping)
    }

    /// Removes a mapping from the cache, if nothing was taken from the cache since the number of reused ones was `reused`.
    pub(super) fn take_unused(&mut self, mapping: &Weak<Populated>, reused: u64) -> Option<Arc<Populated>> {
        let is_it = |cached: &Arc<Populated>| std::ptr::eq(Arc::as_ptr(cached), mapping.as_ptr());
        let index = self.cached.iter().position(is_it).filter(|_| self.reused_count == reused)?;
        self.cached_bytes -= self.cached[index].len() as u64;
        Some(self.cached.remove(index))
    }

    /// Evicts the least recently used mappings until at most `keep_bytes` are cached.
    pub(super) fn shrink_cache(&mut self, keep_bytes: u64) -> Vec<Arc<Populated>> {
        let mut count = 0;
        while self.cached_bytes > keep_bytes {
            self.cached_bytes -= self.cached[count].len() as u64;
            count += 1;
        }
        self.cached.drain(..count).collect()
    }

    /// Evicts the mappings that the policy does not keep.
    pub(super) fn evict_unneeded(&mut self) -> Vec<Arc<Populated>> {
        match self.keep {
            Keep::All | Keep::OnDemand(1..) => vec![],
            Keep::OnDemand(0) if self.linger.is_on() => vec![],
            Keep::OnDemand(0) => self.shrink_cache(0),
            Keep::InProportion => self.shrink_cache(self.in_use_bytes),
        }
    }

    /// Caches a mapping that was counted as in use, and returns those that the policy does not keep.
    pub(super) fn put_back(&mut self, mapping: Arc<Populated>) -> Vec<Arc<Populated>> {
        self.in_use_bytes -= mapping.len() as u64;
        if mapping.file().is_some_and(|file| file.is_retired()) {
            return vec![mapping];
        }
        self.cached_bytes += mapping.len() as u64;
        self.cached.push(mapping);
        self.evict_unneeded()
    }
}

/// The keeper under every region of a `HostMemory`: the one user of a mapping's bytes while regions of it live.
pub(super) struct MappingKeeper {
    pub(super) mapping: Arc<Populated>,
    pub(super) cache: Weak<Cache>,
}

// SAFETY: a mapping keeps its constant range mapped and initialised (zeroed by the kernel) as long as it lives. It has
// one keeper or is in the cache; a keeper that is dropped puts it there, or drops it if the cache is gone, and does not
// access its bytes any more; the threads that populate it hold it too but do not access its bytes. Other processes that
// map its file can only read (`Memfd::map_writable`).
unsafe impl Keeper for MappingKeeper {
    fn start(&self) -> NonNull<u8> {
        self.mapping.start()
    }

    fn len(&self) -> usize {
        self.mapping.len()
    }

    fn file(&self) -> Option<&Arc<SharedFile>> {
        self.mapping.file()
    }

    fn was_refused(&self) -> bool {
        let is_large = self.mapping.len() >= SHAREABLE_BYTES_MIN;
        let refused = |cache: Arc<Cache>| matches!(cache.state().sharing, Sharing::Refused(_));
        is_large && self.mapping.file().is_none() && self.cache.upgrade().is_some_and(refused)
    }

    fn has_small_pages(&self) -> bool {
        self.mapping.has_small_pages()
    }

    fn enlarge_next_pages(&self) -> bool {
        self.mapping.enlarge_next_pages()
    }

    fn memory(&self) -> Option<HostMemory> {
        self.cache.upgrade().map(|cache| HostMemory { cache })
    }
}

impl Drop for MappingKeeper {
    fn drop(&mut self) {
        self.mapping.stop();
        if let Some(cache) = self.cache.upgrade() {
            let released = cache.state().put_back(Arc::clone(&self.mapping));
            drop(released); // Outside the lock: unmapping is slow.
        }
    }
}
