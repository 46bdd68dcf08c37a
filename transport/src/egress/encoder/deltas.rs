//! Encodes chunks as deltas against a base that receivers hold, once for all of them.

use super::{Encoded, Encoder, scratch};
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
use tensor_relay_protocol::{ChunkIndex, CodecId, Context, SMALL_BYTES, Sparse};

/// The delta codec. Encoding fails for a chunk that changed too much: a delta is at most half as long as its chunk.
const CODEC: CodecId = CodecId::Sparse;

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
                let raw = self.raw(payload, chunk).await?;
                let (delta, comparison_time) = Box::pin(self.delta(key, payload, base, &raw)).await?;
                let encoded = match delta {
                    Some(delta) => delta,
                    None => self.encode_without_base(payload, chunk, wanted, Some(raw)).await?,
                };
                Ok(Encoded { worker_time: encoded.worker_time + comparison_time, ..encoded })
            }
        }
    }

    /// The delta of the chunk `raw` against `base`, and the time spent. `None` if too much changed, the base is
    /// unreadable, the comparison is skipped, or there is no memory for the delta. If the hashes are equal, the bytes
    /// of the base are neither read nor compared.
    async fn delta(
        &self,
        key: EncodingKey,
        payload: &Payload,
        base: &Payload,
        raw: &Encoded,
    ) -> Result<(Option<Encoded>, Duration), Arc<SourceError>> {
        payload.register_encodings(&self.cache);
        base.register_encodings(&self.cache);
        let is_same = base.hash(key.chunk) == Some(raw.hash);
        if !is_same && self.chooser.should_skip_comparison(payload, key.chunk) {
            self.cache.insert(key, None); // Later receivers get no delta either, and so the same encoding.
            return Ok((None, Duration::ZERO));
        }
        let before = match is_same {
            true => raw.bytes.clone(),
            false => match self.base_bytes(payload, base, key.chunk).await {
                Some(before) => before,
                None => return Ok((None, Duration::ZERO)),
            },
        };
        let mut spent = Duration::ZERO; // Remains zero if another task compares.
        let compare = async {
            let (delta, took) = match is_same {
                true => (Ok(Some(self.unchanged(payload, key.chunk, raw))), Duration::ZERO),
                false => self.compare(payload, key.chunk, raw, before).await,
            };
            spent = took;
            Ok(delta?)
        };
        match self.cache.get_or_encode(&key, compare).await {
            Ok(delta) => Ok((delta, spent)),
            Err(EncodeError::NoRoom) => Ok((None, spent)),
            Err(EncodeError::Source(error)) => Err(error),
        }
    }

    /// The bytes of the chunk in `base`; `None` if the base is unreadable. After a failure, `base` is not read again
    /// for this payload.
    async fn base_bytes(&self, payload: &Payload, base: &Payload, chunk: ChunkIndex) -> Option<Bytes> {
        if self.chooser.is_unreadable(payload, base) {
            return None;
        }
        match self.raw(base, chunk).await {
            Ok(before) => Some(before.bytes),
            Err(error) => {
                if self.chooser.handle_unreadable(payload, base) {
                    tracing::warn!(%chunk, %error, "A base cannot be read any more; chunks are sent whole.");
                }
                None
            }
        }
    }

    /// The delta of an unchanged chunk.
    fn unchanged(&self, payload: &Payload, chunk: ChunkIndex, raw: &Encoded) -> Encoded {
        let (_, dtype) = payload.manifest().chunk(chunk);
        let bytes = Bytes::from(Sparse::unchanged(dtype, &raw.bytes));
        self.count_compared(true);
        Encoded { codec: CODEC, hash: raw.hash, bytes, worker_time: Duration::ZERO }
    }

    async fn compare(
        &self,
        payload: &Payload,
        chunk: ChunkIndex,
        raw: &Encoded,
        before: Bytes,
    ) -> (Result<Option<Encoded>, NoRoom>, Duration) {
        let _comparing = self.stages.begin(Stage::Encode);
        let (_, dtype) = payload.manifest().chunk(chunk);
        let (bytes, encodings) = (raw.bytes.clone(), Arc::clone(&self.cache));
        let comparing = self.workers.run_over(bytes.len(), move || {
            let began = Instant::now();
            let context = Context { dtype, base: Some(&before) };
            let keep = |delta: &[u8]| encodings.copy(delta);
            (scratch::encode(CODEC, context, &bytes, bytes.len() / 2, keep), began.elapsed())
        });
        let (delta, spent) = comparing.await;
        self.chooser.handle_compared(payload, chunk, delta.is_some());
        self.count_compared(delta.is_some());
        let encoded = |bytes| Encoded { codec: CODEC, hash: raw.hash, bytes, worker_time: Duration::ZERO };
        (delta.map(|delta| delta.map(encoded)).transpose(), spent)
    }

    fn count_compared(&self, is_delta: bool) {
        self.counters.compared.fetch_add(1, Ordering::Relaxed);
        self.counters.deltas.fetch_add(is_delta.into(), Ordering::Relaxed);
    }
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
    use std::sync::atomic::AtomicU32;
    use tensor_relay_device::{BoxFuture, HostSource, Source};
    use tensor_relay_protocol::{
        ChunkHash, CodecSet, Dtype, Effort, Limits, Manifest, Shape, TensorName, TensorSpec, codec,
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
