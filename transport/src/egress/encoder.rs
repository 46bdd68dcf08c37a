//! [`Encoder`]: encodes each chunk once for all subscribers.

mod deltas;
mod received;
mod scratch;
mod vouching;

use super::{
    CodecRequest, Payload,
    chooser::Chooser,
    encodings::{EncodeError, EncodingKey, Encodings, NoRoom},
    reads::{ReadStats, Reads},
};
use crate::{
    Workers,
    stages::{Stage, Stages},
};
use bytes::Bytes;
use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use tensor_relay_device::SourceError;
use tensor_relay_protocol::{
    ChunkHash, ChunkIndex, CodecId, CodecSet, Context, Effort, RangeSet, SizeEstimate, VersionDigest, codec,
    worthwhile_bytes,
};

/// One chunk, ready for the wire. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Encoded {
    /// Its codec; `raw` if the requested one gained too little.
    pub codec: CodecId,
    /// The hash of its raw bytes.
    pub hash: ChunkHash,
    /// The encoded bytes.
    pub bytes: Bytes,
    /// The time that the call which returned this took on workers, for the estimate, the comparison with a base and the
    /// encoding, including failed attempts. Zero if the result was cached, or another call made it.
    pub worker_time: Duration,
}

/// Reads, hashes and encodes chunks, once for each (payload, chunk, codec, base) and all subscribers, while the result
/// is in a bounded cache. An evicted chunk is read and encoded again. Entries are dropped with their payload.
///
/// Raw chunks of memory are slices of the source, if they are contiguous, and cost nothing to read again. Of raw
/// chunks, only those of device sources are cached, within another bound.
pub struct Encoder {
    cache: Arc<Encodings>,
    reads: Arc<Reads>,
    chooser: Chooser,
    workers: Workers,
    stages: Arc<Stages>,
    counters: Counters,
}

/// What was read of a chunk.
#[derive(Clone)]
struct Read {
    bytes: Bytes,
    /// Its hash, if it need not be computed.
    hash: Option<ChunkHash>,
}

/// The counters of an encoder. `requested - encoded` requests shared an encoding, or could not read the chunk. The
/// bytes sent in each codec, and the time for encoding them, are in [`CodecStats`](crate::CodecStats).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EncoderStats {
    /// Bytes read from sources on this host, memory and files, counted each time a chunk is read.
    pub host_read_bytes: u64,
    /// The part of `host_read_bytes` that had to be copied: from files, and of chunks that are not contiguous, because
    /// they span tensors or padding of a borrowed version.
    pub host_copied_bytes: u64,
    /// Chunks requested in a codec other than `raw`, excluding deltas.
    pub requested: u64,
    /// Encodings made, excluding deltas.
    pub encoded: u64,
    /// Encodings that gained too little: their chunks are sent raw.
    pub incompressible: u64,
    /// Chunks compared with a base, by hash or by bytes. `compared - deltas` changed too much.
    pub compared: u64,
    /// Compared chunks that changed little enough for a delta. Sent as deltas, unless there is no memory for these.
    pub deltas: u64,
    /// Size estimates made. Most chunks need none, since chunks of a tensor share estimates.
    pub estimates: u64,
    /// Chunks requested from device sources. `source_requests - source_reads` shared a running or cached read.
    pub source_requests: u64,
    /// Chunks read from devices. `source_reads - source_rereads` is the number of distinct chunks.
    pub source_reads: u64,
    /// Chunks read again after their eviction or a failed read.
    pub source_rereads: u64,
    /// The current size of cached encodings, including memory kept for further ones. Encodings are dropped with their
    /// version.
    pub encoded_bytes: u64,
    /// The current size of device chunks cached or being read. Each counts at least the size of a slot.
    pub source_cached_bytes: u64,
}

#[derive(Debug, Default)]
struct Counters {
    host_read_bytes: AtomicU64,
    host_copied_bytes: AtomicU64,
    requested: AtomicU64,
    encoded: AtomicU64,
    incompressible: AtomicU64,
    compared: AtomicU64,
    deltas: AtomicU64,
}

impl Encoder {
    /// An encoder whose encodings, in flight and cached, take at most `encoded_bytes`, half of it for the cache.
    /// Encodings shorter than 4 KiB count only while they are cached. Caches at most `device_cache_bytes` of raw chunks
    /// per device; `None` is half of the device's slots.
    pub fn new(encoded_bytes: u64, device_cache_bytes: Option<u64>, workers: Workers) -> Self {
        let cache = Arc::new(Encodings::new(encoded_bytes));
        let stages = Arc::new(Stages::default());
        let reads = Arc::new(Reads::new(device_cache_bytes, workers, Arc::clone(&stages)));
        let chooser = Chooser::new(workers);
        Self { cache, reads, chooser, workers, stages, counters: Counters::default() }
    }

    /// The counters of pipeline stages.
    pub fn stages(&self) -> &Stages {
        &self.stages
    }

    /// The bytes of `chunk` for the wire, encoded as `wanted` if that saves enough.
    ///
    /// Concurrent callers share one encoding, and one read of a device. Raw chunks of other sources are hashed once and
    /// not cached.
    ///
    /// # Errors
    /// [`SourceError`] when the payload cannot be read. Callers that share a read of a device share its error.
    pub async fn encode(
        &self,
        payload: &Payload,
        chunk: ChunkIndex,
        wanted: impl Into<CodecRequest>,
    ) -> Result<Encoded, Arc<SourceError>> {
        self.encode_without_base(payload, chunk, wanted.into(), None).await
    }

    /// Encodes `chunk` as `wanted`, but not as a delta. A given `raw` saves a read. What a small raw chunk does not need
    /// is boxed: its future is moved, and as large as all that it may await.
    async fn encode_without_base(
        &self,
        payload: &Payload,
        chunk: ChunkIndex,
        wanted: CodecRequest,
        raw: Option<Encoded>,
    ) -> Result<Encoded, Arc<SourceError>> {
        let (raw, codec, estimation_time) = match wanted {
            CodecRequest::Fixed(codec) if codec.needs_base() => (raw, CodecId::Raw, Duration::ZERO),
            CodecRequest::Fixed(codec) => (raw, codec, Duration::ZERO),
            CodecRequest::Auto { offered, effort }
                if effort == Effort::None || offered.without_bases() == CodecSet::only_raw() =>
            {
                (raw, CodecId::Raw, Duration::ZERO)
            }
            CodecRequest::Auto { offered, effort } => {
                let estimate = Box::pin(self.cached_or_new_estimate(payload, chunk, raw));
                let (raw, estimate, estimation_time) = estimate.await?;
                (raw, estimate.choose(offered, effort), estimation_time)
            }
        };
        let encoded = match (codec, raw) {
            (CodecId::Raw, Some(raw)) => raw,
            (CodecId::Raw, None) => self.raw(payload, chunk).await?,
            (codec, raw) => Box::pin(self.encode_as(codec, payload, chunk, raw)).await?,
        };
        Ok(Encoded { worker_time: encoded.worker_time + estimation_time, ..encoded })
    }

    /// The raw bytes of `chunk`, if they were given or had to be read; its estimate; and the time spent on it.
    async fn cached_or_new_estimate(
        &self,
        payload: &Payload,
        chunk: ChunkIndex,
        raw: Option<Encoded>,
    ) -> Result<(Option<Encoded>, SizeEstimate, Duration), Arc<SourceError>> {
        if let Some(estimate) = self.chooser.cached_or_similar(payload, chunk) {
            return Ok((raw, estimate, Duration::ZERO));
        }
        let raw = match raw {
            Some(raw) => raw,
            None => self.raw(payload, chunk).await?,
        };
        let (estimate, estimation_time) = self.chooser.estimate(payload, chunk, raw.bytes.clone()).await;
        Ok((Some(raw), estimate, estimation_time))
    }

    /// The bytes of `chunk` in `codec`, or raw if that gains too little. A given `raw` saves a read.
    async fn encode_as(
        &self,
        codec: CodecId,
        payload: &Payload,
        chunk: ChunkIndex,
        mut raw: Option<Encoded>,
    ) -> Result<Encoded, Arc<SourceError>> {
        self.counters.requested.fetch_add(1, Ordering::Relaxed);
        let key = EncodingKey { payload: payload.key(), chunk, codec, base: None };
        if let Some(Some(encoded)) = self.cache.get(&key) {
            return Ok(encoded);
        }
        // Reads a device before `get_or_encode`: all callers share the failure of this read, whereas those that wait
        // for a failed encoding would retry in turn.
        if raw.is_none() && payload.source().is_costly() {
            raw = Some(self.raw(payload, chunk).await?);
        }
        let mut spent = Duration::ZERO;
        let run = async {
            let raw = match &mut raw {
                Some(raw) => raw,
                none => none.insert(self.raw(payload, chunk).await?),
            };
            let (encoded, took) = self.run_codec(payload, chunk, codec, raw).await;
            spent = took;
            Ok(encoded?)
        };
        payload.register_encodings(&self.cache);
        let encoded = match self.cache.get_or_encode(&key, run).await {
            Ok(encoded) => encoded,
            Err(EncodeError::NoRoom) => None,
            Err(EncodeError::Source(error)) => return Err(error),
        };
        let encoded = match (encoded, raw) {
            (Some(encoded), _) | (None, Some(encoded)) => encoded,
            (None, None) => self.raw(payload, chunk).await?,
        };
        Ok(Encoded { worker_time: spent, ..encoded })
    }

    /// The estimate of `chunk`, or of similar chunks, if there is one.
    pub fn estimate(&self, payload: &Payload, chunk: ChunkIndex) -> Option<SizeEstimate> {
        self.chooser.cached_or_similar(payload, chunk)
    }

    /// Estimates `raw`, the bytes of `chunk`, for this chunk and similar ones; returns the time spent on it as well.
    pub async fn sample(&self, payload: &Payload, chunk: ChunkIndex, raw: Bytes) -> (SizeEstimate, Duration) {
        self.chooser.estimate(payload, chunk, raw).await
    }

    /// The digest of `chunks` of `payload`. Reads those that are not hashed yet.
    ///
    /// # Errors
    /// [`SourceError`] when one of them cannot be read.
    pub async fn digest(
        &self,
        payload: &Payload,
        chunks: &RangeSet,
    ) -> Result<VersionDigest, Arc<SourceError>> {
        for chunk in payload.unhashed(chunks) {
            self.raw(payload, chunk).await?;
        }
        Ok(payload.digest_of(chunks).expect("every chunk was hashed, now or before"))
    }

    /// The hashes of `chunks` of `payload`, in the order of their index. Reads those that are not hashed yet.
    ///
    /// # Errors
    /// [`SourceError`] when one of them cannot be read.
    pub async fn hashes(
        &self,
        payload: &Payload,
        chunks: &RangeSet,
    ) -> Result<Vec<ChunkHash>, Arc<SourceError>> {
        for chunk in payload.unhashed(chunks) {
            self.raw(payload, chunk).await?;
        }
        let hashes = chunks.iter().filter_map(|chunk| payload.hash(ChunkIndex(chunk)));
        Ok(hashes.collect())
    }

    /// The current counters.
    pub fn stats(&self) -> EncoderStats {
        let Counters { host_read_bytes, host_copied_bytes, .. } = &self.counters;
        let Counters { requested, encoded, incompressible, compared, deltas, .. } = &self.counters;
        let ReadStats { requested: source_requests, begun, repeated, cached_bytes } = self.reads.stats();
        EncoderStats {
            host_read_bytes: host_read_bytes.load(Ordering::Relaxed),
            host_copied_bytes: host_copied_bytes.load(Ordering::Relaxed),
            requested: requested.load(Ordering::Relaxed),
            encoded: encoded.load(Ordering::Relaxed),
            incompressible: incompressible.load(Ordering::Relaxed),
            compared: compared.load(Ordering::Relaxed),
            deltas: deltas.load(Ordering::Relaxed),
            estimates: self.chooser.estimates(),
            encoded_bytes: self.cache.bytes(),
            source_requests,
            source_reads: begun,
            source_rereads: repeated,
            source_cached_bytes: cached_bytes,
        }
    }

    async fn raw(&self, payload: &Payload, chunk: ChunkIndex) -> Result<Encoded, Arc<SourceError>> {
        let read = self.read(payload, chunk).await?;
        self.hashed(payload, chunk, read).await
    }

    /// Reads `chunk`, without hashing it if it lies on this host.
    async fn read(&self, payload: &Payload, chunk: ChunkIndex) -> Result<Read, Arc<SourceError>> {
        if let Some(slots) = payload.source().slots() {
            let Encoded { bytes, hash, .. } = self.reads.get(payload, chunk, slots).await?;
            return Ok(Read { bytes, hash: Some(hash) });
        }
        let (range, _) = payload.manifest().chunk(chunk);
        let is_in_place = payload.source().is_in_place(&range);
        let _reading = self.stages.begin(Stage::Read);
        let bytes = payload.source().read(range).await.map_err(Arc::new)?;
        self.count_read(bytes.len() as u64, is_in_place);
        Ok(Read { bytes, hash: payload.reliable_hash(chunk) })
    }

    /// What was read of `chunk`, hashed if it was not.
    async fn hashed(
        &self,
        payload: &Payload,
        chunk: ChunkIndex,
        Read { bytes, hash }: Read,
    ) -> Result<Encoded, Arc<SourceError>> {
        let hash = match hash.or_else(|| payload.reliable_hash(chunk)) {
            Some(hash) => hash,
            None => {
                let _hashing = self.stages.begin(Stage::Encode);
                self.stages.pass(bytes.len());
                let raw = bytes.clone();
                let hashing = self.workers.run_over(raw.len(), move || ChunkHash::of(&raw));
                Box::pin(payload.hash_read(chunk, hashing)).await?
            }
        };
        Ok(Encoded { codec: CodecId::Raw, hash, bytes, worker_time: Duration::ZERO })
    }

    /// Encodes `raw`: `None` if that gains too little, [`NoRoom`] if there is no memory for the result. The second
    /// value is the time taken.
    async fn run_codec(
        &self,
        payload: &Payload,
        chunk: ChunkIndex,
        id: CodecId,
        raw: &Encoded,
    ) -> (Result<Option<Encoded>, NoRoom>, Duration) {
        let _encoding = self.stages.begin(Stage::Encode);
        let (_, dtype) = payload.manifest().chunk(chunk);
        let (bytes, raw_bytes) = (raw.bytes.clone(), raw.bytes.len());
        self.stages.pass(raw_bytes);
        let context = Context { dtype, base: None };
        let encodings = Arc::clone(&self.cache);
        let encoding = self.workers.run(move || {
            let began = Instant::now();
            let keep = |encoded: &[u8]| (encoded.len(), encodings.copy(encoded));
            let encode = |out: &mut [u8]| codec(id).encode(context, &bytes, out);
            let encoded = scratch::encode(worthwhile_bytes(raw_bytes), encode, keep);
            (encoded, began.elapsed())
        });
        let (encoded, spent) = encoding.await;
        let encoded_bytes = encoded.as_ref().map(|(bytes, _)| *bytes);
        self.counters.encoded.fetch_add(1, Ordering::Relaxed);
        self.counters
            .incompressible
            .fetch_add(encoded.is_none().into(), Ordering::Relaxed);
        self.chooser.handle_encoded(payload, chunk, id, raw_bytes, encoded_bytes);
        let kept = |bytes| Encoded { codec: id, hash: raw.hash, bytes, worker_time: Duration::ZERO };
        (encoded.map(|(_, bytes)| bytes.map(kept)).transpose(), spent)
    }

    fn count_read(&self, bytes: u64, is_in_place: bool) {
        let copied = if is_in_place { 0 } else { bytes };
        self.counters.host_read_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.counters.host_copied_bytes.fetch_add(copied, Ordering::Relaxed);
    }
}

impl fmt::Debug for Encoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Encoder").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, atomic::AtomicU8};
    use tensor_relay_device::{ForeignBytes, GatherSource, HostSource, Source};
    use tensor_relay_protocol::{Dtype, Limits, Manifest, Shape, TensorName, TensorSpec};

    fn payload_of(bytes: Vec<u8>) -> Payload {
        payload_from(HostSource::new(bytes.into()))
    }

    fn payload_from(source: impl Source + 'static) -> Payload {
        let shape = Shape::new(&[source.len_bytes()]).unwrap();
        let spec = TensorSpec::new(TensorName::new("t").unwrap(), Dtype::U8, shape);
        let manifest = Manifest::layout(vec![spec], vec![], 4096, &Limits::default()).unwrap();
        Payload::new(Arc::new(manifest), Arc::new(source))
    }

    #[tokio::test]
    async fn memory_that_was_overwritten_after_its_first_read_is_refused() {
        let memory: Arc<Vec<AtomicU8>> = Arc::new((0..8192).map(|_| AtomicU8::new(7)).collect());
        let foreign = ForeignBytes::new(memory.as_ptr().addr(), memory.len(), Arc::clone(&memory));
        let payload = payload_from(GatherSource::new(8192, [(0..8192, foreign)]).unwrap());
        let encoder = Encoder::new(0, None, Workers::Inline);
        let request = async |chunk| encoder.encode(&payload, ChunkIndex(chunk), CodecId::Raw).await;
        let first = request(0).await.unwrap();
        memory[5000].store(8, Ordering::Relaxed);
        request(1).await.unwrap(); // It was not read before.
        memory[100].store(8, Ordering::Relaxed);
        let error = request(0).await.unwrap_err();
        assert!(matches!(*error, SourceError::Overwritten { start: 0, end: 4096 }), "{error}");
        memory[100].store(7, Ordering::Relaxed);
        assert_eq!(request(0).await.unwrap().hash, first.hash);
    }

    #[tokio::test]
    async fn many_subscribers_share_one_encoding() {
        let payload = payload_of(vec![7; 8192]);
        let encoder = Encoder::new(1 << 20, None, Workers::Threads);
        let wanted = (0..20).map(|_| encoder.encode(&payload, ChunkIndex(1), CodecId::Zstd));
        for encoded in wanted {
            let encoded = encoded.await.unwrap();
            assert_eq!(encoded.codec, CodecId::Zstd);
            assert!(encoded.bytes.len() < 100);
        }
        let stats = encoder.stats();
        assert_eq!((stats.requested, stats.encoded), (20, 1));
    }

    #[tokio::test]
    async fn worker_time_of_an_encoding_is_counted_once() {
        let noise: Vec<u8> = (0..256u32).flat_map(|i| ChunkHash::of(&i.to_le_bytes()).0).collect();
        let payload = payload_of([vec![7; 4096], noise].concat());
        let encoder = Encoder::new(1 << 20, None, Workers::Inline);
        for chunk in [ChunkIndex(0), ChunkIndex(1)] {
            let first = encoder.encode(&payload, chunk, CodecId::Zstd).await.unwrap();
            let second = encoder.encode(&payload, chunk, CodecId::Zstd).await.unwrap();
            assert!(first.worker_time > Duration::ZERO, "also a failed attempt");
            assert_eq!((second.codec, second.worker_time), (first.codec, Duration::ZERO));
        }
    }

    /// Goal: encodings in use stay within their budget. Chunks beyond it are sent raw, until there is room again.
    #[tokio::test]
    async fn chunks_beyond_the_budget_are_sent_raw() {
        let limits = Limits::default();
        let (chunk_bytes, chunks) = (1 << 20, 256_u32);
        // Every other byte is noise, so it compresses to half.
        let noise = (0..chunk_bytes / 32).flat_map(|i: u32| ChunkHash::of(&i.to_le_bytes()).0);
        let half: Vec<u8> = noise.flat_map(|byte| [byte, 0]).take(chunk_bytes as usize).collect();
        let shape = Shape::new(&[u64::from(chunk_bytes * chunks)]).unwrap();
        let spec = TensorSpec::new(TensorName::new("t").unwrap(), Dtype::U8, shape);
        let manifest = Manifest::layout(vec![spec], vec![], chunk_bytes, &limits).unwrap();
        let source = HostSource::new(half.repeat(chunks as usize).into());
        let payload = Payload::new(Arc::new(manifest), Arc::new(source));
        let encoded_bytes = 64 << 20;
        let encoder = Encoder::new(encoded_bytes, None, Workers::Inline);
        let mut kept = vec![];
        for chunk in 0..chunks {
            kept.push(encoder.encode(&payload, ChunkIndex(chunk), CodecId::Zstd).await.unwrap());
        }
        let encoded = kept.iter().filter(|chunk| chunk.codec == CodecId::Zstd);
        let bytes: usize = encoded.clone().map(|chunk| chunk.bytes.len()).sum();
        assert!(bytes as u64 <= encoded_bytes, "{bytes}");
        assert!(encoded.count() > 32, "they are encoded up to the bound");
        assert_eq!(kept.last().unwrap().codec, CodecId::Raw);
        drop(kept);
        let again = encoder.encode(&payload, ChunkIndex(chunks - 1), CodecId::Zstd).await.unwrap();
        assert_eq!(again.codec, CodecId::Zstd);
    }

    #[tokio::test]
    async fn incompressible_chunks_are_sent_raw() {
        let noise: Vec<u8> = (0..4096u32)
            .flat_map(|i| ChunkHash::of(&i.to_le_bytes()).0[..2].to_vec())
            .collect();
        let payload = payload_of(noise.clone());
        let encoder = Encoder::new(1 << 20, None, Workers::Inline);
        let encoded = encoder.encode(&payload, ChunkIndex(0), CodecId::Zstd).await.unwrap();
        assert_eq!((encoded.codec, &encoded.bytes[..]), (CodecId::Raw, &noise[..4096]));
        assert_eq!(encoded.hash, ChunkHash::of(&noise[..4096]));
        assert_eq!(encoder.stats().incompressible, 1);
        assert_eq!(payload.digest(), None, "chunk 1 was not hashed yet");
    }

    #[tokio::test]
    async fn the_cache_stays_within_its_budget() {
        let payload = payload_of(vec![1; 4096 * 50]);
        let encoder = Encoder::new(1, None, Workers::Inline);
        for chunk in 0..50 {
            encoder.encode(&payload, ChunkIndex(chunk), CodecId::Zstd).await.unwrap();
        }
        assert!(encoder.stats().encoded_bytes <= 1, "a cache without room stays empty");
        encoder.encode(&payload, ChunkIndex(0), CodecId::Zstd).await.unwrap();
        assert_eq!(encoder.stats().encoded, 51);
    }

    #[tokio::test]
    async fn encodings_are_dropped_with_their_versions() {
        let (before, mut after) = (vec![1; 8192], vec![1; 8192]);
        after[100] ^= 1;
        let (before, after) = (payload_of(before), payload_of(after));
        let encoder = Encoder::new(1 << 20, None, Workers::Inline);
        let wanted = CodecRequest::Fixed(CodecId::Sparse);
        encoder
            .encode_delta(&after, ChunkIndex(0), Some(&before), wanted)
            .await
            .unwrap();
        encoder.encode(&after, ChunkIndex(1), CodecId::Zstd).await.unwrap();
        let both = encoder.stats().encoded_bytes;
        drop(before);
        let one = encoder.stats().encoded_bytes;
        assert!(0 < one && one < both, "{one} of {both}: the delta is dropped with its base");
        drop(after);
        assert_eq!(encoder.stats().encoded_bytes, 0);
    }
}
