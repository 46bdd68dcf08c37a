mod cache;
mod error;
mod linger;
mod page_costs;
mod populated;
mod sharing;

pub use error::AllocError;

use std::{
    fmt, io,
    sync::{Arc, Weak},
};

use cache::{Cache, Keep, MappingKeeper, Taken};
use populated::Populated;
use sharing::{SHAREABLE_BYTES_MIN, Sharing};

use crate::{
    cgroup::{self, Fit},
    mapping::Mapping,
    region::Region,
    reservation::reserved_bytes,
};

/// An allocator of large regions of host memory within a budget, which reuses the memory of dropped regions.
///
/// Why reuse: a consumer receives successive versions of the same size, and receiving into touched memory is two or
/// more times as fast as into fresh memory. Dropped memory therefore stays mapped, in a cache. The cache counts against
/// the budget and is evicted, oldest first, when a new mapping needs room. With [`on_demand`](Self::on_demand) memory
/// is cached only while more allocations are expected, and shortly after that.
///
/// A clone is cheap and shares everything. Dropping the last clone unmaps the cache. Regions may live longer; their
/// memory is unmapped when they are dropped.
#[derive(Clone)]
pub struct HostMemory {
    cache: Arc<Cache>,
}

impl HostMemory {
    /// Limits all regions together to `budget_bytes`, counted in whole pages. Allocates nothing yet.
    pub fn new(budget_bytes: u64) -> Self {
        Self::with(budget_bytes, true, Keep::All)
    }

    /// Like `new`, but caches memory only while a [`CacheLease`] lives, and a little longer. Otherwise dropped memory
    /// is unmapped at once.
    pub fn on_demand(budget_bytes: u64) -> Self {
        Self::with(budget_bytes, true, Keep::OnDemand(0))
    }

    /// Like `new`, but whenever a region is dropped, caches no more memory than is then in use: without a
    /// [`Charge`], dropping the last region empties the cache.
    pub fn in_proportion(budget_bytes: u64) -> Self {
        Self::with(budget_bytes, true, Keep::InProportion)
    }

    /// Like `new`, for memory that may be used only in part: the kernel provides each page at its first use.
    pub(crate) fn lazy(budget_bytes: u64) -> Self {
        Self::with(budget_bytes, false, Keep::All)
    }

    fn with(budget_bytes: u64, prefault: bool, keep: Keep) -> Self {
        Self { cache: Arc::new(Cache::new(budget_bytes, prefault, keep)) }
    }

    /// Makes the memory of later allocations of 64 KiB and more such that other processes of the host can map it, but not
    /// write it: [`Region::shared`] has the descriptor. Each takes a descriptor, which is reused with the memory. Where the
    /// system refuses, memory is private: [`why_not_shareable`](Self::why_not_shareable).
    #[must_use]
    pub fn shareable(self) -> Self {
        self.cache.state().sharing = Sharing::Wanted;
        self
    }

    /// Why the system refused to make memory of a [shareable](Self::shareable) allocator shareable, when it last did so;
    /// `None` if it never did.
    pub fn why_not_shareable(&self) -> Option<String> {
        match &self.cache.state().sharing {
            Sharing::Refused(reason) => Some(reason.clone()),
            Sharing::Unwanted | Sharing::Wanted => None,
        }
    }

    /// Announces repeated allocations. An [`on_demand`](Self::on_demand) allocator caches memory until the lease is
    /// dropped; others ignore leases.
    pub fn demand(&self) -> CacheLease {
        if let Keep::OnDemand(demands) = &mut self.cache.state().keep {
            *demands += 1;
        }
        CacheLease(self.clone())
    }

    /// Allocates a region of `len` bytes that starts on a page.
    ///
    /// Its content is unspecified: zeros in fresh memory, the bytes of an earlier tensor in reused memory, so fill it
    /// before it becomes visible. Costs a lock when memory is reused; otherwise a few system calls, and the unmapping
    /// of evicted memory (milliseconds for gigabytes), so call it once per payload and not once per chunk. Untouched
    /// pages of mappings of 32 MiB and more are populated in the background. Fails when the budget, the operating
    /// system or, for a new mapping of that size, the memory limit of the container has no room.
    pub fn allocate(&self, len: usize) -> Result<Region, AllocError> {
        if len == 0 {
            return Ok(Region::default());
        }
        let mapping = match self.cache.take(len)? {
            Taken::Reused(mapping) => mapping,
            Taken::Room { evicted, mapped_len } => {
                drop(evicted);
                self.map(mapped_len)?
            }
        };
        if self.populates(mapping.len()) {
            mapping.begin();
        }
        let used_bytes = mapping.use_first(len);
        let mut region = Region::new(MappingKeeper { mapping, cache: Arc::downgrade(&self.cache) });
        // The end of a larger reused mapping stays unused.
        let mut end = region.split_off(len).expect("mappings are as long as was asked");
        if used_bytes > len && region.shared().is_ok() {
            end[..used_bytes - len].fill(0); // Whoever maps it sees no earlier tensor of others.
        }
        Ok(region)
    }

    /// Maps memory for a later allocation of `len` bytes, caches it, and populates it in the background, so that its first
    /// writer does not wait for the kernel. If no allocation has reused memory a minute later, it returns to the system.
    /// Does nothing for less than 32 MiB, if the cache has memory for that allocation, if twice as much is in use, since
    /// some of it will come back, if the budget has room only in place of other cached memory, or if it would leave little
    /// of the container's limit.
    pub fn prepare(&self, len: usize) {
        let Some(mapped_len) = Mapping::mapped_len(len).filter(|len| self.populates(*len)) else { return };
        let fits = cgroup::fits((mapped_len as u64).saturating_add(reserved_bytes())) == Fit::Well;
        if !fits || !self.cache.take_beside(mapped_len) {
            return;
        }
        let Ok(mapping) = self.map(mapped_len) else { return };
        mapping.begin();
        let prepared = Arc::downgrade(&mapping);
        let released = self.cache.state().put_back(mapping);
        drop(released); // Outside the lock: unmapping is slow.
        linger::begin_prepared(&self.cache, prepared);
    }

    /// Whether `bytes` could be allocated now, within the budget and well within the memory limit of the container. Reads a
    /// few files.
    pub fn has_room(&self, bytes: u64) -> bool {
        let stats = self.stats();
        let new_bytes = bytes.saturating_sub(stats.cached_bytes).saturating_add(reserved_bytes());
        stats.in_use_bytes.saturating_add(bytes) <= self.cache.budget_bytes
            && cgroup::fits(new_bytes) == Fit::Well
    }

    /// Counts `len` bytes as in use that this `HostMemory` did not allocate: memory of another process that this
    /// process keeps alive. Evicts cached memory if needed. Fails when the budget has no room.
    pub fn charge(&self, len: usize) -> Result<Charge, AllocError> {
        let mapped_len = Mapping::mapped_len(len)
            .ok_or_else(|| AllocError::Os { len, source: io::ErrorKind::OutOfMemory.into() })?;
        let evicted = self.cache.make_room(&mut self.cache.state(), len, mapped_len)?;
        drop(evicted); // Outside the lock: unmapping is slow.
        Ok(Charge { bytes: mapped_len as u64, cache: Arc::downgrade(&self.cache) })
    }

    /// Unmaps all cached memory: for callers that expect not to reuse it soon. Takes milliseconds for gigabytes.
    pub fn release_cached(&self) {
        let released = self.cache.state().shrink_cache(0);
        drop(released); // Outside the lock: unmapping is slow.
    }

    /// The current counters.
    pub fn stats(&self) -> HostMemoryStats {
        let state = self.cache.state();
        HostMemoryStats {
            in_use_bytes: state.in_use_bytes,
            cached_bytes: state.cached_bytes,
            fresh: state.fresh_count,
            reused: state.reused_count,
        }
    }

    /// Maps memory that the cache has counted as in use. On failure, no longer counts it.
    fn map(&self, len: usize) -> Result<Arc<Populated>, AllocError> {
        let fits = if self.populates(len) { self.must_fit_cgroup(len as u64) } else { Ok(()) };
        let mapped = fits.and_then(|()| self.map_pages(len).map_err(|source| AllocError::Os { len, source }));
        match mapped {
            Ok(mapping) => {
                self.cache.state().fresh_count += 1;
                Ok(Arc::new(mapping))
            }
            Err(error) => {
                self.cache.state().in_use_bytes -= len as u64;
                Err(error)
            }
        }
    }

    /// Maps memory: shareable, if that is wanted and the system makes it.
    fn map_pages(&self, len: usize) -> io::Result<Populated> {
        let is_private = matches!(self.cache.state().sharing, Sharing::Unwanted);
        if is_private || len < SHAREABLE_BYTES_MIN {
            return Populated::private(len);
        }
        Populated::shared(len).or_else(|error| {
            self.cache.state().sharing.refuse(&error);
            Populated::private(len)
        })
    }

    /// Whether memory of this length is populated in advance.
    fn populates(&self, len: usize) -> bool {
        self.cache.prefault && len >= POPULATED_BYTES_MIN
    }

    /// Refuses an allocation beyond the container's memory limit: the system would kill this process when the memory is
    /// touched. Evicts all cached memory first if little of the limit would be left.
    fn must_fit_cgroup(&self, asked_bytes: u64) -> Result<(), AllocError> {
        let with_reserved = asked_bytes.saturating_add(reserved_bytes());
        let mut fit = cgroup::fits(with_reserved);
        if fit != Fit::Well {
            self.release_cached();
            fit = cgroup::fits(with_reserved);
        }
        match fit {
            Fit::Well => Ok(()),
            Fit::Closely { left, limit } => {
                tracing::warn!(
                    "After an allocation of {asked_bytes} bytes for tensors, {left} bytes are left of the container's memory \
                     limit (cgroup) of {limit} bytes: the system kills this process when it needs more. Raise that limit."
                );
                Ok(())
            }
            Fit::Not { free, limit } => {
                let free_bytes = free.saturating_sub(reserved_bytes());
                Err(AllocError::OverCgroup { asked_bytes, free_bytes, limit_bytes: limit })
            }
        }
    }
}

/// The smallest mapping that is populated in advance: for smaller ones, threads save little time, and frequent
/// allocations would start many of them.
const POPULATED_BYTES_MIN: usize = 32 << 20;

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stats = self.stats();
        f.debug_struct("HostMemory")
            .field("budget_bytes", &self.cache.budget_bytes)
            .field("stats", &stats)
            .finish()
    }
}

/// An announcement of repeated allocations from an [`on_demand`](HostMemory::on_demand) allocator.
///
/// When the last lease is dropped and the allocator holds less than 32 MiB, its cached memory is unmapped at once;
/// otherwise two seconds later, unless another lease is taken meanwhile. Unmapping takes milliseconds for gigabytes.
#[derive(Debug)]
pub struct CacheLease(HostMemory);

impl Drop for CacheLease {
    fn drop(&mut self) {
        let released = {
            let mut state = self.0.cache.state();
            if let Keep::OnDemand(demands) = &mut state.keep {
                *demands -= 1;
            }
            match linger::is_worth_it(&state) {
                true => linger::begin(&self.0.cache, &mut state),
                false => state.evict_unneeded(),
            }
        };
        drop(released); // Outside the lock: unmapping is slow.
    }
}

/// Bytes that count as in use until this is dropped.
pub struct Charge {
    bytes: u64,
    cache: Weak<Cache>,
}

impl Drop for Charge {
    fn drop(&mut self) {
        if let Some(cache) = self.cache.upgrade() {
            cache.state().in_use_bytes -= self.bytes;
        }
    }
}

impl fmt::Debug for Charge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Charge").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

/// The counters of a [`HostMemory`]. All sizes are those of mappings: whole pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostMemoryStats {
    /// Bytes of existing regions, and bytes that are [charged](HostMemory::charge). The sum with `cached_bytes` never
    /// exceeds the budget.
    pub in_use_bytes: u64,
    /// Bytes cached for reuse. They move here from `in_use_bytes` when a region is dropped and cached.
    pub cached_bytes: u64,
    /// The number of allocated regions that needed a new mapping, and of [prepared](HostMemory::prepare) mappings. The sum
    /// with `reused` is the number of all regions allocated so far, without empty ones, and of prepared mappings.
    pub fresh: u64,
    /// The number of allocated regions in reused memory.
    pub reused: u64,
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;
    use crate::mapping::PAGE_BYTES;

    const PAGE: u64 = PAGE_BYTES as u64;

    #[test]
    fn a_dropped_region_is_reused_at_the_same_address() {
        let memory = HostMemory::new(1 << 20);
        let first = memory.allocate(100_000).unwrap();
        let address = first.as_ptr();
        drop(first);
        let second = memory.allocate(90_000).unwrap();
        assert_eq!((second.as_ptr(), second.len()), (address, 90_000));
        assert_eq!((memory.stats().fresh, memory.stats().reused), (1, 1));
    }

    #[test]
    fn memory_without_a_lease_returns_to_the_system() {
        let memory = HostMemory::on_demand(1 << 20);
        let held = || (memory.stats().in_use_bytes, memory.stats().cached_bytes);
        drop(memory.allocate(PAGE_BYTES).unwrap());
        assert_eq!(held(), (0, 0), "without a lease");
        let (one, other) = (memory.demand(), memory.demand());
        let late = memory.allocate(PAGE_BYTES).unwrap();
        drop(memory.allocate(PAGE_BYTES).unwrap());
        drop(one);
        assert_eq!(held(), (PAGE, PAGE));
        drop(other);
        assert_eq!(held(), (PAGE, 0));
        drop(late);
        assert_eq!(held(), (0, 0));
    }

    #[test]
    fn no_more_is_cached_than_is_in_use() {
        let memory = HostMemory::in_proportion(1 << 20);
        let mut regions: Vec<Region> = (0..4).map(|_| memory.allocate(PAGE_BYTES).unwrap()).collect();
        for expected in [(3, 1), (2, 2), (1, 1), (0, 0)] {
            regions.pop();
            let HostMemoryStats { in_use_bytes, cached_bytes, .. } = memory.stats();
            assert_eq!((in_use_bytes / PAGE, cached_bytes / PAGE), expected);
        }
    }

    #[test]
    fn fresh_memory_is_zero_and_aligned() {
        let region = HostMemory::new(u64::MAX).allocate(10_001).unwrap();
        assert!(region.iter().all(|&byte| byte == 0));
        assert_eq!(region.as_ptr().addr() % 4096, 0);
    }

    #[test]
    fn memory_returns_when_the_last_part_is_dropped() {
        let memory = HostMemory::new(PAGE);
        let mut region = memory.allocate(4096).unwrap();
        let tail = region.split_off(100).unwrap().freeze();
        drop(region);
        assert_eq!(memory.stats().in_use_bytes, PAGE);
        let clone = tail.slice(5..9);
        drop(tail);
        assert!(memory.allocate(1).is_err());
        drop(clone);
        assert_eq!(memory.stats().cached_bytes, PAGE);
        assert!(memory.allocate(1).is_ok());
    }

    #[test]
    fn a_mapping_of_more_than_twice_the_request_is_not_reused() {
        let memory = HostMemory::new(u64::MAX);
        drop(memory.allocate(3 * PAGE_BYTES).unwrap());
        let small = memory.allocate(PAGE_BYTES).unwrap();
        assert_eq!(memory.stats().reused, 0);
        drop(small);
        drop(memory.allocate(2 * PAGE_BYTES).unwrap());
        assert_eq!(memory.stats().reused, 1);
    }

    #[test]
    fn prepared_memory_is_used_next() {
        let memory = HostMemory::new(u64::MAX);
        let len = POPULATED_BYTES_MIN;
        memory.prepare(len - PAGE_BYTES);
        assert_eq!(memory.stats().cached_bytes, 0, "less than is populated");
        memory.prepare(len);
        memory.prepare(len); // It exists.
        let stats = memory.stats();
        assert_eq!((stats.in_use_bytes, stats.cached_bytes), (0, len as u64));
        let region = memory.allocate(len).unwrap();
        assert_eq!((memory.stats().reused, memory.stats().cached_bytes), (1, 0));
        assert!(region.iter().step_by(PAGE_BYTES).all(|byte| *byte == 0));
    }

    #[test]
    fn prepared_memory_takes_nobodys_place() {
        let len = POPULATED_BYTES_MIN;
        let memory = HostMemory::new(len as u64 + PAGE);
        drop(memory.allocate(2 * PAGE_BYTES));
        memory.prepare(len);
        assert_eq!(memory.stats().cached_bytes, 2 * PAGE);
        let on_demand = HostMemory::on_demand(u64::MAX);
        on_demand.prepare(len);
        let stats = on_demand.stats();
        assert_eq!((stats.in_use_bytes, stats.cached_bytes), (0, 0), "without a lease");
    }

    #[test]
    fn the_cache_makes_room_oldest_first() {
        let memory = HostMemory::new(4 * PAGE);
        let regions = [1, 1, 2].map(|pages| memory.allocate(pages * PAGE_BYTES).unwrap());
        drop(regions);
        let _large = memory.allocate(3 * PAGE_BYTES).unwrap();
        let stats = memory.stats();
        assert_eq!((stats.in_use_bytes, stats.cached_bytes), (3 * PAGE, 0));
    }

    #[test]
    fn the_budget_error_has_the_numbers() {
        let memory = HostMemory::new(2 * PAGE);
        let _held = memory.allocate(5000).unwrap();
        let error = memory.allocate(1).unwrap_err();
        assert!(matches!(
            error,
            AllocError::OverBudget { asked_bytes: 1, in_use_bytes: 8192, budget_bytes: 8192 }
        ));
    }

    #[test]
    fn a_charge_counts_until_it_is_dropped() {
        let memory = HostMemory::new(2 * PAGE);
        drop(memory.allocate(1).unwrap());
        let charge = memory.charge(5000).unwrap();
        let stats = memory.stats();
        assert_eq!((stats.in_use_bytes, stats.cached_bytes), (2 * PAGE, 0), "the cache was evicted");
        assert!(matches!(memory.charge(1), Err(AllocError::OverBudget { .. })));
        assert!(matches!(memory.allocate(1), Err(AllocError::OverBudget { .. })));
        assert!(memory.charge(usize::MAX).is_err());
        drop(charge);
        assert_eq!(memory.stats().in_use_bytes, 0);
    }

    #[test]
    fn cached_memory_can_be_released() {
        let memory = HostMemory::new(u64::MAX);
        let held = memory.allocate(1).unwrap();
        drop(memory.allocate(5000).unwrap());
        memory.release_cached();
        let stats = memory.stats();
        assert_eq!((stats.in_use_bytes, stats.cached_bytes), (PAGE, 0));
        drop(held);
        assert_eq!(memory.stats().cached_bytes, PAGE);
    }

    #[test]
    fn a_refusal_by_the_system_changes_no_counter() {
        let memory = HostMemory::new(u64::MAX);
        for len in [usize::MAX, 1 << 62] {
            assert!(matches!(memory.allocate(len), Err(AllocError::Os { .. })));
        }
        assert_eq!(memory.stats().in_use_bytes, 0);
    }

    #[test]
    fn an_empty_region_needs_no_budget() {
        let memory = HostMemory::new(0);
        assert!(memory.allocate(0).unwrap().is_empty());
    }

    #[test]
    fn a_region_outlives_its_allocator() {
        let mut region = HostMemory::new(u64::MAX).allocate(40 << 20).unwrap();
        region.fill(7);
        assert_eq!(region.freeze()[(40 << 20) - 1], 7);
    }

    proptest! {
        #[test]
        fn the_books_always_balance(shareable in any::<bool>(), ops in vec((any::<bool>(), 1usize..40_000), 0..60)) {
            // Shareable memory is in larger pieces.
            let (memory, unit) = match shareable {
                true => (HostMemory::new(16 * 32 * PAGE).shareable(), 16),
                false => (HostMemory::new(32 * PAGE), 1),
            };
            let mut held = Vec::new();
            let mut allocations = 0;
            for (allocate, n) in ops {
                if allocate {
                    if let Ok(region) = memory.allocate(unit * n) {
                        // A smaller one may reuse such memory.
                        let (is_shared, is_large) = (region.shared().is_ok(), unit * n >= SHAREABLE_BYTES_MIN);
                        let is_right = if is_large { is_shared == shareable } else { shareable || !is_shared };
                        prop_assert!(is_right);
                        allocations += 1;
                        held.push(region);
                    }
                } else if !held.is_empty() {
                    held.swap_remove(n % held.len());
                }
                let stats = memory.stats();
                let held_bytes: u64 = held.iter().map(|r| (r.len() as u64).next_multiple_of(PAGE)).sum();
                prop_assert!(stats.in_use_bytes + stats.cached_bytes <= unit as u64 * 32 * PAGE);
                prop_assert!((held_bytes..=2 * held_bytes).contains(&stats.in_use_bytes));
                prop_assert_eq!(stats.fresh + stats.reused, allocations);
            }
            drop(held);
            prop_assert_eq!(memory.stats().in_use_bytes, 0);
        }
    }
}
