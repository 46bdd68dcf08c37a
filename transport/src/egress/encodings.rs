//! Encodings that are kept for whoever asks next.

use super::Encoded;
use bytes::Bytes;
use quick_cache::{Weighter, sync::Cache};
use std::sync::Arc;
use tensor_relay_device::{HostMemory, SourceError};
use tensor_relay_protocol::{ChunkIndex, CodecId};

/// The encodings of chunks, within a bound, for as long as their payloads live. `None` for what gained too little: it travels
/// raw, and its bytes are not kept here.
///
/// Long ones lie in memory of their own from the system, which goes back there: allocators keep what was freed, and encodings
/// come and go by the gigabyte.
pub(super) struct Encodings {
    cache: Cache<Key, Option<Encoded>, ByBytes>,
    memory: HostMemory,
}

/// From which length on encodings have memory of their own: where pages and system calls cost little beside it.
const LONG_BYTES: usize = 256 << 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) payload: u64,
    pub(super) chunk: ChunkIndex,
    pub(super) codec: CodecId,
    /// The payload that it is coded against, if any.
    pub(super) base: Option<u64>,
}

/// What an entry takes beside its bytes.
const ENTRY_BYTES: u64 = 128;

#[derive(Debug, Clone)]
struct ByBytes;

impl Weighter<Key, Option<Encoded>> for ByBytes {
    fn weight(&self, _: &Key, encoded: &Option<Encoded>) -> u64 {
        encoded.as_ref().map_or(0, |encoded| encoded.bytes.len() as u64) + ENTRY_BYTES
    }
}

impl Encodings {
    /// Keeps `limit_bytes` at most.
    pub(super) fn new(limit_bytes: u64) -> Self {
        // The number of entries is only a hint for the first allocation; the weight is the bound.
        let cache = Cache::with_weighter(64, limit_bytes, ByBytes);
        Self { cache, memory: HostMemory::in_proportion(u64::MAX) }
    }

    /// The bytes of an encoding, where they can be kept.
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

    /// What is kept, or what `encode` gives: those who ask meanwhile wait for it.
    pub(super) async fn get_or_encode(
        &self,
        key: &Key,
        encode: impl Future<Output = Result<Option<Encoded>, Arc<SourceError>>>,
    ) -> Result<Option<Encoded>, Arc<SourceError>> {
        self.cache.get_or_insert_async(key, encode).await
    }

    /// Drops what is kept of a payload that is gone, or was coded against it.
    pub(super) fn forget(&self, payload: u64) {
        self.cache.retain(|key, _| key.payload != payload && key.base != Some(payload));
    }

    /// What all of them take, with memory for the next ones.
    pub(super) fn bytes(&self) -> u64 {
        self.cache.weight() + self.memory.stats().cached_bytes
    }
}

impl std::fmt::Debug for Encodings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Encodings").field("bytes", &self.bytes()).finish()
    }
}
