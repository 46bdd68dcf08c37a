//! [`Payload`]: a version at the sender.

use super::{encodings::Encodings, reads::Reads};
use crate::Workers;
use bytes::Bytes;
use futures_util::FutureExt;
use std::{
    ops::Range,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};
use tensor_relay_device::{Source, SourceError};
use tensor_relay_protocol::{ChunkHash, ChunkIndex, CodecId, Manifest, RangeSet, VersionDigest};
use tokio::sync::OnceCell;

/// A version's manifest, its source, and its known chunk hashes.
#[derive(Debug)]
pub struct Payload {
    key: u64,
    manifest: Arc<Manifest>,
    source: Arc<dyn Source>,
    chunks: Box<[ChunkState]>,
    /// The cache of reads. On drop, the payload's chunks are removed from it.
    reads: OnceLock<Weak<Reads>>,
    /// The cache of encodings. On drop, the payload's chunks, and deltas against them, are removed from it.
    encodings: OnceLock<Weak<Encodings>>,
}

/// The hash of one chunk, once it is known, and how the chunk was received or read.
#[derive(Debug, Default)]
struct ChunkState {
    hash: OnceLock<ChunkHash>,
    /// Lets several readers share one computation of the hash.
    hashing: OnceCell<ChunkHash>,
    /// Whether a read from a device was begun.
    was_read: AtomicBool,
    /// The codec in which it was received, and is sent on.
    received: OnceLock<CodecId>,
}

impl Payload {
    /// A payload whose chunks are hashed when they are first read.
    pub fn new(manifest: Arc<Manifest>, source: Arc<dyn Source>) -> Self {
        static NEXT_KEY: AtomicU64 = AtomicU64::new(0);
        let chunks = manifest.chunking().count();
        let key = NEXT_KEY.fetch_add(1, Ordering::Relaxed);
        let chunks = (0..chunks).map(|_| ChunkState::default()).collect();
        Self { key, manifest, source, chunks, reads: OnceLock::new(), encodings: OnceLock::new() }
    }

    /// A payload whose chunks were hashed before, with one hash per chunk.
    pub fn with_hashes(manifest: Arc<Manifest>, source: Arc<dyn Source>, hashes: &[ChunkHash]) -> Self {
        let payload = Self::new(manifest, source);
        for (chunk, hash) in payload.chunks.iter().zip(hashes) {
            let _ = chunk.hash.set(*hash);
        }
        payload
    }

    /// A payload of the same bytes in another `source`, with the hashes that are known.
    #[must_use]
    pub fn through(&self, source: Arc<dyn Source>) -> Self {
        let payload = Self::new(Arc::clone(&self.manifest), source);
        for (chunk, known) in payload.chunks.iter().zip(&self.chunks) {
            known.hash.get().map(|hash| chunk.hash.set(*hash));
        }
        payload
    }

    /// The manifest.
    pub fn manifest(&self) -> &Arc<Manifest> {
        &self.manifest
    }

    /// The version's digest, once every chunk is hashed.
    pub fn digest(&self) -> Option<VersionDigest> {
        self.digest_of(&RangeSet::from_range(0..self.manifest.chunking().count()))
    }

    /// The digest of `chunks`, once each of them is hashed.
    pub fn digest_of(&self, chunks: &RangeSet) -> Option<VersionDigest> {
        let hash = |chunk: u32| self.chunks.get(chunk as usize)?.hash.get().copied();
        let hashes: Option<Vec<ChunkHash>> = chunks.iter().map(hash).collect();
        Some(VersionDigest::of(self.manifest.digest(), hashes?))
    }

    /// The `chunks` that must still be hashed for [`digest_of`](Self::digest_of). Sending does not hash chunks that
    /// receivers hold from an earlier connection, since they are not sent again.
    pub fn unhashed(&self, chunks: &RangeSet) -> Vec<ChunkIndex> {
        let is_unhashed = |chunk: &ChunkIndex| {
            self.chunks
                .get(chunk.0 as usize)
                .is_some_and(|state| state.hash.get().is_none())
        };
        chunks.iter().map(ChunkIndex).filter(is_unhashed).collect()
    }

    /// Hashes the chunks that are not hashed yet, on `workers`, if the source lies in memory. Blocks.
    ///
    /// # Errors
    /// [`SourceError`] when a chunk cannot be read.
    pub fn hash_in_place(&self, workers: Workers) -> Result<(), SourceError> {
        let chunks = self.unhashed(&RangeSet::from_range(0..self.manifest.chunking().count()));
        workers.each(chunks, |chunk| match self.unhashed_bytes(chunk) {
            Some(bytes) => self.handle_read(chunk, ChunkHash::of(&bytes?)),
            None => Ok(()),
        })
    }

    /// Whether a chunk is not hashed yet, and lies in memory.
    pub fn is_unhashed_in_place(&self, chunk: ChunkIndex) -> bool {
        self.hash(chunk).is_none() && self.source.is_in_place(&self.manifest.chunk(chunk).0)
    }

    /// The bytes of a chunk that is not hashed yet, if it lies in memory.
    pub fn unhashed_bytes(&self, chunk: ChunkIndex) -> Option<Result<Bytes, SourceError>> {
        let read = || self.source.read(self.manifest.chunk(chunk).0).now_or_never();
        self.is_unhashed_in_place(chunk).then(read).flatten()
    }

    /// The process-wide key of this payload in caches.
    pub fn key(&self) -> u64 {
        self.key
    }

    /// The source of its bytes.
    pub fn source(&self) -> &Arc<dyn Source> {
        &self.source
    }

    /// The hash of each chunk, once every chunk was hashed.
    pub fn hashes(&self) -> Option<Vec<ChunkHash>> {
        self.chunks.iter().map(|chunk| chunk.hash.get().copied()).collect()
    }

    pub(super) fn hash(&self, chunk: ChunkIndex) -> Option<ChunkHash> {
        self.chunks[chunk.0 as usize].hash.get().copied()
    }

    /// The hash that a read of the chunk need not compute: the known one, unless the bytes may have changed since.
    pub(super) fn reliable_hash(&self, chunk: ChunkIndex) -> Option<ChunkHash> {
        if self.source.may_change() { None } else { self.hash(chunk) }
    }

    /// Handles a read of the chunk, whose bytes have `hash`: the first read makes it known.
    ///
    /// # Errors
    /// [`SourceError::Overwritten`] for other bytes than those of the first read.
    pub fn handle_read(&self, chunk: ChunkIndex, hash: ChunkHash) -> Result<(), SourceError> {
        let known = *self.chunks[chunk.0 as usize].hash.get_or_init(|| hash);
        let (Range { start, end }, _) = self.manifest.chunk(chunk);
        if known == hash { Ok(()) } else { Err(SourceError::Overwritten { start, end }) }
    }

    /// The hash of a chunk that was read, by `hashing`: once for all readers at the same time, unless each may have read
    /// other bytes.
    ///
    /// # Errors
    /// As for [`handle_read`](Self::handle_read).
    pub(super) async fn hash_read(
        &self,
        chunk: ChunkIndex,
        hashing: impl Future<Output = ChunkHash>,
    ) -> Result<ChunkHash, SourceError> {
        let hash = match self.source.may_change() {
            true => hashing.await,
            false => *self.chunks[chunk.0 as usize].hashing.get_or_init(|| hashing).await,
        };
        self.handle_read(chunk, hash).map(|()| hash)
    }

    /// The codec in which a chunk was received without a base, if it was received.
    pub(crate) fn received(&self, chunk: ChunkIndex) -> Option<CodecId> {
        self.chunks[chunk.0 as usize].received.get().copied()
    }

    /// Records the codec in which a chunk was received, without a base.
    pub(super) fn handle_received(&self, chunk: ChunkIndex, codec: CodecId) {
        self.chunks[chunk.0 as usize].received.get_or_init(|| codec);
    }

    /// Records that a read of the chunk begins. Returns whether one began before.
    pub(super) fn mark_read(&self, chunk: ChunkIndex) -> bool {
        self.chunks[chunk.0 as usize].was_read.swap(true, Ordering::Relaxed)
    }

    /// Registers `reads`, which drops the payload's chunks when the payload is dropped. Later calls have no effect: a
    /// payload has one server, with one `reads`.
    pub(super) fn register_reads(&self, reads: &Arc<Reads>) {
        self.reads.get_or_init(|| Arc::downgrade(reads));
    }

    /// Registers `encodings`, which drops the payload's chunks when the payload is dropped. Later calls have no effect:
    /// a payload has one server, with one `encodings`.
    pub(super) fn register_encodings(&self, encodings: &Arc<Encodings>) {
        self.encodings.get_or_init(|| Arc::downgrade(encodings));
    }
}

impl Drop for Payload {
    fn drop(&mut self) {
        if let Some(reads) = self.reads.get().and_then(Weak::upgrade) {
            reads.drop_payload(self.key);
        }
        if let Some(encodings) = self.encodings.get().and_then(Weak::upgrade) {
            encodings.drop_payload(self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensor_relay_device::HostSource;
    use tensor_relay_protocol::{Dtype, Limits, Shape, TensorName, TensorSpec};

    #[test]
    fn a_selection_has_a_digest_once_its_chunks_are_hashed() {
        let spec = TensorSpec::new(TensorName::new("t").unwrap(), Dtype::U8, Shape::new(&[1024]).unwrap());
        let manifest = Arc::new(Manifest::layout(vec![spec], vec![], 256, &Limits::default()).unwrap());
        let payload = Payload::new(manifest.clone(), Arc::new(HostSource::new(vec![0; 1024].into())));
        let (first, last) = (ChunkHash::of(b"first"), ChunkHash::of(b"last"));
        let ends: RangeSet = [0..1, 3..4].into_iter().collect();
        payload.handle_read(ChunkIndex(0), first).unwrap();
        assert_eq!((payload.digest_of(&ends), payload.unhashed(&ends)), (None, vec![ChunkIndex(3)]));
        payload.handle_read(ChunkIndex(3), last).unwrap();
        assert_eq!(payload.unhashed(&ends), []);
        assert_eq!(payload.digest_of(&ends), Some(VersionDigest::of(manifest.digest(), [first, last])));
        assert_eq!(payload.digest(), None, "other chunks are not hashed");
        assert_eq!(payload.digest_of(&RangeSet::from_range(0..5)), None, "there is no chunk 4");
    }

    fn zeros() -> Payload {
        let spec = TensorSpec::new(TensorName::new("t").unwrap(), Dtype::U8, Shape::new(&[1024]).unwrap());
        let manifest = Manifest::layout(vec![spec], vec![], 256, &Limits::default()).unwrap();
        Payload::new(Arc::new(manifest), Arc::new(HostSource::new(vec![0; 1024].into())))
    }

    #[tokio::test]
    async fn readers_at_the_same_time_share_a_hash() {
        let (payload, hash) = (zeros(), ChunkHash::of(&[0; 256]));
        let (give, take) = tokio::sync::oneshot::channel();
        let first = payload.hash_read(ChunkIndex(1), async { take.await.unwrap() });
        let second = payload.hash_read(ChunkIndex(1), async { panic!("hashed twice") });
        let opened = async { give.send(hash).unwrap() };
        let (first, second, ()) = tokio::join!(first, second, opened);
        assert_eq!((first.unwrap(), second.unwrap()), (hash, hash));
        payload.handle_read(ChunkIndex(1), hash).unwrap();
        assert!(payload.handle_read(ChunkIndex(1), ChunkHash::of(b"other")).is_err());
    }

    #[test]
    fn what_is_not_hashed_yet_is_hashed_in_place() {
        for workers in [Workers::Inline, Workers::Threads] {
            let payload = zeros();
            payload.handle_read(ChunkIndex(2), ChunkHash::of(&[0; 256])).unwrap();
            assert!(payload.unhashed_bytes(ChunkIndex(2)).is_none());
            payload.hash_in_place(workers).unwrap();
            let hashes = [ChunkHash::of(&[0; 256]); 4];
            assert_eq!(payload.digest(), Some(VersionDigest::of(payload.manifest().digest(), hashes)));
        }
    }
}
