//! Encodes chunks as deltas against a base that receivers hold, once for all of them.

use super::{Encoded, Encoder, Read, scratch};
use crate::{
    egress::{
        CodecRequest, Payload,
        encodings::{EncodeError, EncodingKey, NoRoom},
    },
    stages::Stage,
};
use bytes::Bytes;
use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};
use tensor_relay_device::SourceError;
use tensor_relay_protocol::{ChunkHash, ChunkHasher, ChunkIndex, CodecId, Context, SMALL_BYTES, Sparse};

/// The delta codec. Encoding fails for a chunk that changed too much: a delta is at most half as long as its chunk.
const CODEC: CodecId = CodecId::Sparse;

/// The result of a pass over a chunk and its base.
struct Compared {
    delta: Result<Option<Bytes>, NoRoom>,
    hash: ChunkHash,
    base_hash: ChunkHash,
    took: Duration,
}

/// The hash of what was read: known, or computed tile by tile while another work has them in the cache.
struct TileHasher<'a> {
    known: Option<ChunkHash>,
    hasher: ChunkHasher,
    rest: &'a [u8],
}

impl<'a> TileHasher<'a> {
    fn new(read: &'a Read) -> Self {
        Self { known: read.hash, hasher: ChunkHasher::new(), rest: &read.bytes }
    }

    fn update(&mut self, tile: &[u8]) {
        if self.known.is_none() {
            self.hasher.update(tile);
            self.rest = &self.rest[tile.len()..];
        }
    }

    /// Hashes the tiles that are left.
    fn finish(mut self) -> ChunkHash {
        self.known.unwrap_or_else(|| {
            self.hasher.update(self.rest);
            self.hasher.finish()
        })
    }
}

impl Encoder {
    /// The bytes of `chunk` for the wire, for a receiver that holds `base`, a version with the same manifest: a delta
    /// if the request allows one and little changed, otherwise the result of [`encode`](Self::encode). The result is a
    /// delta if its [`codec`](Encoded::codec) [needs a base](CodecId::needs_base).
    ///
    /// Receivers with the same base share one comparison, which reads the chunk of the base: a slice of memory or, from
    /// a device, a copy shared with other reads. An unreadable base is not an error.
    ///
    /// # Errors
    /// Those of [`encode`](Self::encode), never for the base.
    pub async fn encode_delta(
        &self,
        payload: &Payload,
        chunk: ChunkIndex,
        base: Option<&Payload>,
        wanted: impl Into<CodecRequest>,
    ) -> Result<Encoded, Arc<SourceError>> {
        let wanted = wanted.into();
        let Some(base) = base.filter(|_| is_worth_comparing(payload, chunk, wanted)) else {
            return self.encode_without_base(payload, chunk, wanted, None).await;
        };
        let key = EncodingKey { payload: payload.key(), chunk, codec: CODEC, base: Some(base.key()) };
        match self.cache.get(&key) {
            Some(Some(delta)) => Ok(delta),
            Some(None) => self.encode_without_base(payload, chunk, wanted, None).await,
            None => {
                // Read before `get_or_encode`: all callers share the failure of a device's read, whereas those that
                // wait for a failed comparison would retry in turn.
                let read = self.read(payload, chunk).await?;
                let (delta, read, comparison_time) = Box::pin(self.delta(key, payload, base, read)).await?;
                let encoded = match delta {
                    Some(delta) => delta,
                    None => {
                        let raw = self.hashed(payload, chunk, read).await?;
                        self.encode_without_base(payload, chunk, wanted, Some(raw)).await?
                    }
                };
                Ok(Encoded { worker_time: encoded.worker_time + comparison_time, ..encoded })
            }
        }
    }

    /// The delta of a chunk that was read, against `base`; what was read, hashed if that took no pass of its own; and the
    /// time spent. There is no delta if too much changed, the base is unreadable, the comparison is skipped, or there is
    /// no memory for the delta. If both hashes are known and equal, the bytes of the base are neither read nor compared.
    async fn delta(
        &self,
        key: EncodingKey,
        payload: &Payload,
        base: &Payload,
        mut read: Read,
    ) -> Result<(Option<Encoded>, Read, Duration), Arc<SourceError>> {
        payload.register_encodings(&self.cache);
        base.register_encodings(&self.cache);
        let chunk = key.chunk;
        let is_same = |read: &Read| read.hash.is_some() && read.hash == base.hash(chunk);
        if !is_same(&read) && self.chooser.should_skip_comparison(payload, chunk) {
            let Encoded { bytes, hash, .. } = self.hashed(payload, chunk, read).await?;
            read = Read { bytes, hash: Some(hash) };
            if !is_same(&read) {
                self.cache.insert(key, None); // Later receivers get no delta either, and so the same encoding.
                return Ok((None, read, Duration::ZERO));
            }
        }
        let before = match is_same(&read) {
            true => None,
            false => match self.read_base(payload, base, chunk).await {
                None => return Ok((None, read, Duration::ZERO)),
                before => before,
            },
        };
        let mut spent = Duration::ZERO; // Remains zero if another task compares.
        let delta = async {
            let Some(before) = before else { return Ok(Some(self.unchanged(payload, chunk, &read))) };
            let compared = self.compare(payload, chunk, &read, before).await;
            (spent, read.hash) = (compared.took, Some(compared.hash));
            payload.handle_read(chunk, compared.hash).map_err(Arc::new)?;
            if let Err(error) = base.handle_read(chunk, compared.base_hash) {
                self.handle_unreadable(payload, base, chunk, &error);
                return Ok(None);
            }
            Ok(compared.delta?.map(|bytes| delta_of(compared.hash, bytes)))
        };
        match self.cache.get_or_encode(&key, delta).await {
            Ok(delta) => Ok((delta, read, spent)),
            Err(EncodeError::NoRoom) => Ok((None, read, spent)),
            Err(EncodeError::Source(error)) => Err(error),
        }
    }

    /// Reads the chunk of `base`; `None` if it is unreadable. After a failure, `base` is not read again for this payload.
    async fn read_base(&self, payload: &Payload, base: &Payload, chunk: ChunkIndex) -> Option<Read> {
        if self.chooser.is_unreadable(payload, base) {
            return None;
        }
        let read = self.read(base, chunk).await;
        read.inspect_err(|error| self.handle_unreadable(payload, base, chunk, error))
            .ok()
    }

    fn handle_unreadable(&self, payload: &Payload, base: &Payload, chunk: ChunkIndex, error: &SourceError) {
        if self.chooser.handle_unreadable(payload, base) {
            tracing::warn!(%chunk, %error, "A base cannot be read any more; chunks are sent whole.");
        }
    }

    /// The delta of an unchanged chunk, whose hash is known.
    fn unchanged(&self, payload: &Payload, chunk: ChunkIndex, read: &Read) -> Encoded {
        let (_, dtype) = payload.manifest().chunk(chunk);
        self.count_compared(true);
        let hash = read.hash.expect("it was compared");
        delta_of(hash, Bytes::from(Sparse::unchanged(dtype, &read.bytes)))
    }

    /// Compares a chunk with its base, encodes the delta, and hashes both unless that was done: in one pass.
    async fn compare(&self, payload: &Payload, chunk: ChunkIndex, read: &Read, before: Read) -> Compared {
        let _comparing = self.stages.begin(Stage::Encode);
        let (_, dtype) = payload.manifest().chunk(chunk);
        let (read, encodings) = (read.clone(), Arc::clone(&self.cache));
        self.stages.pass(read.bytes.len() + before.bytes.len());
        let comparing = self.workers.run_over(read.bytes.len(), move || {
            let began = Instant::now();
            let (mut hash, mut base_hash) = (TileHasher::new(&read), TileHasher::new(&before));
            let context = Context { dtype, base: Some(&before.bytes) };
            let compare = |out: &mut [u8]| {
                Sparse::compare(context, &read.bytes, out, |before, now| {
                    base_hash.update(before);
                    hash.update(now);
                })
            };
            let delta = scratch::encode(read.bytes.len() / 2, compare, |delta| encodings.copy(delta));
            let (hash, base_hash) = (hash.finish(), base_hash.finish());
            Compared { delta: delta.transpose(), hash, base_hash, took: began.elapsed() }
        });
        let compared = comparing.await;
        let is_delta = !matches!(compared.delta, Ok(None));
        self.chooser.handle_compared(payload, chunk, is_delta);
        self.count_compared(is_delta);
        compared
    }

    fn count_compared(&self, is_delta: bool) {
        self.counters.compared.fetch_add(1, Ordering::Relaxed);
        self.counters.deltas.fetch_add(is_delta.into(), Ordering::Relaxed);
    }
}

fn delta_of(hash: ChunkHash, bytes: Bytes) -> Encoded {
    Encoded { codec: CODEC, hash, bytes, worker_time: Duration::ZERO }
}

/// Whether `chunk` is worth comparing with a base. With `Auto`, small chunks are sent raw, as without a base.
fn is_worth_comparing(payload: &Payload, chunk: ChunkIndex, wanted: CodecRequest) -> bool {
    let (range, _) = payload.manifest().chunk(chunk);
    match wanted {
        CodecRequest::Auto { .. } => wanted.takes(CODEC) && range.end - range.start >= SMALL_BYTES as u64,
        CodecRequest::Fixed(_) => wanted.takes(CODEC),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Workers;
    use std::sync::atomic::{AtomicU8, AtomicU32};
    use tensor_relay_device::{BoxFuture, ForeignBytes, GatherSource, HostSource, Source};
    use tensor_relay_protocol::{
        CodecSet, Dtype, Effort, Limits, Manifest, Shape, TensorName, TensorSpec, codec,
    };

    const CHUNK_BYTES: usize = SMALL_BYTES;

    /// A request with which noise is sent raw unless it is a delta.
    const AUTO: fn() -> CodecRequest =
        || CodecRequest::Auto { offered: CodecSet::all(), effort: Effort::Full };

    fn manifest(bytes: usize) -> Arc<Manifest> {
        let shape = Shape::new(&[bytes as u64]).unwrap();
        let spec = TensorSpec::new(TensorName::new("t").unwrap(), Dtype::U8, shape);
        Arc::new(Manifest::layout(vec![spec], vec![], CHUNK_BYTES as u32, &Limits::default()).unwrap())
    }

    fn payload(bytes: Vec<u8>) -> Payload {
        Payload::new(manifest(bytes.len()), Arc::new(HostSource::new(bytes.into())))
    }

    /// Bytes that no codec can compress without a base.
    fn noise(bytes: usize) -> Vec<u8> {
        let words = (0..bytes as u32 / 16).flat_map(|i| ChunkHash::of(&i.to_le_bytes()).0);
        words.collect()
    }

    fn decode(encoded: &Encoded, base: &[u8]) -> Vec<u8> {
        let mut raw = vec![0; CHUNK_BYTES];
        let context = Context { dtype: Dtype::U8, base: Some(base) };
        codec(encoded.codec).decode(context, &encoded.bytes, &mut raw).unwrap();
        assert_eq!(ChunkHash::of(&raw), encoded.hash, "the hash is of the new bytes");
        raw
    }

    #[tokio::test]
    async fn receivers_with_one_base_share_one_comparison() {
        let (before, mut after) = (noise(2 * CHUNK_BYTES), noise(2 * CHUNK_BYTES));
        after[100] ^= 1;
        let (base, other, next) =
            (payload(before.clone()), payload(vec![9; 2 * CHUNK_BYTES]), payload(after.clone()));
        let encoder = Encoder::new(1 << 20, None, Workers::Inline);
        for _ in 0..10 {
            let delta = encoder.encode_delta(&next, ChunkIndex(0), Some(&base), AUTO()).await.unwrap();
            assert!(delta.codec.needs_base() && delta.bytes.len() < 32, "{delta:?}");
            assert_eq!(decode(&delta, &before[..CHUNK_BYTES]), after[..CHUNK_BYTES]);
            let same = encoder.encode_delta(&next, ChunkIndex(1), Some(&base), AUTO()).await.unwrap();
            assert_eq!(decode(&same, &before[CHUNK_BYTES..]), after[CHUNK_BYTES..]);
            let encoded = encoder.encode_delta(&next, ChunkIndex(0), Some(&other), AUTO()).await.unwrap();
            assert_eq!((encoded.codec, &encoded.bytes[..]), (CodecId::Raw, &after[..CHUNK_BYTES]));
        }
        let stats = encoder.stats();
        assert_eq!((stats.compared, stats.deltas), (3, 2));
    }

    #[tokio::test]
    async fn the_time_of_a_comparison_is_counted_once() {
        let (base, mut after) = (payload(noise(CHUNK_BYTES)), noise(CHUNK_BYTES));
        after[100] ^= 1;
        let (next, encoder) = (payload(after), Encoder::new(1 << 20, None, Workers::Inline));
        let request = async || encoder.encode_delta(&next, ChunkIndex(0), Some(&base), AUTO()).await.unwrap();
        let (first, second) = (request().await, request().await);
        assert!(first.codec.needs_base() && first.worker_time > Duration::ZERO);
        assert_eq!(second.worker_time, Duration::ZERO);
    }

    /// The bytes passed over to encode all chunks of `next` as deltas, in units of a version.
    async fn passes(encoder: &Encoder, next: &Payload, base: &Payload) -> f64 {
        let before = encoder.stages().stats().passed_bytes();
        for (chunk, _) in next.manifest().chunking().iter() {
            let delta = encoder.encode_delta(next, chunk, Some(base), AUTO()).await.unwrap();
            assert!(delta.codec.needs_base(), "{delta:?}");
            let (range, _) = next.manifest().chunk(chunk);
            let raw = next.source().read(range).await.unwrap();
            assert_eq!(delta.hash, ChunkHash::of(&raw));
        }
        assert!(next.digest().is_some(), "every chunk is hashed");
        let passed = encoder.stages().stats().passed_bytes() - before;
        passed as f64 / next.manifest().payload_bytes() as f64
    }

    /// Goal: the sender reads a version once to hash, compare and encode it, and its base once at the same time.
    /// Method: counts of both, with and without known hashes, of changes everywhere and in one chunk of four.
    #[tokio::test]
    async fn a_version_is_passed_over_once() {
        let before = noise(4 * CHUNK_BYTES);
        let (mut scattered, mut clustered) = (before.clone(), before.clone());
        scattered.iter_mut().step_by(1000).for_each(|byte| *byte ^= 1);
        clustered[100..200].fill(7);
        let hashed = |bytes: &Vec<u8>| {
            let hashes: Vec<_> = bytes.chunks(CHUNK_BYTES).map(ChunkHash::of).collect();
            let source = Arc::new(HostSource::new(bytes.clone().into()));
            Payload::with_hashes(manifest(bytes.len()), source, &hashes)
        };
        let encoder = Encoder::new(1 << 20, None, Workers::Inline);
        for (after, if_unhashed, if_hashed) in [(&scattered, 2.0, 2.0), (&clustered, 2.0, 0.5)] {
            let base = hashed(&before);
            assert_eq!(passes(&encoder, &payload(after.clone()), &base).await, if_unhashed);
            assert_eq!(passes(&encoder, &hashed(after), &base).await, if_hashed);
            assert_eq!(passes(&encoder, &lent(after).0, &lent(&before).0).await, 2.0);
        }
    }

    /// Memory that may change while it is lent, and the memory.
    fn lent(bytes: &[u8]) -> (Payload, Arc<Vec<AtomicU8>>) {
        let memory: Arc<Vec<AtomicU8>> = Arc::new(bytes.iter().map(|byte| AtomicU8::new(*byte)).collect());
        let foreign = ForeignBytes::new(memory.as_ptr().addr(), memory.len(), Arc::clone(&memory));
        let len_bytes = bytes.len() as u64;
        let source = GatherSource::new(len_bytes, [(0..len_bytes, foreign)]).unwrap();
        (Payload::new(manifest(bytes.len()), Arc::new(source)), memory)
    }

    /// Goal: bytes of lent memory that changed since they were hashed are noticed in the pass that compares them: those
    /// of a version are an error, those of a base are not used.
    #[tokio::test]
    async fn overwritten_memory_is_noticed_while_it_is_compared() {
        let before = noise(2 * CHUNK_BYTES);
        let mut after = before.clone();
        after.iter_mut().step_by(1000).for_each(|byte| *byte ^= 1);
        let ((base, base_memory), (next, next_memory)) = (lent(&before), lent(&after));
        let encoder = Encoder::new(1 << 20, None, Workers::Inline);
        for (version, chunk) in [(&base, 0), (&base, 1), (&next, 1)] {
            encoder.encode(version, ChunkIndex(chunk), CodecId::Raw).await.unwrap();
        }
        base_memory[100].fetch_xor(1, Ordering::Relaxed);
        let first = encoder.encode_delta(&next, ChunkIndex(0), Some(&base), AUTO()).await.unwrap();
        assert_eq!((first.codec, first.hash), (CodecId::Raw, ChunkHash::of(&after[..CHUNK_BYTES])));
        let (base, _memory) = lent(&before);
        next_memory[CHUNK_BYTES].fetch_xor(1, Ordering::Relaxed);
        let error = encoder
            .encode_delta(&next, ChunkIndex(1), Some(&base), AUTO())
            .await
            .unwrap_err();
        assert!(matches!(*error, SourceError::Overwritten { .. }), "{error}");
    }

    /// A source that cannot be read.
    #[derive(Debug)]
    struct Unreadable(u64, Arc<AtomicU32>);

    impl Source for Unreadable {
        fn len_bytes(&self) -> u64 {
            self.0
        }

        fn read(&self, range: std::ops::Range<u64>) -> BoxFuture<'_, Result<Bytes, SourceError>> {
            self.1.fetch_add(1, Ordering::Relaxed);
            let error = SourceError::OutOfBounds { start: range.start, end: range.end, len_bytes: 0 };
            Box::pin(std::future::ready(Err(error)))
        }
    }

    #[tokio::test]
    async fn an_unreadable_base_is_not_an_error() {
        const BYTES: usize = 8 * CHUNK_BYTES;
        let (next, attempts) = (payload(noise(BYTES)), Arc::new(AtomicU32::new(0)));
        let base = Payload::new(manifest(BYTES), Arc::new(Unreadable(BYTES as u64, Arc::clone(&attempts))));
        let encoder = Encoder::new(1 << 20, None, Workers::Inline);
        for chunk in 0..8 {
            let encoded = encoder
                .encode_delta(&next, ChunkIndex(chunk), Some(&base), AUTO())
                .await
                .unwrap();
            assert_eq!((encoded.codec, encoder.stats().compared), (CodecId::Raw, 0));
        }
        assert_eq!(attempts.load(Ordering::Relaxed), 1, "after a failure there are no further attempts");
        // An equal chunk need not be read.
        let hash = next.hash(ChunkIndex(0)).unwrap();
        base.handle_read(ChunkIndex(0), hash).unwrap();
        let same = encoder.encode_delta(&next, ChunkIndex(0), Some(&base), AUTO()).await.unwrap();
        assert!(same.codec.needs_base());
    }

    /// Like f32 weights during training.
    #[tokio::test]
    async fn chunks_that_change_everywhere_are_rarely_compared() {
        const CHUNKS: usize = 40;
        let base = payload(vec![9; CHUNKS * CHUNK_BYTES]);
        let mut bytes = noise(CHUNKS * CHUNK_BYTES);
        bytes[..CHUNK_BYTES].fill(9);
        let (next, encoder) = (payload(bytes), Encoder::new(1 << 20, None, Workers::Inline));
        base.handle_read(ChunkIndex(0), ChunkHash::of(&[9; CHUNK_BYTES])).unwrap();
        for chunk in (1..CHUNKS as u32).chain([0]) {
            let encoded = encoder
                .encode_delta(&next, ChunkIndex(chunk), Some(&base), AUTO())
                .await
                .unwrap();
            assert_eq!(encoded.codec.needs_base(), chunk == 0, "an equal chunk needs no comparison");
        }
        assert_eq!(encoder.stats().compared, 3 + 1, "one in seventeen, and one by its hash");
        assert_eq!(encoder.stats().deltas, 1);
        for _ in 0..40 {
            encoder.encode_delta(&next, ChunkIndex(2), Some(&base), AUTO()).await.unwrap();
        }
        assert_eq!(encoder.stats().compared, 3 + 1, "all receivers get the same encoding");
    }

    #[tokio::test]
    async fn deltas_are_made_only_where_possible_requested_and_worthwhile() {
        let (next, base) = (payload(noise(CHUNK_BYTES)), payload(noise(CHUNK_BYTES)));
        let encoder = Encoder::new(1 << 20, None, Workers::Inline);
        let encoded = encoder.encode_delta(&next, ChunkIndex(0), None, CodecId::Sparse).await.unwrap();
        assert_eq!((encoded.codec, encoder.stats().requested), (CodecId::Raw, 0));
        let forced = encoder
            .encode_delta(&next, ChunkIndex(0), Some(&base), CodecId::Sparse)
            .await
            .unwrap();
        assert_eq!(forced.codec, CodecId::Sparse);
        for other in [
            CodecId::Zstd.into(),
            CodecRequest::Auto { offered: CodecSet::all().without_bases(), effort: Effort::Full },
        ] {
            let encoded = encoder.encode_delta(&next, ChunkIndex(0), Some(&base), other).await.unwrap();
            assert_eq!(encoded.codec, CodecId::Raw, "no delta was requested");
        }
        let (small, before) = (payload(noise(CHUNK_BYTES - 256)), payload(noise(CHUNK_BYTES - 256)));
        let encoded = encoder
            .encode_delta(&small, ChunkIndex(0), Some(&before), AUTO())
            .await
            .unwrap();
        assert_eq!(encoded.codec, CodecId::Raw, "a small chunk is not worth it");
        let (longer, longer_before) = (payload(noise(CHUNK_BYTES + 256)), payload(noise(CHUNK_BYTES + 256)));
        let encoded = encoder
            .encode_delta(&longer, ChunkIndex(1), Some(&longer_before), AUTO())
            .await
            .unwrap();
        assert_eq!(encoded.codec, CodecId::Raw, "nor is the remainder at the end");
        let forced = encoder
            .encode_delta(&small, ChunkIndex(0), Some(&before), CodecId::Sparse)
            .await
            .unwrap();
        assert_eq!(forced.codec, CodecId::Sparse);
    }
}
