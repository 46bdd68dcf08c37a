//! Ordering with callers' streams: the engine waits for the streams' work, and the streams wait for the engine's
//! copies.

use std::{sync::Arc, time::Duration};

use cudarc::driver::sys::{CUresult, CUstream};
use tensor_relay_device::{
    CopyEngine, CopyError, CopySegment,
    cuda::{CudaEngine, CudaMemory, Fence, StreamHandle, all_closed},
};
use tensor_relay_tests::fake_cuda::{Direction, Effect, FakeCuda, Fault, Turn};
use tokio::time::timeout;

use crate::{
    calls::{Block, Current, PageLocked, call, create_stream},
    endpoint::{CHUNK, Endpoint, LEN, pattern, short_timeouts, wait_for_no_objects},
    machine,
};

/// The handle of a stream of this test.
pub(crate) fn handle(stream: CUstream) -> StreamHandle {
    // SAFETY: the test's streams live as long as the test.
    unsafe { StreamHandle::from_raw(stream.cast(), ()) }.expect("the stream is not a default stream")
}

/// Lends memory, like a caller of the library.
fn lend(engine: &CudaEngine, memory: &Arc<CudaMemory>, after: Fence) -> Arc<CudaMemory> {
    // SAFETY: the owner is the memory itself, and the work that writes to it is before the fence.
    unsafe { engine.lend(memory.address(), CHUNK, memory.clone(), Some(after)) }
}

/// Waits until the engine has polled its fence five more times. By then, a copy that starts too early is in flight.
fn wait_for_polls(fake: &Turn) {
    let polls = |fake: &FakeCuda| fake.calls().get("cuEventQuery").copied().unwrap_or(0);
    let before = polls(fake);
    fake.wait_until("the engine has polled a fence five times", |fake| polls(fake) >= before + 5);
}

#[tokio::test]
async fn a_copy_waits_for_the_producers_stream_and_reads_the_new_bytes() {
    let fake = machine();
    let endpoint = Endpoint::open(0, short_timeouts()).unwrap();
    endpoint.fill(&pattern(LEN)).await.unwrap();
    let current = Current::new(0);
    let producer = create_stream();
    let block = Block::in_stream(producer);
    call!(cuMemsetD8Async(endpoint.memory.address(), 0x22, CHUNK, producer)).unwrap();
    let fence = endpoint.engine.fence(handle(producer)).unwrap();
    let memory = lend(&endpoint.engine, &endpoint.memory, fence.clone());

    let slot = endpoint.slots.acquire().await;
    let copying = endpoint.engine.copy_out(vec![CopySegment::new(&memory, 0, CHUNK)], slot);
    wait_for_polls(&fake);
    assert_eq!(fake.engine(0, Direction::DeviceToHost).in_flight, 0, "the copy has not begun");
    assert_eq!(fence.verdict(), None);
    block.lift();
    let slot = copying.await.unwrap();
    assert!(slot.iter().all(|byte| *byte == 0x22), "the bytes were written by the stream");
    fence.passed().await.unwrap();

    call!(cuStreamDestroy_v2(producer)).unwrap();
    drop((current, slot, memory, fence, endpoint));
    wait_for_no_objects(&fake, 0).await;
    assert_eq!(fake.violations(), [""; 0]);
}

#[tokio::test]
async fn a_stream_that_does_not_finish_in_time_fails_the_copy() {
    let fake = machine();
    let endpoint = Endpoint::open(0, short_timeouts()).unwrap();
    let current = Current::new(0);
    let producer = create_stream();
    let block = Block::in_stream(producer);
    let memory = lend(&endpoint.engine, &endpoint.memory, endpoint.engine.fence(handle(producer)).unwrap());
    let slot = endpoint.slots.acquire().await;
    let copying = endpoint.engine.copy_out(vec![CopySegment::new(&memory, 0, CHUNK)], slot);
    let failure = timeout(Duration::from_secs(5), copying)
        .await
        .expect("the copy has a deadline")
        .unwrap_err();
    assert!(matches!(failure, CopyError::FenceTimedOut { .. }), "{failure:?}");
    assert_eq!(endpoint.slots.available(), 4);

    // The next copy succeeds once the stream has done its work.
    block.lift();
    let slot = endpoint.slots.acquire().await;
    endpoint
        .engine
        .copy_out(vec![CopySegment::new(&memory, 0, CHUNK)], slot)
        .await
        .unwrap();
    call!(cuStreamDestroy_v2(producer)).unwrap();
    drop((current, memory, endpoint));
    wait_for_no_objects(&fake, 0).await;
    assert_eq!(fake.violations(), [""; 0]);
}

#[tokio::test]
async fn the_consumers_stream_waits_for_the_copy_without_blocking_its_thread() {
    let fake = machine();
    let endpoint = Endpoint::open(0, short_timeouts()).unwrap();
    endpoint.fill(&vec![0; LEN]).await.unwrap();
    let current = Current::new(0);
    let (consumer, host) = (create_stream(), PageLocked::new(0, CHUNK));

    let gate = fake.hold(0, Direction::HostToDevice);
    let mut slot = endpoint.slots.acquire().await;
    slot.fill(0x33);
    let copying = endpoint
        .engine
        .copy_in(slot, vec![CopySegment::new(&endpoint.memory, 0, CHUNK)]);
    endpoint.memory.wait_on(handle(consumer)).unwrap();
    call!(cuMemcpyDtoHAsync_v2(host.address(), endpoint.memory.address(), CHUNK, consumer)).unwrap();
    gate.until_waiting(1);
    assert_eq!(call!(cuStreamQuery(consumer)), Err(CUresult::CUDA_ERROR_NOT_READY));
    drop(gate);
    call!(cuStreamSynchronize(consumer)).unwrap();
    assert!(host.read().iter().all(|byte| *byte == 0x33), "the stream read the new bytes");

    drop(copying.await.unwrap());
    host.free().unwrap();
    call!(cuStreamDestroy_v2(consumer)).unwrap();
    drop((current, endpoint));
    wait_for_no_objects(&fake, 0).await;
    assert_eq!(fake.violations(), [""; 0]);
}

#[tokio::test]
async fn memory_is_not_written_while_the_consumers_stream_uses_it() {
    let fake = machine();
    let endpoint = Endpoint::open(0, short_timeouts()).unwrap();
    endpoint.fill(&vec![0x44; LEN]).await.unwrap();
    let current = Current::new(0);
    let (consumer, host) = (create_stream(), PageLocked::new(0, CHUNK));
    let block = Block::in_stream(consumer);
    call!(cuMemcpyDtoHAsync_v2(host.address(), endpoint.memory.address(), CHUNK, consumer)).unwrap();
    endpoint.memory.record_use(handle(consumer)).unwrap();

    let mut slot = endpoint.slots.acquire().await;
    slot.fill(0x55);
    let copying = endpoint
        .engine
        .copy_in(slot, vec![CopySegment::new(&endpoint.memory, 0, CHUNK)]);
    wait_for_polls(&fake);
    assert_eq!(fake.engine(0, Direction::HostToDevice).in_flight, 0, "the next version waits");
    block.lift();
    drop(copying.await.unwrap());
    call!(cuStreamSynchronize(consumer)).unwrap();
    assert!(host.read().iter().all(|byte| *byte == 0x44), "the stream read the old bytes");

    host.free().unwrap();
    call!(cuStreamDestroy_v2(consumer)).unwrap();
    drop((current, endpoint));
    wait_for_no_objects(&fake, 0).await;
    assert_eq!(fake.violations(), [""; 0]);
}

#[tokio::test]
async fn memory_that_a_stream_uses_is_not_reused() {
    let fake = machine();
    let endpoint = Endpoint::open(0, short_timeouts()).unwrap();
    let current = Current::new(0);
    let consumer = create_stream();
    let block = Block::in_stream(consumer);
    let address = endpoint.memory.address();
    let Endpoint { engine, slots, memory } = endpoint;
    memory.record_use(handle(consumer)).unwrap();
    drop(memory);
    let next = engine.allocate(LEN).unwrap();
    assert_ne!(next.address(), address);
    block.lift();
    fake.wait_until("the memory is back for reuse", |_| engine.stats().cached_bytes > 0);
    assert_eq!(engine.allocate(LEN).unwrap().address(), address);

    call!(cuStreamDestroy_v2(consumer)).unwrap();
    drop((current, next, slots, engine));
    wait_for_no_objects(&fake, 0).await;
    assert_eq!(fake.violations(), [""; 0]);
}

#[tokio::test]
async fn released_memory_waits_for_its_readers_without_blocking() {
    let fake = machine();
    let Endpoint { engine, slots, memory } = Endpoint::open(0, short_timeouts()).unwrap();
    let current = Current::new(0);
    let (first, second) = (create_stream(), create_stream());
    let blocks = [Block::in_stream(first), Block::in_stream(second)];
    let (address, kept) = (memory.address(), Arc::new(()));
    let readers = [first, second].map(|stream| {
        // SAFETY: the streams live as long as the test.
        unsafe { StreamHandle::from_raw(stream.cast(), Arc::clone(&kept)) }.unwrap()
    });
    memory.release_after(readers.into());
    // When the engine's thread has answered this allocation, it has handled `release_after`. When it has answered the
    // next one, it has also handled the commands that it sent itself for `ReleaseAfter`.
    let small = engine.allocate(1).unwrap();
    let next = engine.allocate(LEN).unwrap();
    assert_ne!(next.address(), address);
    assert_eq!(Arc::strong_count(&kept), 1, "the streams are not needed any more");
    for block in blocks {
        assert_eq!(engine.stats().cached_bytes, 0);
        block.lift();
    }
    fake.wait_until("the memory is back for reuse", |_| engine.stats().cached_bytes > 0);

    call!(cuStreamDestroy_v2(first)).unwrap();
    call!(cuStreamDestroy_v2(second)).unwrap();
    drop((current, small, next, slots, engine));
    wait_for_no_objects(&fake, 0).await;
    assert_eq!(fake.violations(), [""; 0]);
}

#[tokio::test]
async fn memory_is_leaked_if_its_readers_cannot_be_observed() {
    let fake = machine();
    let Endpoint { engine, slots, memory } = Endpoint::open(0, short_timeouts()).unwrap();
    let current = Current::new(0);
    let reader = create_stream();
    fake.fault(&Fault::once("cuEventRecord", 1, Effect::Fail(999)));
    memory.release_after(vec![handle(reader)]);
    fake.wait_until("the memory is leaked", |_| engine.stats().leaked_bytes >= LEN as u64);
    assert_eq!(engine.stats().cached_bytes, 0);
    call!(cuStreamDestroy_v2(reader)).unwrap();
    drop((current, slots, engine));
    assert_eq!(fake.violations(), [""; 0]);
}

/// Goal: lent memory whose end of use cannot be observed stays with the engine, which reports it. Method: the event of
/// its reader cannot be recorded.
#[tokio::test]
async fn lent_memory_is_leaked_if_its_readers_cannot_be_observed() {
    let fake = machine();
    let Endpoint { engine, slots, memory } = Endpoint::open(0, short_timeouts()).unwrap();
    let current = Current::new(0);
    let reader = create_stream();
    let owner = Arc::new(());
    // SAFETY: nothing accesses the memory.
    let lent = unsafe { engine.lend(memory.address(), CHUNK, Arc::clone(&owner), None) };
    fake.fault(&Fault::once("cuEventRecord", 1, Effect::Fail(999)));
    lent.release_after(vec![handle(reader)]);
    fake.wait_until("the memory is leaked", |_| engine.stats().leaked_bytes == CHUNK as u64);
    assert_eq!(Arc::strong_count(&owner), 2);
    call!(cuStreamDestroy_v2(reader)).unwrap();
    drop((current, memory, slots, engine));
    assert_eq!(fake.violations(), [""; 0]);
}

/// Once the engine's thread has ended, the end of a stream's work cannot be observed.
#[tokio::test]
async fn lent_memory_is_leaked_if_its_readers_outlive_the_engine() {
    let fake = machine();
    let Endpoint { engine, slots, memory } = Endpoint::open(0, short_timeouts()).unwrap();
    let current = Current::new(0);
    let reader = create_stream();
    let (used, unused) = (Arc::new(()), Arc::new(()));
    let [lent, unread] = [&used, &unused].map(|owner| {
        // SAFETY: nothing accesses the memory.
        unsafe { engine.lend(memory.address(), CHUNK, Arc::clone(owner), None) }
    });
    drop((memory, slots, engine));
    assert!(all_closed(Duration::from_secs(10)), "the engine's thread ends");
    lent.release_after(vec![handle(reader)]);
    unread.release_after(vec![]);
    assert_eq!([Arc::strong_count(&used), Arc::strong_count(&unused)], [2, 1]);
    call!(cuStreamDestroy_v2(reader)).unwrap();
    drop(current);
    assert_eq!(fake.violations(), [""; 0]);
}

/// As with DLPack: the producer makes the engine's intake stream wait for its work.
#[tokio::test]
async fn a_copy_waits_for_events_of_the_intake_stream() {
    let fake = machine();
    let endpoint = Endpoint::open(0, short_timeouts()).unwrap();
    endpoint.fill(&pattern(LEN)).await.unwrap();
    let current = Current::new(0);
    let producer = create_stream();
    let block = Block::in_stream(producer);
    call!(cuMemsetD8Async(endpoint.memory.address(), 0x22, CHUNK, producer)).unwrap();
    let intake = endpoint.engine.intake().unwrap();
    assert_eq!(endpoint.engine.intake().unwrap(), intake, "there is one intake stream");
    let intake: CUstream = std::ptr::with_exposed_provenance_mut(intake);
    let mut event = std::ptr::null_mut();
    call!(cuEventCreate(&mut event, 2)).unwrap();
    call!(cuEventRecord(event, producer)).unwrap();
    call!(cuStreamWaitEvent(intake, event, 0)).unwrap();
    call!(cuEventDestroy_v2(event)).unwrap();
    let memory = lend(&endpoint.engine, &endpoint.memory, endpoint.engine.fence_intake().unwrap());

    let slot = endpoint.slots.acquire().await;
    let copying = endpoint.engine.copy_out(vec![CopySegment::new(&memory, 0, CHUNK)], slot);
    wait_for_polls(&fake);
    assert_eq!(fake.engine(0, Direction::DeviceToHost).in_flight, 0, "the copy has not begun");
    block.lift();
    let slot = copying.await.unwrap();
    assert!(slot.iter().all(|byte| *byte == 0x22), "the bytes were written by the producer");

    call!(cuStreamDestroy_v2(producer)).unwrap();
    drop((current, slot, memory, endpoint));
    wait_for_no_objects(&fake, 0).await;
    assert_eq!(fake.violations(), [""; 0]);
}
