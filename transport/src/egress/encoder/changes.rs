//! Chunks as changes to a version that a receiver holds, once for all that hold it.

use super::{Encoded, Encoder, Key};
use crate::egress::{Payload, Stage, Wanted};
use bytes::Bytes;
use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};
use tensor_relay_device::SourceError;
use tensor_relay_protocol::{ChunkIndex, CodecId, Context, codec};

/// The codec of changes. It says by itself when a chunk changed too much: an update is half as long as its chunk at most.
const CODEC: CodecId = CodecId::Sparse;

impl Encoder {
    /// The bytes of `chunk` for the wire, for a receiver that holds `base`, a version with the same manifest: what changed
    /// since, where that is little, and what [`encode`](Self::encode) gives otherwise. The answer's
    /// [`codec`](Encoded::codec) says which ([`needs_base`](CodecId::needs_base)).
    ///
    /// All receivers with the same base wait for one comparison. It costs a read of the base, which is slices of memory or,
    /// on a device, a copy that is shared as those of other reads are. A base that cannot be read is no error.
    ///
    /// # Errors
    /// As [`encode`](Self::encode): never for the base.
    pub async fn encode_update(
        &self,
        payload: &Payload,
        chunk: ChunkIndex,
        base: Option<&Payload>,
        wanted: impl Into<Wanted>,
    ) -> Result<Encoded, Arc<SourceError>> {
        let wanted = wanted.into();
        let Some(base) = base.filter(|_| wanted.takes(CODEC)) else {
            return self.encode(payload, chunk, wanted).await;
        };
        let (changes, compared) = self.changes(payload, chunk, base).await?;
        let encoded = match changes {
            Some(changes) => changes,
            None => self.encode(payload, chunk, wanted).await?,
        };
        Ok(Encoded { spent: encoded.spent + compared, ..encoded })
    }

    /// What changed of `chunk` since `base`, `None` when that is too much, or the base cannot be read; and how long finding
    /// out took.
    async fn changes(
        &self,
        payload: &Payload,
        chunk: ChunkIndex,
        base: &Payload,
    ) -> Result<(Option<Encoded>, Duration), Arc<SourceError>> {
        let key = Key { payload: payload.key(), chunk, codec: CODEC, base: Some(base.key()) };
        if let Some(known) = self.cache.get(&key) {
            return Ok((known, Duration::ZERO));
        }
        // Read outside of the cache, where all who wait for a device hear of its failure at once, not in turns.
        let raw = self.raw(payload, chunk).await?;
        let Some(before) = self.before(base, chunk, &raw).await else {
            return Ok((None, Duration::ZERO));
        };
        let mut spent = Duration::ZERO; // By others, where they were first.
        let compare = async {
            let (changes, took) = self.compare(payload, chunk, &raw, before).await;
            spent = took;
            Ok::<_, Arc<SourceError>>(changes)
        };
        let changes = self.cache.get_or_insert_async(&key, compare).await?;
        Ok((changes, spent))
    }

    /// What the chunk was in `base`. What did not change, by its hash, need not be read again.
    async fn before(&self, base: &Payload, chunk: ChunkIndex, raw: &Encoded) -> Option<Bytes> {
        if base.hash(chunk) == Some(raw.hash) {
            return Some(raw.bytes.clone());
        }
        match self.raw(base, chunk).await {
            Ok(before) => Some(before.bytes),
            Err(error) => {
                tracing::info!(%chunk, %error, "A base cannot be read any more; the chunk goes whole.");
                None
            }
        }
    }

    async fn compare(
        &self,
        payload: &Payload,
        chunk: ChunkIndex,
        raw: &Encoded,
        before: Bytes,
    ) -> (Option<Encoded>, Duration) {
        let _comparing = self.stages.begin(Stage::Encode);
        let (_, dtype) = payload.manifest().chunk(chunk);
        let bytes = raw.bytes.clone();
        let comparing = self.workers.run(move || {
            let began = Instant::now();
            let mut out = vec![0; bytes.len() / 2];
            let context = Context { dtype, base: Some(&before) };
            let changes = codec(CODEC).encode(context, &bytes, &mut out).map(|written| {
                out.truncate(written);
                out.shrink_to_fit();
                Bytes::from(out)
            });
            (changes, began.elapsed())
        });
        let (changes, spent) = comparing.await;
        self.count_compared(raw.bytes.len(), changes.as_ref());
        let encoded = |bytes| Encoded { codec: CODEC, hash: raw.hash, bytes, spent: Duration::ZERO };
        (changes.map(encoded), spent)
    }

    fn count_compared(&self, raw_bytes: usize, changes: Option<&Bytes>) {
        let counters = &self.counters;
        counters.compared.fetch_add(1, Ordering::Relaxed);
        if let Some(changes) = changes {
            counters.updates.fetch_add(1, Ordering::Relaxed);
            counters.updated_bytes.fetch_add(raw_bytes as u64, Ordering::Relaxed);
            counters.update_bytes.fetch_add(changes.len() as u64, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Workers;
    use tensor_relay_device::{BoxFuture, HostSource, Source};
    use tensor_relay_protocol::{ChunkHash, Dtype, Limits, Manifest, Shape, TensorName, TensorSpec};

    const CHUNK_BYTES: usize = 4096;

    fn manifest(bytes: usize) -> Arc<Manifest> {
        let shape = Shape::new(&[bytes as u64]).unwrap();
        let spec = TensorSpec::new(TensorName::new("t").unwrap(), Dtype::U8, shape);
        Arc::new(Manifest::layout(vec![spec], vec![], CHUNK_BYTES as u32, &Limits::default()).unwrap())
    }

    fn payload(bytes: Vec<u8>) -> Payload {
        Payload::new(manifest(bytes.len()), Arc::new(HostSource::new(bytes.into())))
    }

    /// Bytes that no codec makes smaller by themselves.
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
    async fn those_with_one_base_share_one_comparison() {
        let (before, mut after) = (noise(2 * CHUNK_BYTES), noise(2 * CHUNK_BYTES));
        after[100] ^= 1;
        let (base, other, next) =
            (payload(before.clone()), payload(vec![9; 2 * CHUNK_BYTES]), payload(after.clone()));
        let encoder = Encoder::new(1 << 20, None, Workers::Inline);
        for _ in 0..10 {
            let changed = encoder
                .encode_update(&next, ChunkIndex(0), Some(&base), CodecId::Raw)
                .await
                .unwrap();
            assert!(changed.codec.needs_base() && changed.bytes.len() < 32, "{changed:?}");
            assert_eq!(decode(&changed, &before[..CHUNK_BYTES]), after[..CHUNK_BYTES]);
            let same = encoder
                .encode_update(&next, ChunkIndex(1), Some(&base), CodecId::Raw)
                .await
                .unwrap();
            assert_eq!(decode(&same, &before[CHUNK_BYTES..]), after[CHUNK_BYTES..]);
            let whole = encoder
                .encode_update(&next, ChunkIndex(0), Some(&other), CodecId::Raw)
                .await
                .unwrap();
            assert_eq!((whole.codec, &whole.bytes[..]), (CodecId::Raw, &after[..CHUNK_BYTES]));
        }
        let stats = encoder.stats();
        assert_eq!((stats.compared, stats.updates, stats.updated_bytes), (3, 2, 2 * CHUNK_BYTES as u64));
        assert!(stats.update_bytes < 64);
    }

    /// A source whose bytes are gone.
    #[derive(Debug)]
    struct Gone(u64);

    impl Source for Gone {
        fn len_bytes(&self) -> u64 {
            self.0
        }

        fn read(&self, range: std::ops::Range<u64>) -> BoxFuture<'_, Result<Bytes, SourceError>> {
            let error = SourceError::OutOfBounds { start: range.start, end: range.end, len_bytes: 0 };
            Box::pin(std::future::ready(Err(error)))
        }
    }

    #[tokio::test]
    async fn a_base_that_cannot_be_read_is_done_without() {
        let next = payload(noise(CHUNK_BYTES));
        let base = Payload::new(manifest(CHUNK_BYTES), Arc::new(Gone(CHUNK_BYTES as u64)));
        let encoder = Encoder::new(1 << 20, None, Workers::Inline);
        let whole = encoder
            .encode_update(&next, ChunkIndex(0), Some(&base), CodecId::Raw)
            .await
            .unwrap();
        assert_eq!((whole.codec, encoder.stats().compared), (CodecId::Raw, 0));
        // What is known to be the same need not be read.
        let hash = next.hash(ChunkIndex(0)).unwrap();
        base.set_hash(ChunkIndex(0), hash);
        let same = encoder
            .encode_update(&next, ChunkIndex(0), Some(&base), CodecId::Raw)
            .await
            .unwrap();
        assert!(same.codec.needs_base());
    }
}
