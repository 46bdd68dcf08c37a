//! [`Encodings`]: a bounded cache of encoded chunks.

use super::Encoded;
use bytes::Bytes;
use quick_cache::{Weighter, sync::Cache};
use std::sync::Arc;
use tensor_relay_device::{Charge, HostMemory, SourceError};
use tensor_relay_protocol::{ChunkIndex, CodecId};

/// The encodings of chunks, within a budget for those being sent and those in the cache. The cache takes at most half
/// of the budget. An encoding leaves it when it is evicted, or when its payload or its base is dropped. A cached `None`
/// marks a chunk whose encoding would gain too little, or whose comparison with a base was skipped.
///
/// When slow subscribers exhaust the budget, chunks are sent raw, which takes no memory of the budget.
///
/// Long encodings are mapped directly from the system and unmapped when dropped, because allocators would retain
/// gigabytes of freed memory.
pub(super) struct Encodings {
    cache: Cache<EncodingKey, Option<Encoded>, ByBytes>,
    memory: HostMemory,
}

/// The minimum length of encodings that are mapped directly. For these, the cost of pages and system calls is
/// relatively small.
const MAPPED_BYTES_MIN: usize = 256 << 10;

/// The minimum length of encodings that are counted against the budget, in whole pages and under a lock. For shorter
/// ones counting would cost more than they do.
const COUNTED_BYTES_MIN: usize = 4 << 10;

/// The budget for encodings is exhausted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NoRoom;

/// Why a chunk was not encoded.
#[derive(Debug)]
pub(super) enum EncodeError {
    /// It cannot be read.
    Source(Arc<SourceError>),
    /// The budget for encodings is exhausted; a later attempt may succeed.
    NoRoom,
}

impl From<Arc<SourceError>> for EncodeError {
    fn from(error: Arc<SourceError>) -> Self {
        Self::Source(error)
    }
}

impl From<NoRoom> for EncodeError {
    fn from(NoRoom: NoRoom) -> Self {
        Self::NoRoom
    }
}

/// An encoding in the allocator's memory, counted against the budget until it is dropped.
struct Counted {
    bytes: Vec<u8>,
    _charge: Charge,
}

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct EncodingKey {
    pub(super) payload: u64,
    pub(super) chunk: ChunkIndex,
    pub(super) codec: CodecId,
    /// The key of the base's payload, for a delta.
    pub(super) base: Option<u64>,
}

/// The assumed overhead of an entry in the cache.
const ENTRY_BYTES: u64 = 128;

#[derive(Debug, Clone)]
struct ByBytes;

impl Weighter<EncodingKey, Option<Encoded>> for ByBytes {
    fn weight(&self, _: &EncodingKey, encoded: &Option<Encoded>) -> u64 {
        encoded.as_ref().map_or(0, |encoded| encoded.bytes.len() as u64) + ENTRY_BYTES
    }
}

impl Encodings {
    /// Encodings that take at most `budget_bytes`, cached or not. Short ones ([`COUNTED_BYTES_MIN`]) count only while
    /// they are cached.
    pub(super) fn new(budget_bytes: u64) -> Self {
        // The number of entries is only a hint for the first allocation; the weight is the bound.
        let cache = Cache::with_weighter(64, budget_bytes / 2, ByBytes);
        Self { cache, memory: HostMemory::in_proportion(budget_bytes) }
    }

    /// Copies an encoding into budgeted memory.
    ///
    /// # Errors
    /// [`NoRoom`] when other encodings exhaust the budget.
    pub(super) fn copy(&self, bytes: &[u8]) -> Result<Bytes, NoRoom> {
        match bytes.len() {
            MAPPED_BYTES_MIN.. => {
                let mut region = self.memory.allocate(bytes.len()).map_err(|_| NoRoom)?;
                region.copy_from_slice(bytes);
                Ok(region.freeze())
            }
            COUNTED_BYTES_MIN.. => {
                let charge = self.memory.charge(bytes.len()).map_err(|_| NoRoom)?;
                Ok(Bytes::from_owner(Counted { bytes: bytes.to_vec(), _charge: charge }))
            }
            _ => Ok(Bytes::copy_from_slice(bytes)),
        }
    }

    pub(super) fn get(&self, key: &EncodingKey) -> Option<Option<Encoded>> {
        self.cache.get(key)
    }

    pub(super) fn insert(&self, key: EncodingKey, encoded: Option<Encoded>) {
        self.cache.insert(key, encoded);
    }

    /// The cached encoding, or the result of `encode`. Concurrent callers share the result, but not a failure.
    ///
    /// # Errors
    /// That of `encode`.
    pub(super) async fn get_or_encode(
        &self,
        key: &EncodingKey,
        encode: impl Future<Output = Result<Option<Encoded>, EncodeError>>,
    ) -> Result<Option<Encoded>, EncodeError> {
        self.cache.get_or_insert_async(key, encode).await
    }

    /// Removes the encodings of a dropped payload, and deltas against it.
    pub(super) fn drop_payload(&self, payload: u64) {
        self.cache.retain(|key, _| key.payload != payload && key.base != Some(payload));
    }

    /// The size of cached encodings, including memory kept for further ones.
    pub(super) fn bytes(&self) -> u64 {
        self.cache.weight() + self.memory.stats().cached_bytes
    }
}

impl std::fmt::Debug for Encodings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Encodings").field("bytes", &self.bytes()).finish()
    }
}
