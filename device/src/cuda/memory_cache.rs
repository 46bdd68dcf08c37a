use std::collections::VecDeque;

/// The accounting and cache of an engine's device memory: what is in use, what is cached for reuse, and the limit.
///
/// Why reuse: successive versions have the same size, and freeing memory may wait for all work on the device, the
/// caller's kernels included. So returned memory stays cached until the limit, or a driver that has no more memory,
/// requires its eviction.
#[derive(Debug)]
pub(super) struct MemoryCache {
    limit_bytes: u64,
    in_use_bytes: u64,
    cached_bytes: u64,
    /// The cached blocks, least recently used first.
    cached: VecDeque<Block>,
}

/// One allocation of the driver's. Dropping the value frees nothing.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Block {
    pub(super) address: u64,
    /// The allocated size: at least the requested one.
    pub(super) len_bytes: u64,
}

/// The result of a successful `take`.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Taken {
    /// A cached block.
    Reused(Block),
    /// Room for a new allocation, once `evicted` is freed. Its bytes are already counted as in use.
    Room { evicted: Vec<Block>, len_bytes: u64 },
}

/// The limit has no room, even with an empty cache.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct NoRoom {
    pub(super) in_use_bytes: u64,
    pub(super) limit_bytes: u64,
}

impl MemoryCache {
    pub(super) fn new(limit_bytes: u64) -> Self {
        Self { limit_bytes, in_use_bytes: 0, cached_bytes: 0, cached: VecDeque::new() }
    }

    pub(super) fn in_use_bytes(&self) -> u64 {
        self.in_use_bytes
    }

    pub(super) fn cached_bytes(&self) -> u64 {
        self.cached_bytes
    }

    pub(super) fn take(&mut self, len: usize) -> Result<Taken, NoRoom> {
        let no_room = NoRoom { in_use_bytes: self.in_use_bytes, limit_bytes: self.limit_bytes };
        let Some(len_bytes) = round_up(len) else { return Err(no_room) };
        if let Some(block) = self.take_cached(len_bytes) {
            return Ok(Taken::Reused(block));
        }
        let evicted = self.make_room(len_bytes)?;
        Ok(Taken::Room { evicted, len_bytes })
    }

    /// Counts `len_bytes` as in use, until `release` or `put_back`. The result is the evicted blocks, which the caller
    /// must free.
    pub(super) fn make_room(&mut self, len_bytes: u64) -> Result<Vec<Block>, NoRoom> {
        let no_room = NoRoom { in_use_bytes: self.in_use_bytes, limit_bytes: self.limit_bytes };
        let free_bytes = self.limit_bytes - self.in_use_bytes;
        let Some(keep_bytes) = free_bytes.checked_sub(len_bytes) else { return Err(no_room) };
        let mut evicted = Vec::new();
        while self.cached_bytes > keep_bytes {
            evicted.extend(self.evict());
        }
        self.in_use_bytes += len_bytes;
        Ok(evicted)
    }

    /// Undoes `make_room`, or a `take` that returned `Room` which the driver could not allocate.
    pub(super) fn release(&mut self, len_bytes: u64) {
        self.in_use_bytes -= len_bytes;
    }

    /// Adds a block that is no longer used to the cache.
    pub(super) fn put_back(&mut self, block: Block) {
        self.in_use_bytes -= block.len_bytes;
        self.cached_bytes += block.len_bytes;
        self.cached.push_back(block);
    }

    /// Evicts the least recently used block.
    pub(super) fn evict(&mut self) -> Option<Block> {
        let block = self.cached.pop_front()?;
        self.cached_bytes -= block.len_bytes;
        Some(block)
    }

    /// Takes the smallest cached block that fits, unless more than half of it would be unused.
    fn take_cached(&mut self, len_bytes: u64) -> Option<Block> {
        let fits = len_bytes..=len_bytes.saturating_mul(2);
        let candidates = self
            .cached
            .iter()
            .enumerate()
            .filter(|(_, block)| fits.contains(&block.len_bytes));
        let (best, _) = candidates.min_by_key(|(_, block)| block.len_bytes)?;
        let block = self.cached.remove(best)?;
        self.cached_bytes -= block.len_bytes;
        self.in_use_bytes += block.len_bytes;
        Some(block)
    }
}

/// Rounds a length up to the driver's allocation unit, so that tensors of nearly equal size can reuse each other's
/// memory, and the limit counts the memory really allocated. `None` on overflow.
fn round_up(len: usize) -> Option<u64> {
    let len = len as u64;
    let unit = if len < LARGE_BYTES { SMALL_UNIT_BYTES } else { LARGE_UNIT_BYTES };
    len.checked_next_multiple_of(unit)
}

/// The size of the driver's device pages. Small allocations share a page.
const LARGE_UNIT_BYTES: u64 = 2 << 20;
const SMALL_UNIT_BYTES: u64 = 512;
/// The smallest allocation that has pages of its own.
const LARGE_BYTES: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    /// A device model that numbers its allocations and tracks which are live.
    #[derive(Default)]
    struct Device {
        next: u64,
        live: Vec<u64>,
    }

    impl Device {
        fn allocate(&mut self, len_bytes: u64) -> Block {
            self.next += 1;
            self.live.push(self.next);
            Block { address: self.next, len_bytes }
        }

        fn free(&mut self, block: &Block) {
            let at = self.live.iter().position(|&live| live == block.address);
            self.live.swap_remove(at.expect("freed once"));
        }
    }

    #[test]
    fn lengths_are_rounded_to_the_drivers_units() {
        assert_eq!(round_up(0), Some(0));
        assert_eq!(round_up(1), Some(512));
        assert_eq!(round_up((1 << 20) - 1), Some(1 << 20));
        assert_eq!(round_up(1 << 20), Some(2 << 20));
        assert_eq!(round_up((2 << 20) + 1), Some(4 << 20));
        assert_eq!(round_up(usize::MAX), None);
    }

    #[test]
    fn the_error_at_the_limit_has_the_numbers() {
        let mut cache = MemoryCache::new(4096);
        assert!(matches!(cache.take(4000), Ok(Taken::Room { len_bytes: 4096, .. })));
        assert_eq!(cache.take(1), Err(NoRoom { in_use_bytes: 4096, limit_bytes: 4096 }));
        assert!(MemoryCache::new(u64::MAX).take(usize::MAX).is_err());
    }

    #[test]
    fn the_oldest_block_is_evicted_first() {
        let mut cache = MemoryCache::new(4096);
        for _ in 0..2 {
            assert!(matches!(cache.take(1024), Ok(Taken::Room { .. })));
        }
        for address in [1, 2] {
            cache.put_back(Block { address, len_bytes: 1024 });
        }
        let Ok(Taken::Room { evicted, .. }) = cache.take(3072) else { panic!("there is room") };
        assert_eq!(evicted, [Block { address: 1, len_bytes: 1024 }]);
        assert_eq!(cache.take(1000), Ok(Taken::Reused(Block { address: 2, len_bytes: 1024 })));
    }

    proptest! {
        #[test]
        fn the_books_always_balance(ops in vec((any::<bool>(), 1usize..9000, any::<bool>()), 0..80)) {
            const LIMIT: u64 = 32 << 10;
            let mut cache = MemoryCache::new(LIMIT);
            let mut device = Device::default();
            let mut held: Vec<Block> = Vec::new();
            for (take, n, refused) in ops {
                if take {
                    match cache.take(n) {
                        Ok(Taken::Reused(block)) => held.push(block),
                        Ok(Taken::Room { evicted, len_bytes }) => {
                            evicted.iter().for_each(|block| device.free(block));
                            match refused {
                                true => cache.release(len_bytes),
                                false => held.push(device.allocate(len_bytes)),
                            }
                        }
                        Err(no_room) => prop_assert!(no_room.in_use_bytes + n as u64 > LIMIT - 512),
                    }
                    if let Some(block) = held.last() {
                        prop_assert!(device.live.contains(&block.address));
                    }
                } else if !held.is_empty() {
                    cache.put_back(held.swap_remove(n % held.len()));
                }
                let in_use: u64 = held.iter().map(|block| block.len_bytes).sum();
                prop_assert_eq!(cache.in_use_bytes(), in_use);
                prop_assert!(in_use + cache.cached_bytes() <= LIMIT);
                prop_assert_eq!(device.live.len(), held.len() + cache.cached.len());
            }
            held.drain(..).for_each(|block| cache.put_back(block));
            while let Some(block) = cache.evict() {
                device.free(&block);
            }
            prop_assert!(device.live.is_empty());
            prop_assert_eq!((cache.in_use_bytes(), cache.cached_bytes()), (0, 0));
        }
    }
}
