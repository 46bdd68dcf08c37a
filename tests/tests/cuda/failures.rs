//! Devices that fail as a whole: by an error elsewhere in the process, by a hang, or because their context is
//! destroyed.

use std::time::Duration;

use tensor_relay_device::{
    AllocError, CopyEngine, CopyError, CopySegment, Copying, Slot,
    cuda::{CudaEngine, CudaError, CudaOptions, StreamHandle},
};
use tensor_relay_tests::fake_cuda::{Direction, Effect, Fault, Live, Turn};
use tokio::time::timeout;

use crate::{
    calls::{Block, Current, stream},
    journey::{CHUNK, End, LEN, pattern, short_timeouts, wait_for_no_objects},
    machine,
    order::handle,
};

/// Waits for the result of a copy, with a deadline.
async fn end_of(copying: Copying) -> Result<Slot, CopyError> {
    timeout(Duration::from_secs(5), copying)
        .await
        .expect("a copy completes, whatever its device does")
}

async fn read_a_chunk(end: &End) -> Copying {
    let slot = timeout(Duration::from_secs(5), end.slots.acquire())
        .await
        .expect("a slot is free");
    end.engine.copy_out(vec![CopySegment::new(&end.memory, 0, CHUNK)], slot)
}

#[tokio::test]
async fn a_corrupted_context_fails_everything_in_time() {
    let fake = machine();
    let (end, other) = (End::open(0, short_timeouts()).unwrap(), End::open(1, short_timeouts()).unwrap());
    let gate = fake.hold(0, Direction::DeviceToHost);
    let copies = [read_a_chunk(&end).await, read_a_chunk(&end).await];
    gate.until_waiting(2);
    fake.fail_device(0, 700);
    for copy in copies {
        let failure = end_of(copy).await.unwrap_err();
        assert!(matches!(failure, CopyError::DeviceFailed { .. }), "{failure:?}");
        let text = format!("{:?}", messages(&failure));
        assert!(text.contains("cuda:0") && text.contains("700"), "{text}");
    }
    drop(gate);
    // Later copies fail at once with the same error; their slots are available.
    for _ in 0..6 {
        assert!(matches!(end_of(read_a_chunk(&end).await).await, Err(CopyError::DeviceFailed { .. })));
    }
    assert!(matches!(end.engine.allocate(100), Err(AllocError::Device { .. })));
    assert_eq!(end.engine.stats().copies_leaked, 2);
    // The other device is unaffected.
    other.fill(&pattern(LEN)).await.unwrap();
    assert!(other.read().await.unwrap() == pattern(LEN));
    assert_eq!(fake.violations(), [""; 0]);
}

/// Waits until the engine reports that its device failed, and checks that all later requests fail.
async fn check_failed(fake: &Turn, end: &End) {
    fake.wait_until("the engine declares the device failed", |_| end.engine.failure().is_some());
    let failure = end.engine.failure().expect("the device failed").to_string();
    assert!(failure.contains("700"), "{failure}");
    for _ in 0..6 {
        assert!(matches!(end_of(read_a_chunk(end).await).await, Err(CopyError::DeviceFailed { .. })));
    }
    assert!(matches!(end.memory.wait_on(StreamHandle::LEGACY), Err(CudaError::Driver(_))));
    assert!(matches!(end.memory.record_use(StreamHandle::LEGACY), Err(CudaError::Driver(_))));
    assert_eq!(end.engine.stats().copies_leaked, 0, "nothing was in flight");
    assert_eq!(fake.violations(), [""; 0]);
}

#[tokio::test]
async fn a_context_corrupted_between_copies_fails_the_next_copy() {
    let fake = machine();
    let end = End::open(0, short_timeouts()).unwrap();
    end.fill(&pattern(LEN)).await.unwrap();
    assert_eq!(end.engine.stats().copies_in_flight, 0);
    fake.fail_device(0, 700);
    end_of(read_a_chunk(&end).await).await.unwrap_err();
    check_failed(&fake, &end).await;
}

#[tokio::test]
async fn a_context_corrupted_between_copies_fails_a_fence() {
    let fake = machine();
    let end = End::open(0, short_timeouts()).unwrap();
    let current = Current::new(0);
    let producer = stream();
    let block = Block::in_stream(producer);
    let fence = end.engine.fence(handle(producer)).unwrap();
    fake.fail_device(0, 700);
    let passed = timeout(Duration::from_secs(5), fence.passed()).await;
    passed.expect("a fence completes, whatever its device does").unwrap_err();
    check_failed(&fake, &end).await;
    assert!(matches!(fence.wait_on(StreamHandle::LEGACY), Err(CudaError::Driver(_))));
    block.lift();
    drop(current);
}

#[tokio::test]
async fn a_refused_copy_does_not_fail_its_device() {
    let fake = machine();
    let end = End::open(0, short_timeouts()).unwrap();
    end.fill(&pattern(LEN)).await.unwrap();
    fake.fault(&Fault::once("cuMemcpyDtoHAsync_v2", 1, Effect::Fail(700)));
    let failure = end_of(read_a_chunk(&end).await).await.unwrap_err();
    assert!(matches!(failure, CopyError::Refused { .. }), "{failure:?}");
    assert!(end.read().await.unwrap() == pattern(LEN));
    assert_eq!(end.engine.failure(), None);
    assert_eq!(fake.violations(), [""; 0]);
}

/// The messages of an error and of its sources.
fn messages(error: &dyn std::error::Error) -> Vec<String> {
    std::iter::successors(Some(error), |error| error.source())
        .map(ToString::to_string)
        .collect()
}

#[tokio::test]
async fn a_destroyed_context_leaves_slots_readable() {
    let fake = machine();
    let end = End::open(0, short_timeouts()).unwrap();
    end.fill(&pattern(LEN)).await.unwrap();
    let copied = end_of(read_a_chunk(&end).await).await.unwrap();
    let gate = fake.hold(0, Direction::DeviceToHost);
    let copy = read_a_chunk(&end).await;
    gate.until_waiting(1);
    fake.destroy_context(0);
    let failure = end_of(copy).await.unwrap_err();
    assert!(matches!(failure, CopyError::DeviceFailed { .. }), "{failure:?}");
    assert!(copied[..] == pattern(LEN)[..CHUNK], "a slot that a reader still holds is unchanged");
    assert!(matches!(end_of(read_a_chunk(&end).await).await, Err(CopyError::DeviceFailed { .. })));
    drop((gate, copied, end));
    assert_eq!(fake.violations(), [""; 0]);
    // The device can be opened again.
    let again = End::open(0, short_timeouts()).unwrap();
    again.fill(&pattern(LEN)).await.unwrap();
    assert!(again.read().await.unwrap() == pattern(LEN));
}

#[tokio::test]
async fn a_late_copy_is_in_quarantine_until_it_has_ended() {
    let fake = machine();
    let end = End::open(0, short_timeouts()).unwrap();
    end.fill(&pattern(LEN)).await.unwrap();
    fake.fault(&Fault::once("@dtoh", 1, Effect::Hang));
    let failure = end_of(read_a_chunk(&end).await).await.unwrap_err();
    assert!(matches!(failure, CopyError::TimedOut { .. }), "{failure:?}");
    let stats = end.engine.stats();
    assert_eq!(
        (stats.copies_quarantined, stats.quarantined_bytes, stats.copies_in_flight),
        (1, CHUNK as u64, 1)
    );
    assert_eq!(end.slots.available(), 3, "the device may still write to its slot");

    fake.release();
    fake.wait_until("the slot is back", |_| end.slots.available() == 4);
    let stats = end.engine.stats();
    assert_eq!((stats.copies_quarantined, stats.copies_leaked, stats.copies_in_flight), (0, 0, 0));
    assert!(end.read().await.unwrap() == pattern(LEN));
    drop(end);
    wait_for_no_objects(&fake, 0).await;
    assert_eq!(fake.violations(), [""; 0]);
}

#[tokio::test]
async fn a_device_that_keeps_hanging_is_declared_failed() {
    let fake = machine();
    let options = CudaOptions { copy_timeout: Duration::from_millis(60), ..short_timeouts() };
    let end = End::open(0, options).unwrap();
    fake.fault(&Fault::once("@dtoh", 1, Effect::Hang));
    let failure = end_of(read_a_chunk(&end).await).await.unwrap_err();
    assert!(matches!(failure, CopyError::TimedOut { .. }), "{failure:?}");
    fake.wait_until("the engine declares the device failed", |_| end.engine.stats().copies_leaked == 1);
    assert!(matches!(end_of(read_a_chunk(&end).await).await, Err(CopyError::DeviceFailed { .. })));

    // Dropping everything does not block, and frees nothing that the device may still write.
    drop(end);
    fake.release();
    fake.wait_until("the copy completes after all", |fake| fake.live().in_flight == 0);
    assert_eq!(fake.violations(), [""; 0]);
}

#[tokio::test]
async fn memory_dropped_under_copies_is_kept_until_they_have_ended() {
    let fake = machine();
    let end = End::open(0, short_timeouts()).unwrap();
    let gates = [fake.hold(0, Direction::DeviceToHost), fake.hold(0, Direction::HostToDevice)];
    drop(read_a_chunk(&end).await);
    let slot = end.slots.acquire().await;
    drop(end.engine.copy_in(slot, vec![CopySegment::new(&end.memory, 0, CHUNK)]));
    gates.iter().for_each(|gate| gate.until_waiting(1));
    drop(end);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!((fake.live().in_flight, fake.live().contexts), (2, 1));
    drop(gates);
    wait_for_no_objects(&fake, 0).await;
    assert_eq!(fake.violations(), [""; 0]);
}

#[tokio::test]
async fn memory_is_limited_by_budget_and_device() {
    let fake = machine();
    fake.reset_with(2, 8 << 20);
    let budget = |bytes| CudaOptions { memory_limit_bytes: bytes, ..short_timeouts() };
    let small = CudaEngine::open(0, budget(Some(1 << 20))).unwrap();
    let held = small.allocate(600 << 10).unwrap();
    let refused = small.allocate(600 << 10).unwrap_err();
    assert!(
        matches!(
            refused,
            AllocError::OverDeviceBudget { budget_bytes: 0x10_0000, asked_bytes: 0x9_6000, .. }
        ),
        "{refused:?}"
    );
    // Returned memory is reused, or freed if an allocation of another size needs the budget.
    drop(held);
    drop(small.allocate(600 << 10).unwrap());
    drop(small.allocate(1000 << 10).unwrap());

    let free = CudaEngine::open(0, budget(None)).unwrap();
    let full = free.allocate(9 << 20).unwrap_err();
    assert!(matches!(full, AllocError::DeviceFull { total_bytes: 0x80_0000, .. }), "{full:?}");
    let most = free.allocate(6 << 20).unwrap();
    drop((small, most, free));
    wait_for_no_objects(&fake, 0).await;
    assert_eq!(fake.violations(), [""; 0]);
}

#[tokio::test]
async fn successive_versions_reuse_memory() {
    let fake = machine();
    let engine = CudaEngine::open(0, short_timeouts()).unwrap();
    for _ in 0..10 {
        drop(engine.allocate(LEN).unwrap());
        fake.wait_until("the memory is returned", |_| engine.stats().device_bytes == 0);
    }
    assert_eq!(
        fake.calls()["cuMemAlloc_v2"],
        1,
        "memory is reused, since freeing it waits for the whole device"
    );
    assert!(!fake.calls().contains_key("cuMemFree_v2"));
    drop(engine);
    wait_for_no_objects(&fake, 0).await;
    assert_eq!(fake.live(), Live::default());
}
