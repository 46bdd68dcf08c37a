//! An engine with memory for one tensor, and a transfer from one such endpoint to another, with fences and callers'
//! streams, for the sweep. Also contains the helpers of all tests.

use std::{error::Error, sync::Arc, time::Duration};

use tensor_relay_device::{
    Capacity, CopyEngine, EngineSink, EngineSource, Sink, SlotPool, Source,
    cuda::{CudaEngine, CudaMemory, CudaOptions, CudaStats, StreamHandle},
};
use tensor_relay_tests::fake_cuda::{FakeCuda, Live};
use tokio::time::{Instant, sleep};

/// Any error that a caller of the library can get.
pub(crate) type Failure = Box<dyn Error + Send + Sync>;

/// The length of the tensor in bytes: not a multiple of a chunk or page.
pub(crate) const LEN: usize = 5 * CHUNK + 17;
/// The length of a chunk, and of a slot, in bytes.
pub(crate) const CHUNK: usize = 40 << 10;

/// Options with short timeouts.
pub(crate) fn short_timeouts() -> CudaOptions {
    CudaOptions {
        memory_limit_bytes: Some(16 << 20),
        copy_timeout: Duration::from_millis(400),
        fence_timeout: Duration::from_millis(400),
        answer_timeout: Duration::from_millis(400),
    }
}

/// Bytes that reveal shifted or swapped parts.
pub(crate) fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| ((i * 31) ^ (i >> 8) ^ (i >> 16)) as u8).collect()
}

/// An engine with slots, and with memory for the tensor.
pub(crate) struct Endpoint {
    pub(crate) engine: Arc<CudaEngine>,
    pub(crate) slots: SlotPool,
    pub(crate) memory: Arc<CudaMemory>,
}

impl Endpoint {
    pub(crate) fn open(ordinal: usize, options: CudaOptions) -> Result<Self, Failure> {
        Self::of(CudaEngine::open(ordinal, options)?)
    }

    pub(crate) fn of(engine: Arc<CudaEngine>) -> Result<Self, Failure> {
        let slots = engine.slots(Capacity { slots: 4, slot_bytes: CHUNK })?;
        let memory = engine.allocate(LEN)?;
        Ok(Self { engine, slots, memory })
    }

    pub(crate) fn source(&self) -> EngineSource<CudaEngine> {
        EngineSource::new(self.engine.clone(), self.memory.clone(), self.slots.clone())
    }

    pub(crate) fn sink(&self) -> EngineSink {
        EngineSink::new(self.engine.clone(), self.memory.clone(), self.slots.clone())
    }

    /// Writes bytes to the memory.
    pub(crate) async fn fill(&self, bytes: &[u8]) -> Result<(), Failure> {
        let sink = self.sink();
        for (index, chunk) in bytes.chunks(CHUNK).enumerate() {
            put(&sink, index, chunk).await?;
        }
        Ok(())
    }

    /// Reads the memory.
    pub(crate) async fn read(&self) -> Result<Vec<u8>, Failure> {
        let source = self.source();
        let mut all = Vec::new();
        let len = self.memory.len_bytes();
        for start in (0..len).step_by(CHUNK) {
            all.extend_from_slice(&source.read(start..(start + CHUNK as u64).min(len)).await?);
        }
        Ok(all)
    }
}

async fn put(sink: &impl Sink, index: usize, chunk: &[u8]) -> Result<(), Failure> {
    let start = (index * CHUNK) as u64;
    let mut target = sink.open(start..start + chunk.len() as u64).await?;
    target.copy_from_slice(chunk);
    Ok(sink.write(target).await?)
}

/// Writes a tensor to the first device, lends it after a fence, copies it to the second device, orders a stream there
/// after the copies, and reads the tensor back. Returns the bytes read. The engines are added to `engines`, so that
/// they survive a failure.
pub(crate) async fn move_a_tensor(engines: &mut Vec<Arc<CudaEngine>>) -> Result<Vec<u8>, Failure> {
    let from = open(0, engines)?;
    from.fill(&pattern(LEN)).await?;
    from.memory.wait_on(StreamHandle::LEGACY)?;
    let lent = lend(&from)?;
    let to = open(1, engines)?;

    let source = EngineSource::new(from.engine.clone(), lent, from.slots.clone());
    let sink = to.sink();
    // Three chunks at a time, so that reads and writes are in flight together.
    tokio::try_join!(
        copy_from(&source, &sink, 0),
        copy_from(&source, &sink, 1),
        copy_from(&source, &sink, 2)
    )?;
    to.memory.wait_on(StreamHandle::LEGACY)?;
    to.memory.record_use(StreamHandle::LEGACY)?;
    to.read().await
}

/// Copies every third chunk, starting with the chunk of index `first`.
async fn copy_from(source: &impl Source, sink: &impl Sink, first: usize) -> Result<(), Failure> {
    for index in (first..LEN.div_ceil(CHUNK)).step_by(3) {
        let start = (index * CHUNK) as u64;
        let bytes = source.read(start..(start + CHUNK as u64).min(LEN as u64)).await?;
        put(sink, index, &bytes).await?;
    }
    Ok(())
}

fn open(ordinal: usize, engines: &mut Vec<Arc<CudaEngine>>) -> Result<Endpoint, Failure> {
    let engine = CudaEngine::open(ordinal, short_timeouts())?;
    engines.push(engine.clone());
    Endpoint::of(engine)
}

/// Lends the memory of `endpoint`, like a caller of the library.
fn lend(endpoint: &Endpoint) -> Result<Arc<CudaMemory>, Failure> {
    let fence = endpoint.engine.fence(StreamHandle::LEGACY)?;
    let owner = endpoint.memory.clone();
    // SAFETY: the owner is the memory itself, nobody else writes to it, and earlier work that did is before the fence.
    Ok(unsafe { endpoint.engine.lend(owner.address(), LEN, owner, Some(fence)) })
}

/// Waits until an engine has freed or cached all memory that it can, and returns its counters.
pub(crate) async fn wait_until_freed(fake: &FakeCuda, engine: &CudaEngine) -> CudaStats {
    let begun = Instant::now();
    loop {
        let stats = engine.stats();
        // A leaked slot keeps its whole pool allocated.
        let is_freed = stats.leaked_bytes > 0 || (stats.device_bytes == 0 && stats.pinned_bytes == 0);
        if is_freed && fake.live().in_flight == 0 {
            return stats;
        }
        assert!(begun.elapsed() < Duration::from_secs(5), "memory is not freed: {stats:?} {:?}", fake.live());
        sleep(Duration::from_millis(1)).await;
    }
}

/// Waits until no driver objects remain. Up to `reclaimed` objects may have been destroyed together with their context.
pub(crate) async fn wait_for_no_objects(fake: &FakeCuda, reclaimed: u64) {
    let begun = Instant::now();
    loop {
        let live = fake.live();
        if live.reclaimed <= reclaimed && (Live { reclaimed: 0, ..live }) == Live::default() {
            return;
        }
        assert!(begun.elapsed() < Duration::from_secs(5), "driver objects remain: {live:?}");
        sleep(Duration::from_millis(1)).await;
    }
}

/// Waits until at most `leaked_bytes` of memory remain: the threads of dropped engines free memory asynchronously.
pub(crate) async fn wait_for_at_most(fake: &FakeCuda, leaked_bytes: u64) {
    let begun = Instant::now();
    loop {
        let live = fake.live();
        if live.device_bytes + live.host_bytes <= leaked_bytes {
            return;
        }
        assert!(begun.elapsed() < Duration::from_secs(5), "{live:?} is more than {leaked_bytes} bytes");
        sleep(Duration::from_millis(1)).await;
    }
}
