//! [`Reads`]: reads device sources, each chunk once for all subscribers.

use super::{
    Encoded, Payload,
    chunk_cache::{CacheOrder, ChunkCache, ChunkKey},
    read::read,
};
use crate::{
    Workers,
    stages::{Stage, Stages},
};
use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tensor_relay_device::{Capacity, CopyError, Lock, SlotPool, Source, SourceError};
use tensor_relay_protocol::{ChunkHash, ChunkIndex, CodecId};
use tokio::sync::watch;

/// The result of a read: the hashed chunk, or the error.
type Outcome = Result<Encoded, Arc<SourceError>>;

/// A cached outcome; `None` while the read runs.
type SharedOutcome = watch::Receiver<Option<Outcome>>;

/// Reads chunks of device sources. All callers share a running or cached read, and its error.
///
/// **Cache size**, for each device: the configured bytes, or half of its slots. Without configured bytes, no more than
/// eight slots while a single subscriber reads: 64 slots in turn cost a third of the rate, since no processor's cache holds
/// them (23 instead of 33 GB/s on an H200 with PCIe 5.0, without a network). Chunks are evicted in the order of
/// their first requests, and with their payload. A chunk counts at least the bytes of one slot, which it may hold.
///
/// **Bounded waits.** Cached chunks and chunks of slow subscribers hold slots. But a read hands out its slot only while
/// a quarter of the slots, and at least one, stays free; otherwise it copies the bytes to host memory and frees the
/// slot. Hence the last quarter is held only by running device copies, each of which has a deadline. By default, half
/// of the slots is for the cache, so another quarter remains for chunks in flight: enough for one subscriber without
/// host copies.
///
/// A read runs in a separate task, which holds the source. The read survives the cancellation of the subscription that
/// requested it first, so that others need not read again. If a device hangs, the copy may outlive its read; sources of
/// lent memory handle this.
#[derive(Debug)]
pub(super) struct Reads {
    limit_bytes: Option<u64>,
    workers: Workers,
    stages: Arc<Stages>,
    counters: Counters,
    devices: Lock<Vec<DeviceCache>>,
}

/// The cache of one device. The device is identified by its slots.
#[derive(Debug)]
struct DeviceCache {
    slots: SlotPool,
    cache: ChunkCache<SharedOutcome>,
}

/// Counters of device reads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct ReadStats {
    pub(super) requested: u64,
    pub(super) begun: u64,
    pub(super) repeated: u64,
    pub(super) cached_bytes: u64,
}

#[derive(Debug, Default)]
struct Counters {
    requested: AtomicU64,
    begun: AtomicU64,
    repeated: AtomicU64,
}

/// A running read. If it is dropped before its task runs, its fields are dropped in order, so the source is released
/// before waiting tasks are notified.
struct RunningRead {
    source: Arc<dyn Source>,
    range: Range<u64>,
    hash: Option<ChunkHash>,
    entry: Entry,
}

/// The cache entry of a running read. If it is dropped without an outcome, because the read panicked or its runtime
/// shuts down, waiting tasks get an error, and later callers read again.
struct Entry {
    reads: Arc<Reads>,
    key: ChunkKey,
    order: CacheOrder,
    slots: SlotPool,
    answer: watch::Sender<Option<Outcome>>,
    has_ended: bool,
}

impl Reads {
    /// Caches at most `limit_bytes` for each device; `None` for half of its slots.
    pub(super) fn new(limit_bytes: Option<u64>, workers: Workers, stages: Arc<Stages>) -> Self {
        Self { limit_bytes, workers, stages, counters: Counters::default(), devices: Lock::default() }
    }

    /// The raw bytes of `chunk`, whose source has `slots`, and their hash. Cancel safe: the read continues.
    pub(super) async fn get(
        self: &Arc<Self>,
        payload: &Payload,
        chunk: ChunkIndex,
        slots: &SlotPool,
    ) -> Result<Encoded, Arc<SourceError>> {
        self.counters.requested.fetch_add(1, Ordering::Relaxed);
        let mut answer = self.find_or_begin(payload, chunk, slots);
        let answered = answer.wait_for(Option::is_some).await.map(|outcome| outcome.clone());
        let Ok(Some(outcome)) = answered else {
            return Err(no_outcome()); // The read's task was dropped.
        };
        let encoded = outcome?;
        payload.handle_read(chunk, encoded.hash)?;
        Ok(encoded)
    }

    /// Drops the cached chunks of a dropped payload.
    pub(super) fn drop_payload(&self, payload: u64) {
        let mut devices = self.devices.lock();
        devices.iter_mut().for_each(|device| device.cache.drop_payload(payload));
        devices.retain(|device| !device.cache.is_empty());
    }

    pub(super) fn stats(&self) -> ReadStats {
        let Counters { requested, begun, repeated } = &self.counters;
        ReadStats {
            requested: requested.load(Ordering::Relaxed),
            begun: begun.load(Ordering::Relaxed),
            repeated: repeated.load(Ordering::Relaxed),
            cached_bytes: self.devices.lock().iter().map(|device| device.cache.bytes()).sum(),
        }
    }

    fn find_or_begin(
        self: &Arc<Self>,
        payload: &Payload,
        chunk: ChunkIndex,
        slots: &SlotPool,
    ) -> SharedOutcome {
        let key = ChunkKey { payload: payload.key(), chunk };
        let (reading, waiting) = {
            let mut devices = self.devices.lock();
            let cache = self.cache(&mut devices, slots);
            if let Some(answer) = cache.get(key) {
                return answer.clone();
            }
            let was_read = payload.mark_read(chunk);
            if was_read {
                cache.note_shared();
            }
            self.counters.repeated.fetch_add(was_read.into(), Ordering::Relaxed);
            let (answer, waiting) = watch::channel(None);
            let (range, _) = payload.manifest().chunk(chunk);
            let bytes = (range.end - range.start).max(slots.slot_bytes() as u64);
            let order = cache.begin(key, bytes, waiting.clone());
            let (source, hash, slots) =
                (Arc::clone(payload.source()), payload.reliable_hash(chunk), slots.clone());
            let entry = Entry { reads: Arc::clone(self), key, order, slots, answer, has_ended: false };
            (RunningRead { source, range, hash, entry }, waiting)
        };
        payload.register_reads(self);
        self.counters.begun.fetch_add(1, Ordering::Relaxed);
        tokio::spawn(Self::run(reading));
        waiting
    }

    async fn run(reading: RunningRead) {
        let RunningRead { entry, source, range, hash } = reading; // Dropped in reverse order: `source` before `entry`.
        let outcome = entry.reads.read(&*source, range, hash).await.map_err(Arc::new);
        // Released before waiting tasks are notified. If the copy timed out and still runs, it holds the lent memory
        // even when all sources are dropped.
        drop(source);
        entry.end(outcome);
    }

    async fn read(
        &self,
        source: &dyn Source,
        range: Range<u64>,
        hash: Option<ChunkHash>,
    ) -> Result<Encoded, SourceError> {
        let bytes = {
            let _reading = self.stages.begin(Stage::Read);
            read(source, range).await?
        };
        let hash = match hash {
            Some(hash) => hash,
            None => {
                let _hashing = self.stages.begin(Stage::Encode);
                self.stages.pass(bytes.len());
                let raw = bytes.clone();
                self.workers.run_over(raw.len(), move || ChunkHash::of(&raw)).await
            }
        };
        Ok(Encoded { codec: CodecId::Raw, hash, bytes, worker_time: Duration::ZERO })
    }

    /// The cache of the device with these slots, created if necessary.
    fn cache<'a>(
        &self,
        devices: &'a mut Vec<DeviceCache>,
        slots: &SlotPool,
    ) -> &'a mut ChunkCache<SharedOutcome> {
        let found = devices.iter().position(|device| device.slots.is(slots));
        let index = found.unwrap_or_else(|| {
            let half = half_of_slots(slots);
            let few = half.min(UNSHARED_SLOTS * slots.slot_bytes() as u64);
            let cache = ChunkCache::new(self.limit_bytes.unwrap_or(half), self.limit_bytes.unwrap_or(few));
            devices.push(DeviceCache { slots: slots.clone(), cache });
            devices.len() - 1
        });
        &mut devices[index].cache
    }
}

impl Entry {
    fn end(mut self, outcome: Outcome) {
        self.handle_end(outcome);
    }

    fn handle_end(&mut self, outcome: Outcome) {
        self.has_ended = true;
        {
            let mut devices = self.reads.devices.lock();
            if let Some(device) = devices.iter_mut().find(|device| device.slots.is(&self.slots)) {
                match &outcome {
                    Ok(_) => device.cache.handle_read(self.key, self.order),
                    Err(_) => device.cache.handle_failed(self.key, self.order),
                }
            }
            devices.retain(|device| !device.cache.is_empty());
        }
        self.answer.send_replace(Some(outcome));
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if !self.has_ended {
            self.handle_end(Err(no_outcome()));
        }
    }
}

/// The error for a read whose task ended without an outcome.
fn no_outcome() -> Arc<SourceError> {
    Arc::new(SourceError::Copy(CopyError::EngineStopped))
}

/// The slots that chunks may hold for further subscribers while there is one: as many as are in flight on a lane.
const UNSHARED_SLOTS: u64 = 8;

fn half_of_slots(slots: &SlotPool) -> u64 {
    let Capacity { slots, slot_bytes } = slots.capacity();
    slots as u64 / 2 * slot_bytes as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::egress::{Encoder, READ_TIMEOUT};
    use bytes::Bytes;
    use tensor_relay_device::{
        BoxFuture, CopyEngine, CopySegment, EngineSource, HostEngine, HostEngineMemory, HostMemory,
    };
    use tensor_relay_protocol::{Dtype, Limits, Manifest, RangeSet, Shape, TensorName, TensorSpec};
    use tokio::{sync::Semaphore, task::JoinSet};

    const CHUNK_BYTES: u32 = 1024;

    /// A device whose reads each wait for a permit, then fail or panic if that flag is set.
    #[derive(Debug)]
    struct Gated {
        source: EngineSource<HostEngine>,
        gate: Semaphore,
        fails: std::sync::atomic::AtomicBool,
        panics: std::sync::atomic::AtomicBool,
    }

    impl Gated {
        fn new(source: EngineSource<HostEngine>, reads: usize) -> Self {
            Self { source, gate: Semaphore::new(reads), fails: false.into(), panics: false.into() }
        }
    }

    impl Source for Gated {
        fn len_bytes(&self) -> u64 {
            self.source.len_bytes()
        }

        fn read(&self, range: Range<u64>) -> BoxFuture<'_, Result<Bytes, SourceError>> {
            Box::pin(async {
                self.gate.acquire().await.unwrap().forget();
                assert!(!self.panics.load(Ordering::Relaxed), "requested by the test");
                match self.fails.load(Ordering::Relaxed) {
                    true => Err(CopyError::EngineStopped.into()),
                    false => self.source.read(range).await,
                }
            })
        }

        fn may_change(&self) -> bool {
            true
        }

        fn slots(&self) -> Option<&SlotPool> {
            self.source.slots()
        }
    }

    /// A payload of `chunks` chunks on a device with `slots` slots and `reads` permits.
    fn on_device(chunks: u64, slots: usize, reads: usize) -> (Arc<Payload>, Arc<Gated>, SlotPool) {
        let engine = Arc::new(HostEngine::inline(HostMemory::new(1 << 20)));
        let memory: Arc<HostEngineMemory> = engine.allocate(chunks as usize * CHUNK_BYTES as usize).unwrap();
        let pool = engine.slots(Capacity { slots, slot_bytes: CHUNK_BYTES as usize }).unwrap();
        let source = EngineSource::new(engine, memory, pool.clone());
        let gated = Arc::new(Gated::new(source, reads));
        (Arc::new(payload_of(Arc::clone(&gated))), gated, pool)
    }

    fn payload_of(gated: Arc<Gated>) -> Payload {
        let shape = Shape::new(&[gated.len_bytes()]).unwrap();
        let spec = TensorSpec::new(TensorName::new("t").unwrap(), Dtype::U8, shape);
        let manifest = Manifest::layout(vec![spec], vec![], CHUNK_BYTES, &Limits::default()).unwrap();
        Payload::new(Arc::new(manifest), gated)
    }

    fn new_encoder(device_cache_bytes: Option<u64>) -> Arc<Encoder> {
        Arc::new(Encoder::new(1 << 20, device_cache_bytes, Workers::Inline))
    }

    /// Starts `count` concurrent requests of one chunk, and lets them run until they wait.
    async fn request(
        encoder: &Arc<Encoder>,
        payload: &Arc<Payload>,
        codec: CodecId,
        count: usize,
    ) -> JoinSet<Outcome> {
        let mut requests = JoinSet::new();
        for _ in 0..count {
            let (encoder, payload) = (Arc::clone(encoder), Arc::clone(payload));
            requests.spawn(async move { encoder.encode(&payload, ChunkIndex(0), codec).await });
        }
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
        requests
    }

    /// The numbers of requests, reads and repeated reads.
    fn counted(encoder: &Encoder) -> (u64, u64, u64) {
        let stats = encoder.stats();
        (stats.source_requests, stats.source_reads, stats.source_rereads)
    }

    #[tokio::test]
    async fn many_subscribers_share_one_read() {
        for cache_bytes in [None, Some(0)] {
            let (payload, gated, slots) = on_device(4, 8, 0);
            let encoder = new_encoder(cache_bytes);
            let requests = request(&encoder, &payload, CodecId::Raw, 20).await;
            gated.gate.add_permits(1);
            let chunks: Vec<_> = requests.join_all().await.into_iter().map(Result::unwrap).collect();
            assert!(chunks.iter().all(|one| one.bytes.as_ptr() == chunks[0].bytes.as_ptr()));
            assert_eq!(counted(&encoder), (20, 1, 0));
            assert_eq!(payload.unhashed(&RangeSet::from_range(0..1)), []);
            drop(chunks);
            assert_eq!(slots.available(), if cache_bytes.is_none() { 7 } else { 8 }, "{cache_bytes:?}");
        }
    }

    #[tokio::test]
    async fn device_memory_that_was_overwritten_is_refused_when_read_again() {
        let engine = Arc::new(HostEngine::inline(HostMemory::new(1 << 20)));
        let memory: Arc<HostEngineMemory> = engine.allocate(CHUNK_BYTES as usize).unwrap();
        let pool = engine.slots(Capacity { slots: 2, slot_bytes: CHUNK_BYTES as usize }).unwrap();
        let source = EngineSource::new(Arc::clone(&engine), Arc::clone(&memory), pool.clone());
        let payload = payload_of(Arc::new(Gated::new(source, 2)));
        let encoder = new_encoder(Some(0));
        encoder.encode(&payload, ChunkIndex(0), CodecId::Raw).await.unwrap();
        let mut slot = pool.acquire().await;
        slot[7] ^= 1;
        engine.copy_in(slot, vec![CopySegment::new(&memory, 0, 8)]).await.unwrap();
        let error = encoder.encode(&payload, ChunkIndex(0), CodecId::Raw).await.unwrap_err();
        assert!(matches!(*error, SourceError::Overwritten { start: 0, end: 1024 }), "{error}");
    }

    #[tokio::test]
    async fn a_read_survives_the_cancellation_of_its_first_caller() {
        let (payload, gated, _) = on_device(4, 8, 0);
        let encoder = new_encoder(None);
        let mut first = request(&encoder, &payload, CodecId::Raw, 1).await;
        let second = request(&encoder, &payload, CodecId::Raw, 1).await;
        first.abort_all();
        assert!(first.join_next().await.unwrap().is_err());
        gated.gate.add_permits(1);
        assert!(second.join_all().await[0].is_ok());
        assert_eq!(counted(&encoder), (2, 1, 0));
    }

    #[tokio::test]
    async fn a_failure_reaches_all_waiting_callers_and_later_ones_retry() {
        for codec in [CodecId::Raw, CodecId::Zstd] {
            let (payload, gated, _) = on_device(4, 8, 0);
            let encoder = new_encoder(None);
            gated.fails.store(true, Ordering::Relaxed);
            let requests = request(&encoder, &payload, codec, 5).await;
            gated.gate.add_permits(1);
            assert!(requests.join_all().await.iter().all(Result::is_err));
            gated.fails.store(false, Ordering::Relaxed);
            gated.gate.add_permits(1);
            assert!(request(&encoder, &payload, codec, 1).await.join_all().await[0].is_ok());
            assert_eq!(counted(&encoder), (6, 2, 1));
        }
    }

    #[tokio::test]
    async fn a_panic_reaches_all_waiting_callers_and_later_ones_retry() {
        for codec in [CodecId::Raw, CodecId::Zstd] {
            let (payload, gated, _) = on_device(4, 8, 0);
            let encoder = new_encoder(None);
            gated.panics.store(true, Ordering::Relaxed);
            let requests = request(&encoder, &payload, codec, 5).await;
            gated.gate.add_permits(1);
            for outcome in requests.join_all().await {
                let error = outcome.unwrap_err();
                assert!(matches!(*error, SourceError::Copy(CopyError::EngineStopped)), "{error}");
            }
            assert_eq!(encoder.stats().source_cached_bytes, 0);
            gated.panics.store(false, Ordering::Relaxed);
            gated.gate.add_permits(1);
            assert!(request(&encoder, &payload, codec, 1).await.join_all().await[0].is_ok());
            assert_eq!(counted(&encoder), (6, 2, 1));
        }
    }

    #[tokio::test]
    async fn half_of_the_slots_are_cached_and_the_oldest_evicted_first() {
        let (payload, _, slots) = on_device(20, 8, 100);
        let encoder = new_encoder(None);
        let read_chunk =
            async |chunk| encoder.encode(&payload, ChunkIndex(chunk), CodecId::Raw).await.unwrap();
        for chunk in 0..20 {
            read_chunk(chunk).await;
        }
        assert_eq!((slots.available(), encoder.stats().source_cached_bytes), (4, 4096));
        for chunk in 16..20 {
            read_chunk(chunk).await;
        }
        assert_eq!(counted(&encoder), (24, 20, 0));
        read_chunk(0).await;
        assert_eq!(counted(&encoder), (25, 21, 1));
    }

    #[tokio::test]
    async fn cached_chunks_are_dropped_with_their_payload() {
        let (payload, _, slots) = on_device(4, 8, 100);
        let encoder = new_encoder(None);
        encoder.encode(&payload, ChunkIndex(1), CodecId::Raw).await.unwrap();
        assert_eq!(slots.available(), 7);
        drop(payload);
        assert_eq!((slots.available(), encoder.stats().source_cached_bytes), (8, 0));
    }

    /// Goal: slots become free for any cache size and any slow subscriber. Method: an unbounded cache, and a caller
    /// that holds all chunks.
    #[tokio::test]
    async fn slots_become_free_for_any_cache_size() {
        for slots in 1..10 {
            let (payload, _, pool) = on_device(30, slots, 100);
            let encoder = new_encoder(Some(u64::MAX));
            let mut held = Vec::new();
            for chunk in 0..30 {
                held.push(encoder.encode(&payload, ChunkIndex(chunk), CodecId::Raw).await.unwrap());
            }
            assert_eq!(pool.available(), (slots / 4).max(1));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_read_of_a_hung_device_times_out() {
        let (payload, _gated, _) = on_device(4, 8, 0);
        let encoder = new_encoder(None);
        let began = tokio::time::Instant::now();
        let requests = request(&encoder, &payload, CodecId::Raw, 3).await;
        for outcome in requests.join_all().await {
            let error = outcome.unwrap_err();
            assert!(
                matches!(*error, SourceError::TimedOut { asked_bytes: 1024, waited_ms: 25_000 }),
                "{error}"
            );
        }
        assert_eq!(began.elapsed(), READ_TIMEOUT);
    }

    /// Goal: lent device memory is released when its read ends, not before. Method: cancel a reader during its read.
    #[tokio::test]
    async fn a_read_holds_its_source_until_it_ends() {
        let (payload, gated, _) = on_device(4, 8, 0);
        let encoder = new_encoder(None);
        request(&encoder, &payload, CodecId::Raw, 1).await.shutdown().await;
        drop(payload);
        assert_eq!(Arc::strong_count(&gated), 2, "held by the running read");
        gated.gate.add_permits(1);
        while Arc::strong_count(&gated) > 1 {
            tokio::task::yield_now().await;
        }
        assert_eq!(encoder.stats().source_cached_bytes, 0, "chunks of a dropped payload are not cached");
    }
}
