//! [`ChunkCache`]: a bounded cache of chunks read from a device.

use std::collections::BTreeMap;
use tensor_relay_protocol::ChunkIndex;

/// A process-wide unique key of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ChunkKey {
    pub(super) payload: u64,
    pub(super) chunk: ChunkIndex,
}

/// The chunks of one device: those being read, and others up to a bound, evicted in the order of their first requests.
/// No I/O.
///
/// Chunks being read count against the bound and evict others. They are never evicted themselves, even above the bound,
/// since concurrent requests wait for them. Their number is bounded: each was requested by a running send, or by a
/// cancelled one within the timeout of reads.
#[derive(Debug)]
pub(super) struct ChunkCache<T> {
    limit_bytes: u64,
    /// The bound while no chunk is requested twice.
    unshared_bytes: u64,
    /// The number of reads up to which `limit_bytes` is the bound, since a chunk was requested twice.
    shared_until: u64,
    bytes: u64,
    next_order: u64,
    by_key: BTreeMap<ChunkKey, CacheEntry<T>>,
    /// Chunks that were read, by the order of their first requests. The oldest is evicted first.
    read: BTreeMap<CacheOrder, ChunkKey>,
}

/// The number of reads without a chunk that is requested twice, after which a single subscriber is assumed: those of
/// 1 GiB in chunks of 4 MiB.
const SHARED_READS: u64 = 256;

/// The order in which chunks were first requested. Identifies a cached chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct CacheOrder(u64);

#[derive(Debug)]
struct CacheEntry<T> {
    order: CacheOrder,
    bytes: u64,
    value: T,
}

impl<T> ChunkCache<T> {
    /// A cache of at most `limit_bytes`, and of at most `unshared_bytes` while a single subscriber reads: for it, a cached
    /// chunk is of no use, and holds a slot whose memory the processor's caches would otherwise still have when it is
    /// used again.
    pub(super) fn new(limit_bytes: u64, unshared_bytes: u64) -> Self {
        let (by_key, read) = (BTreeMap::new(), BTreeMap::new());
        Self { limit_bytes, unshared_bytes, shared_until: 0, bytes: 0, next_order: 0, by_key, read }
    }

    /// The cached or running read of this chunk.
    pub(super) fn get(&mut self, key: ChunkKey) -> Option<&T> {
        if self.by_key.contains_key(&key) {
            self.note_shared();
        }
        Some(&self.by_key.get(&key)?.value)
    }

    /// Records that a chunk is requested that was requested before.
    pub(super) fn note_shared(&mut self) {
        self.shared_until = self.next_order + SHARED_READS;
    }

    /// Adds a chunk whose read begins. Its `bytes` count against the bound.
    pub(super) fn begin(&mut self, key: ChunkKey, bytes: u64, value: T) -> CacheOrder {
        let order = CacheOrder(self.next_order);
        self.next_order += 1;
        self.bytes += bytes;
        let before = self.by_key.insert(key, CacheEntry { order, bytes, value });
        debug_assert!(before.is_none(), "a chunk has one read at a time");
        self.evict();
        order
    }

    /// Records that a chunk was read and may be evicted. Has no effect if it was removed.
    pub(super) fn handle_read(&mut self, key: ChunkKey, order: CacheOrder) {
        if self.has(key, order) {
            self.read.insert(order, key);
            self.evict();
        }
    }

    /// Removes a chunk that could not be read. Later requests read it again.
    pub(super) fn handle_failed(&mut self, key: ChunkKey, order: CacheOrder) {
        if self.has(key, order) {
            self.remove(key);
        }
    }

    /// Removes the chunks of a dropped payload.
    pub(super) fn drop_payload(&mut self, payload: u64) {
        let key = |chunk| ChunkKey { payload, chunk };
        let of_payload = self.by_key.range(key(ChunkIndex(0))..=key(ChunkIndex(u32::MAX)));
        let keys: Vec<ChunkKey> = of_payload.map(|(key, _)| *key).collect();
        keys.into_iter().for_each(|key| self.remove(key));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_key.is_empty()
    }

    /// The total size of the chunks.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    fn has(&self, key: ChunkKey, order: CacheOrder) -> bool {
        self.by_key.get(&key).is_some_and(|entry| entry.order == order)
    }

    fn evict(&mut self) {
        let is_shared = self.next_order <= self.shared_until;
        let limit_bytes = if is_shared { self.limit_bytes } else { self.unshared_bytes };
        while self.bytes > limit_bytes
            && let Some((_, oldest)) = self.read.pop_first()
        {
            self.remove(oldest);
        }
    }

    fn remove(&mut self, key: ChunkKey) {
        if let Some(entry) = self.by_key.remove(&key) {
            self.read.remove(&entry.order);
            self.bytes -= entry.bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::{collection::vec, prelude::*};

    #[derive(Debug, Clone)]
    enum Op {
        Begin(u64, u32, u64),
        Read(usize),
        Fail(usize),
        Forget(u64),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            4 => (0u64..3, 0u32..5, 1u64..40).prop_map(|(payload, chunk, bytes)| Op::Begin(payload, chunk, bytes)),
            4 => any::<usize>().prop_map(Op::Read),
            1 => any::<usize>().prop_map(Op::Fail),
            1 => (0u64..3).prop_map(Op::Forget),
        ]
    }

    /// The chunks of the model: key, order, bytes, and whether it was read.
    type Model = Vec<(ChunkKey, CacheOrder, u64, bool)>;

    fn evict(model: &mut Model, limit: u64) {
        let bytes = |model: &Model| model.iter().map(|(_, _, bytes, _)| bytes).sum::<u64>();
        while bytes(model) > limit
            && let Some(oldest) = model.iter().position(|(.., read)| *read)
        {
            model.remove(oldest);
        }
    }

    proptest! {
        #[test]
        fn behaves_like_the_model_of_a_cache(limit in 0u64..100, ops in vec(op(), 0..60)) {
            let (mut cache, mut model, mut begun) = (ChunkCache::new(limit, limit), Model::new(), Vec::new());
            for op in ops {
                match op {
                    Op::Begin(payload, chunk, bytes) => {
                        let key = ChunkKey { payload, chunk: ChunkIndex(chunk) };
                        if cache.get(key).is_none() {
                            let order = cache.begin(key, bytes, ());
                            begun.push((key, order));
                            model.push((key, order, bytes, false));
                        }
                    }
                    Op::Read(i) if !begun.is_empty() => {
                        let (key, order) = begun[i % begun.len()];
                        cache.handle_read(key, order);
                        let entry = model.iter_mut().find(|entry| entry.1 == order);
                        entry.into_iter().for_each(|entry| entry.3 = true);
                    }
                    Op::Fail(i) if !begun.is_empty() => {
                        let (key, order) = begun.swap_remove(i % begun.len());
                        cache.handle_failed(key, order);
                        model.retain(|entry| entry.1 != order);
                    }
                    Op::Forget(payload) => {
                        cache.drop_payload(payload);
                        model.retain(|entry| entry.0.payload != payload);
                    }
                    Op::Read(_) | Op::Fail(_) => {}
                }
                evict(&mut model, limit);
                prop_assert_eq!(cache.bytes(), model.iter().map(|entry| entry.2).sum::<u64>());
                prop_assert_eq!(cache.by_key.len(), model.len());
                prop_assert!(model.iter().all(|entry| cache.has(entry.0, entry.1)));
                prop_assert_eq!(cache.read.len(), model.iter().filter(|entry| entry.3).count());
            }
        }
    }

    /// Goal: chunks are kept for others only while there are others. Method: read chunks once, request one of them again,
    /// and then read so many once that a single subscriber is assumed.
    #[test]
    fn few_chunks_are_kept_for_a_single_subscriber() {
        let mut cache = ChunkCache::new(100, 20);
        let key = |chunk| ChunkKey { payload: 1, chunk: ChunkIndex(chunk) };
        let read = |cache: &mut ChunkCache<()>, chunks: std::ops::Range<u32>| {
            for chunk in chunks {
                let order = cache.begin(key(chunk), 10, ());
                cache.handle_read(key(chunk), order);
            }
            cache.bytes()
        };
        assert_eq!(read(&mut cache, 0..10), 20);
        assert!(cache.get(key(9)).is_some());
        assert_eq!(read(&mut cache, 10..200), 100);
        cache.note_shared();
        assert_eq!(read(&mut cache, 200..200 + SHARED_READS as u32), 100);
        assert_eq!(read(&mut cache, 900..901), 20);
    }
}
