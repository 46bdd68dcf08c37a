//! The cache of encodings.

use super::Encoded;
use bytes::Bytes;
use quick_cache::{Weighter, sync::Cache};
use std::sync::Arc;
use tensor_relay_device::{HostMemory, SourceError};
use tensor_relay_protocol::{ChunkIndex, CodecId};

/// The cached encodings of chunks, within a bound, dropped with their payloads. `None` marks a chunk that gained too
/// little and is sent raw.
///
/// Long ones are mapped directly from the system and unmapped when dropped: allocators retain freed memory, and
/// encodings come and go by the gigabyte.
pub(super) struct Encodings {
    cache: Cache<Key, Option<Encoded>, ByBytes>,
    memory: HostMemory,
}

/// The length from which encodings are mapped directly: pages and system calls cost little beside it.
const LONG_BYTES: usize = 256 << 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) payload: u64,
    pub(super) chunk: ChunkIndex,
    pub(super) codec: CodecId,
    /// The payload of the base, if it is a delta.
    pub(super) base: Option<u64>,
}

/// The overhead of an entry.
const ENTRY_BYTES: u64 = 128;

#[derive(Debug, Clone)]
struct ByBytes;

impl Weighter<Key, Option<Encoded>> for ByBytes {
    fn weight(&self, _: &Key, encoded: &Option<Encoded>) -> u64 {
        encoded.as_ref().map_or(0, |encoded| encoded.bytes.len() as u64) + ENTRY_BYTES
    }
}

impl Encodings {
    /// A cache of at most `limit_bytes`.
    pub(super) fn new(limit_bytes: u64) -> Self {
        // The number of entries is only a hint for the first allocation; the weight is the bound.
        let cache = Cache::with_weighter(64, limit_bytes, ByBytes);
        Self { cache, memory: HostMemory::in_proportion(u64::MAX) }
    }

    /// Copies an encoding into memory for the cache.
    pub(super) fn copy(&self, bytes: &[u8]) -> Bytes {
        if bytes.len() >= LONG_BYTES
            && let Ok(mut region) = self.memory.allocate(bytes.len())
        {
            region.copy_from_slice(bytes);
            return region.freeze();
        }
        Bytes::copy_from_slice(bytes)
    }

    pub(super) fn get(&self, key: &Key) -> Option<Option<Encoded>> {
        self.cache.get(key)
    }

    pub(super) fn insert(&self, key: Key, encoded: Option<Encoded>) {
        self.cache.insert(key, encoded);
    }

    /// The cached encoding, or the result of `encode`, which concurrent callers share.
    pub(super) async fn get_or_encode(
        &self,
        key: &Key,
        encode: impl Future<Output = Result<Option<Encoded>, Arc<SourceError>>>,
    ) -> Result<Option<Encoded>, Arc<SourceError>> {
        self.cache.get_or_insert_async(key, encode).await
    }

    /// Drops the encodings of a payload that is gone, and the deltas against it.
    pub(super) fn forget(&self, payload: u64) {
        self.cache.retain(|key, _| key.payload != payload && key.base != Some(payload));
    }

    /// The total size, including memory reserved for the next ones.
    pub(super) fn bytes(&self) -> u64 {
        self.cache.weight() + self.memory.stats().cached_bytes
    }
}

impl std::fmt::Debug for Encodings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Encodings").field("bytes", &self.bytes()).finish()
    }
}
