//! Chunks become wire bytes here, once for all subscribers.

use super::Payload;
use crate::Workers;
use bytes::Bytes;
use quick_cache::{Weighter, sync::Cache};
use std::{
    fmt,
    sync::atomic::{AtomicU64, Ordering},
};
use tensor_relay_device::SourceError;
use tensor_relay_protocol::{ChunkHash, ChunkIndex, CodecId, Context, RangeSet, VersionDigest, codec};

/// An encoding must save this share of the raw bytes, or the chunk travels raw: below that, decoding costs more than
/// the bytes saved.
const GAIN_MIN_PER_CENT: usize = 3;

/// One chunk, ready for the wire. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Encoded {
    /// How it is encoded; `raw` when the codec asked for gained too little.
    pub codec: CodecId,
    /// What its raw bytes hash to.
    pub hash: ChunkHash,
    /// The bytes that travel.
    pub bytes: Bytes,
}

/// Reads, hashes and encodes chunks, each once per (payload, chunk, codec) however many subscribers want it, as long as
/// the result stays in a cache of bounded size. What was evicted is read and encoded again.
pub struct Encoder {
    cache: Cache<Key, Encoded, ByBytes>,
    workers: Workers,
    counters: Counters,
}

/// What an encoder has done. `requested - encoded` were answered from the cache or needed no encoding.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EncoderStats {
    /// Chunks asked for in a codec other than `raw`.
    pub requested: u64,
    /// Chunks that a codec ran on.
    pub encoded: u64,
    /// Of those, chunks that gained too little and travel raw.
    pub incompressible: u64,
    /// Raw bytes that went into codecs.
    pub raw_bytes: u64,
    /// Bytes that came out.
    pub encoded_bytes: u64,
}

#[derive(Debug, Default)]
struct Counters {
    requested: AtomicU64,
    encoded: AtomicU64,
    incompressible: AtomicU64,
    raw_bytes: AtomicU64,
    encoded_bytes: AtomicU64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    payload: u64,
    chunk: ChunkIndex,
    codec: CodecId,
}

#[derive(Debug, Clone)]
struct ByBytes;

impl Weighter<Key, Encoded> for ByBytes {
    fn weight(&self, _: &Key, encoded: &Encoded) -> u64 {
        encoded.bytes.len() as u64 + 128 // The entry itself.
    }
}

impl Encoder {
    /// An encoder that keeps at most `cache_bytes` of encodings.
    pub fn new(cache_bytes: u64, workers: Workers) -> Self {
        // The number of entries is only a hint for the first allocation; the weight is the bound.
        let cache = Cache::with_weighter(64, cache_bytes, ByBytes);
        Self { cache, workers, counters: Counters::default() }
    }

    /// The bytes of `chunk` for the wire, encoded as `wanted` where that gains something.
    ///
    /// Several subscribers that ask at the same time wait for one encoding. Raw chunks cost nothing beyond a hash, which
    /// is computed once, and are not cached: their bytes are the source's own.
    ///
    /// # Errors
    /// [`SourceError`] when the payload cannot be read.
    pub async fn encode(
        &self,
        payload: &Payload,
        chunk: ChunkIndex,
        wanted: CodecId,
    ) -> Result<Encoded, SourceError> {
        if wanted == CodecId::Raw {
            return self.raw(payload, chunk).await;
        }
        self.counters.requested.fetch_add(1, Ordering::Relaxed);
        let key = Key { payload: payload.key(), chunk, codec: wanted };
        self.cache
            .get_or_insert_async(&key, self.run_codec(payload, chunk, wanted))
            .await
    }

    /// What `chunks` of `payload` are together. Costs a read of those that were never hashed.
    ///
    /// # Errors
    /// [`SourceError`] when one of them cannot be read.
    pub async fn digest(&self, payload: &Payload, chunks: &RangeSet) -> Result<VersionDigest, SourceError> {
        for chunk in payload.unhashed(chunks) {
            self.raw(payload, chunk).await?;
        }
        Ok(payload.digest_of(chunks).expect("every chunk was hashed, now or before"))
    }

    /// What was done so far.
    pub fn stats(&self) -> EncoderStats {
        let Counters { requested, encoded, incompressible, raw_bytes, encoded_bytes } = &self.counters;
        EncoderStats {
            requested: requested.load(Ordering::Relaxed),
            encoded: encoded.load(Ordering::Relaxed),
            incompressible: incompressible.load(Ordering::Relaxed),
            raw_bytes: raw_bytes.load(Ordering::Relaxed),
            encoded_bytes: encoded_bytes.load(Ordering::Relaxed),
        }
    }

    async fn raw(&self, payload: &Payload, chunk: ChunkIndex) -> Result<Encoded, SourceError> {
        let (range, _) = payload.manifest().chunk(chunk);
        let bytes = payload.source().read(range).await?;
        let hash = match payload.hash(chunk) {
            Some(hash) => hash,
            None => {
                let raw = bytes.clone();
                let hash = self.workers.run(move || ChunkHash::of(&raw)).await;
                payload.set_hash(chunk, hash);
                hash
            }
        };
        Ok(Encoded { codec: CodecId::Raw, hash, bytes })
    }

    async fn run_codec(
        &self,
        payload: &Payload,
        chunk: ChunkIndex,
        wanted: CodecId,
    ) -> Result<Encoded, SourceError> {
        let raw = self.raw(payload, chunk).await?;
        let (_, dtype) = payload.manifest().chunk(chunk);
        let bytes = raw.bytes.clone();
        let context = Context { dtype, base: None };
        let encoded = self.workers.run(move || {
            let mut out = vec![0; bytes.len() - bytes.len() * GAIN_MIN_PER_CENT / 100];
            let written = codec(wanted).encode(context, &bytes, &mut out)?;
            out.truncate(written);
            out.shrink_to_fit();
            Some(Bytes::from(out))
        });
        let encoded = encoded.await;
        self.count(raw.bytes.len(), encoded.as_ref());
        Ok(match encoded {
            Some(bytes) => Encoded { codec: wanted, hash: raw.hash, bytes },
            None => raw,
        })
    }

    fn count(&self, raw_bytes: usize, encoded: Option<&Bytes>) {
        self.counters.encoded.fetch_add(1, Ordering::Relaxed);
        self.counters.raw_bytes.fetch_add(raw_bytes as u64, Ordering::Relaxed);
        self.counters
            .incompressible
            .fetch_add(encoded.is_none().into(), Ordering::Relaxed);
        let encoded_bytes = encoded.map_or(raw_bytes, Bytes::len);
        self.counters.encoded_bytes.fetch_add(encoded_bytes as u64, Ordering::Relaxed);
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
    use std::sync::Arc;
    use tensor_relay_device::HostSource;
    use tensor_relay_protocol::{Dtype, Limits, Manifest, Shape, TensorName, TensorSpec};

    fn payload(bytes: Vec<u8>) -> Payload {
        let shape = Shape::new(&[bytes.len() as u64]).unwrap();
        let spec = TensorSpec::new(TensorName::new("t").unwrap(), Dtype::U8, shape);
        let manifest = Manifest::layout(vec![spec], vec![], 4096, &Limits::default()).unwrap();
        Payload::new(Arc::new(manifest), Arc::new(HostSource::new(bytes.into())))
    }

    #[tokio::test]
    async fn many_subscribers_pay_for_one_encoding() {
        let payload = payload(vec![7; 8192]);
        let encoder = Encoder::new(1 << 20, Workers::Threads);
        let wanted = (0..20).map(|_| encoder.encode(&payload, ChunkIndex(1), CodecId::Zstd));
        for encoded in wanted {
            let encoded = encoded.await.unwrap();
            assert_eq!(encoded.codec, CodecId::Zstd);
            assert!(encoded.bytes.len() < 100);
        }
        let stats = encoder.stats();
        assert_eq!((stats.requested, stats.encoded, stats.raw_bytes), (20, 1, 4096));
    }

    #[tokio::test]
    async fn what_gains_nothing_travels_raw() {
        let noise: Vec<u8> = (0..4096u32)
            .flat_map(|i| ChunkHash::of(&i.to_le_bytes()).0[..2].to_vec())
            .collect();
        let payload = payload(noise.clone());
        let encoder = Encoder::new(1 << 20, Workers::Inline);
        let encoded = encoder.encode(&payload, ChunkIndex(0), CodecId::Zstd).await.unwrap();
        assert_eq!((encoded.codec, &encoded.bytes[..]), (CodecId::Raw, &noise[..4096]));
        assert_eq!(encoded.hash, ChunkHash::of(&noise[..4096]));
        assert_eq!(encoder.stats().incompressible, 1);
        assert_eq!(payload.digest(), None, "chunk 1 was not hashed yet");
    }

    #[tokio::test]
    async fn the_cache_stays_within_its_bound() {
        let payload = payload(vec![1; 4096 * 50]);
        let encoder = Encoder::new(1, Workers::Inline);
        for chunk in 0..50 {
            encoder.encode(&payload, ChunkIndex(chunk), CodecId::Zstd).await.unwrap();
        }
        assert!(encoder.cache.weight() <= 1, "a cache too small for anything keeps nothing");
    }
}
