//! [`Chooser`]: the cached size estimates by which codecs are chosen.

use super::Payload;
use crate::Workers;
use bytes::Bytes;
use quick_cache::sync::Cache;
use rustix::time::{ClockId, clock_gettime};
use std::{
    convert::Infallible,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use tensor_relay_protocol::{
    ChunkIndex, CodecId, CodecSet, Effort, ManifestDigest, SMALL_BYTES, SizeEstimate,
};

/// A subscriber's request for a codec.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CodecRequest {
    /// The best codec of `offered` for this effort.
    Auto {
        /// The codecs that the subscriber can decode.
        offered: CodecSet,
        /// The encoding effort.
        effort: Effort,
    },
    /// This codec, unless it saves too little.
    Fixed(CodecId),
}

impl CodecRequest {
    /// Whether the request allows encoding in `codec`. Chunks may be sent raw in any case.
    pub fn takes(self, codec: CodecId) -> bool {
        match self {
            Self::Auto { offered, .. } => offered.contains(codec),
            Self::Fixed(fixed) => fixed == codec,
        }
    }
}

impl From<CodecId> for CodecRequest {
    fn from(codec: CodecId) -> Self {
        Self::Fixed(codec)
    }
}

/// Estimates encoded sizes, and caches the estimates.
///
/// An estimate takes as long as sending a hundredth of a chunk of 4 MiB at 10 Gbit/s, so not every chunk is estimated:
/// the chunks of a tensor are similar, even in later versions. An estimate is used for the next [`CHUNKS_PER_ESTIMATE`]
/// of them, or until the encoded size of one refutes it. The estimate used for a chunk is cached, so that all
/// subscribers with the same request get the same codec.
pub(super) struct Chooser {
    workers: Workers,
    chunks: Cache<(u64, ChunkIndex), SizeEstimate>,
    groups: Cache<ChunkGroup, Arc<CachedEstimate>>,
    /// Groups in which the last chunk that was compared with a base had changed too much, and the number of chunks not
    /// compared since.
    changed_groups: Cache<ChunkGroup, Arc<AtomicU32>>,
    /// Pairs of a payload and an unreadable base.
    unreadable: Cache<(u64, u64), ()>,
    estimates: AtomicU64,
}

/// A group of similar chunks: those of one tensor in all versions with the same manifest, or one chunk shared by small
/// tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct ChunkGroup {
    manifest: ManifestDigest,
    first: ChunkIndex,
}

#[derive(Debug)]
struct CachedEstimate {
    estimate: SizeEstimate,
    /// The number of further chunks that used it.
    used: AtomicU32,
}

/// The number of further chunks that use an estimate. Estimating random bytes thus costs less than 0.3 % of sending
/// them.
const CHUNKS_PER_ESTIMATE: u32 = 16;

/// The maximum number of cached chunks, and of groups: enough for 256 GiB in chunks of 4 MiB, in less than 10 MB. An
/// evicted chunk or group is estimated again.
const CACHED_MAX: usize = 1 << 16;

/// The maximum number of cached pairs with an unreadable base. A topic has few; an evicted one costs another read
/// attempt.
const UNREADABLE_MAX: usize = 1 << 10;

impl Chooser {
    pub(super) fn new(workers: Workers) -> Self {
        Self {
            workers,
            chunks: Cache::new(CACHED_MAX),
            groups: Cache::new(CACHED_MAX),
            changed_groups: Cache::new(CACHED_MAX),
            unreadable: Cache::new(UNREADABLE_MAX),
            estimates: AtomicU64::new(0),
        }
    }

    /// The number of estimates made.
    pub(super) fn estimates(&self) -> u64 {
        self.estimates.load(Ordering::Relaxed)
    }

    /// The cached estimate of `chunk`. A small chunk needs none: encoding it would not be worth it.
    fn cached(&self, payload: &Payload, chunk: ChunkIndex) -> Option<SizeEstimate> {
        let (range, _) = payload.manifest().chunk(chunk);
        match range.end - range.start < SMALL_BYTES as u64 {
            true => Some(SizeEstimate::NO_GAIN),
            false => self.chunks.get(&(payload.key(), chunk)),
        }
    }

    /// The cached estimate of `chunk`, or that of similar chunks.
    pub(super) fn cached_or_similar(&self, payload: &Payload, chunk: ChunkIndex) -> Option<SizeEstimate> {
        if let Some(estimate) = self.cached(payload, chunk) {
            return Some(estimate);
        }
        let key = (payload.key(), chunk);
        let cached = self.groups.get(&group_of(payload, chunk))?;
        let is_fresh = cached.used.fetch_add(1, Ordering::Relaxed) < CHUNKS_PER_ESTIMATE;
        is_fresh.then(|| {
            self.chunks.insert(key, cached.estimate);
            cached.estimate
        })
    }

    /// Estimates `raw`, the bytes of `chunk`, on a worker. Concurrent callers share one estimate; only the caller that
    /// ran it gets the time spent, the others zero.
    pub(super) async fn estimate(
        &self,
        payload: &Payload,
        chunk: ChunkIndex,
        raw: Bytes,
    ) -> (SizeEstimate, Duration) {
        let mut spent = Duration::ZERO;
        let estimating = async {
            self.estimates.fetch_add(1, Ordering::Relaxed);
            let (_, dtype) = payload.manifest().chunk(chunk);
            let timed = move || {
                let began = Instant::now();
                (SizeEstimate::of(dtype, &raw, processor_time), began.elapsed())
            };
            let (estimate, took) = self.workers.run(timed).await;
            spent = took;
            let cached = CachedEstimate { estimate, used: AtomicU32::new(0) };
            self.groups.insert(group_of(payload, chunk), Arc::new(cached));
            Ok::<_, Infallible>(estimate)
        };
        let Ok(estimate) = self.chunks.get_or_insert_async(&(payload.key(), chunk), estimating).await;
        (estimate, spent)
    }

    /// Decides whether to skip the comparison of `chunk` with its base, and counts skipped chunks. If a chunk of the
    /// same group had changed too much, the next [`CHUNKS_PER_ESTIMATE`] are skipped: training in f32 changes nearly
    /// every element.
    pub(super) fn should_skip_comparison(&self, payload: &Payload, chunk: ChunkIndex) -> bool {
        let skipped = self.changed_groups.get(&group_of(payload, chunk));
        skipped.is_some_and(|count| count.fetch_add(1, Ordering::Relaxed) < CHUNKS_PER_ESTIMATE)
    }

    /// Records the result of comparing `chunk` with its base.
    pub(super) fn handle_compared(&self, payload: &Payload, chunk: ChunkIndex, is_delta: bool) {
        let group = group_of(payload, chunk);
        match is_delta {
            true => drop(self.changed_groups.remove(&group)),
            false => self.changed_groups.insert(group, Arc::default()),
        }
    }

    /// Whether reading `base` for `payload` has failed before.
    pub(super) fn is_unreadable(&self, payload: &Payload, base: &Payload) -> bool {
        self.unreadable.get(&(payload.key(), base.key())).is_some()
    }

    /// Records that `base` cannot be read; returns whether that is new.
    pub(super) fn handle_unreadable(&self, payload: &Payload, base: &Payload) -> bool {
        let is_new = !self.is_unreadable(payload, base);
        self.unreadable.insert((payload.key(), base.key()), ());
        is_new
    }

    /// Records the result of an encoding: the number of `encoded_bytes`, or `None` if the encoding gained too little.
    /// Drops an estimate that the result refutes.
    pub(super) fn handle_encoded(
        &self,
        payload: &Payload,
        chunk: ChunkIndex,
        codec: CodecId,
        raw_bytes: usize,
        encoded_bytes: Option<usize>,
    ) {
        let group = group_of(payload, chunk);
        let cached = self.groups.get(&group);
        if cached.is_some_and(|cached| cached.estimate.is_refuted_by(codec, raw_bytes, encoded_bytes)) {
            self.groups.remove(&group);
        }
    }
}

/// The processor time of this thread. By a clock, a sample that another program interrupts would seem to take a hundred
/// times as long.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn group_of(payload: &Payload, chunk: ChunkIndex) -> ChunkGroup {
    let manifest = payload.manifest();
    let first = manifest.chunking().first_of(chunk).unwrap_or(chunk);
    ChunkGroup { manifest: manifest.digest(), first }
}

impl fmt::Debug for Chooser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Chooser")
            .field("estimates", &self.estimates())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::egress::{Encoder, EncoderStats};
    use tensor_relay_device::HostSource;
    use tensor_relay_protocol::{ChunkHash, Dtype, Limits, Manifest, Shape, TensorName, TensorSpec};

    const CHUNK: usize = 64 << 10;

    /// One tensor, cut into chunks.
    fn payload_of(dtype: Dtype, bytes: Vec<u8>) -> Payload {
        let shape = Shape::new(&[bytes.len() as u64 * 8 / u64::from(dtype.bits())]).unwrap();
        let spec = TensorSpec::new(TensorName::new("t").unwrap(), dtype, shape);
        let manifest = Manifest::layout(vec![spec], vec![], CHUNK as u32, &Limits::default()).unwrap();
        Payload::new(Arc::new(manifest), Arc::new(HostSource::new(bytes.into())))
    }

    fn noise(chunks: usize) -> Vec<u8> {
        let word = |i: usize| ChunkHash::of(&i.to_le_bytes()).0;
        (0..chunks * CHUNK / 16).flat_map(word).collect()
    }

    /// Noise with few different exponents in every second byte, like weights.
    fn weights(chunks: usize) -> Vec<u8> {
        let mut bytes = noise(chunks);
        for byte in bytes.iter_mut().skip(1).step_by(2) {
            *byte = *byte & 0x80 | 0x3c | byte.trailing_zeros().min(3) as u8;
        }
        bytes
    }

    fn auto(effort: Effort) -> CodecRequest {
        CodecRequest::Auto { offered: CodecSet::all(), effort }
    }

    /// Encodes every chunk of `payload`; returns the codecs.
    async fn codecs_of(encoder: &Encoder, payload: &Payload, wanted: CodecRequest) -> Vec<CodecId> {
        let mut codecs = vec![];
        for (chunk, range) in payload.manifest().chunking().iter() {
            let encoded = encoder.encode(payload, chunk, wanted).await.unwrap();
            assert!(encoded.bytes.len() as u64 <= range.end - range.start);
            codecs.push(encoded.codec);
        }
        codecs
    }

    fn new_encoder() -> Encoder {
        Encoder::new(64 << 20, None, Workers::Inline)
    }

    #[tokio::test]
    async fn random_bytes_are_sent_raw_with_few_estimates() {
        for dtype in [Dtype::U8, Dtype::Bf16] {
            let (encoder, payload) = (new_encoder(), payload_of(dtype, noise(64)));
            let sent = codecs_of(&encoder, &payload, auto(Effort::Full)).await;
            assert_eq!(sent, [CodecId::Raw; 64]);
            let EncoderStats { requested, encoded, estimates, .. } = encoder.stats();
            assert_eq!((requested, encoded), (0, 0), "no encoding was attempted");
            assert_eq!(estimates, 64_u64.div_ceil(u64::from(CHUNKS_PER_ESTIMATE) + 1));
            codecs_of(&encoder, &payload, auto(Effort::Light)).await;
            assert_eq!(encoder.stats().estimates, estimates, "the estimates are cached");
        }
    }

    #[tokio::test]
    async fn floats_are_sent_as_bit_planes_and_a_new_version_needs_no_estimate() {
        let encoder = new_encoder();
        let first = payload_of(Dtype::Bf16, weights(8));
        assert_eq!(codecs_of(&encoder, &first, auto(Effort::default())).await, [CodecId::BitPlanes; 8]);
        let second = payload_of(Dtype::Bf16, weights(8));
        assert_eq!(codecs_of(&encoder, &second, auto(Effort::default())).await, [CodecId::BitPlanes; 8]);
        let EncoderStats { estimates, encoded, incompressible, .. } = encoder.stats();
        assert_eq!((estimates, encoded, incompressible), (1, 16, 0));
    }

    #[tokio::test]
    async fn efforts_with_the_same_codec_share_encodings() {
        let (encoder, payload) = (new_encoder(), payload_of(Dtype::Bf16, weights(8)));
        for effort in [Effort::Light, Effort::Full, Effort::None] {
            codecs_of(&encoder, &payload, auto(effort)).await;
        }
        let EncoderStats { requested, encoded, .. } = encoder.stats();
        assert_eq!((requested, encoded), (16, 8));
    }

    #[tokio::test]
    async fn fixed_and_offered_codecs_are_respected() {
        let (encoder, payload) = (new_encoder(), payload_of(Dtype::Bf16, weights(4)));
        for codec in [CodecId::Raw, CodecId::Planes, CodecId::Zstd, CodecId::BitPlanes] {
            assert_eq!(codecs_of(&encoder, &payload, codec.into()).await, [codec; 4]);
        }
        assert_eq!(encoder.stats().estimates, 0, "no choice");
        let wanted = CodecRequest::Auto { offered: CodecSet::only_raw(), effort: Effort::Full };
        assert_eq!(codecs_of(&encoder, &payload, wanted).await, [CodecId::Raw; 4]);
        assert_eq!(encoder.stats().estimates, 0, "only one codec is offered");
    }

    /// A tensor that begins as weights and continues as noise.
    #[tokio::test]
    async fn a_refuted_estimate_is_replaced() {
        let mut bytes = weights(2);
        bytes.extend(noise(14));
        let (encoder, payload) = (new_encoder(), payload_of(Dtype::Bf16, bytes));
        let sent = codecs_of(&encoder, &payload, auto(Effort::default())).await;
        assert_eq!(sent[..2], [CodecId::BitPlanes; 2]);
        assert_eq!(sent[2..], [CodecId::Raw; 14]);
        let EncoderStats { estimates, incompressible, .. } = encoder.stats();
        assert_eq!(
            (estimates, incompressible),
            (2, 1),
            "one attempt failed, then there was another estimate"
        );
    }

    #[tokio::test]
    async fn small_chunks_are_sent_raw_without_an_estimate() {
        let whole = CHUNK + SMALL_BYTES;
        for (bytes, last, estimates) in [(whole, CodecId::BitPlanes, 1), (whole - 256, CodecId::Raw, 1)] {
            let (encoder, payload) = (new_encoder(), payload_of(Dtype::Bf16, weights(2)[..bytes].to_vec()));
            let sent = codecs_of(&encoder, &payload, auto(Effort::default())).await;
            assert_eq!((sent, encoder.stats().estimates), (vec![CodecId::BitPlanes, last], estimates));
        }
        let (encoder, payload) =
            (new_encoder(), payload_of(Dtype::Bf16, weights(1)[..SMALL_BYTES - 256].to_vec()));
        assert_eq!(codecs_of(&encoder, &payload, auto(Effort::default())).await, [CodecId::Raw]);
        assert_eq!(encoder.stats().estimates, 0);
    }

    #[tokio::test]
    async fn the_time_of_an_estimate_is_counted_once() {
        let (encoder, payload) = (new_encoder(), payload_of(Dtype::Bf16, noise(1)));
        let request = async || encoder.encode(&payload, ChunkIndex(0), auto(Effort::Full)).await.unwrap();
        let (first, second) = (request().await, request().await);
        assert_eq!(
            (first.codec, second.codec, second.worker_time),
            (CodecId::Raw, CodecId::Raw, Duration::ZERO)
        );
        assert!(first.worker_time > Duration::ZERO);
    }

    #[tokio::test]
    async fn concurrent_requests_share_one_estimate() {
        let (encoder, payload) = (
            Arc::new(Encoder::new(64 << 20, None, Workers::Threads)),
            Arc::new(payload_of(Dtype::Bf16, weights(1))),
        );
        let mut requests = tokio::task::JoinSet::new();
        for _ in 0..20 {
            let (encoder, payload) = (Arc::clone(&encoder), Arc::clone(&payload));
            requests.spawn(async move {
                encoder.encode(&payload, ChunkIndex(0), auto(Effort::Full)).await.unwrap().codec
            });
        }
        assert_eq!(requests.join_all().await, [CodecId::BitPlanes; 20]);
        let EncoderStats { estimates, encoded, .. } = encoder.stats();
        assert_eq!((estimates, encoded), (1, 1));
    }
}
