//! Devices that fail as a whole: by an error elsewhere in the process, by a hang, or by the destruction of their
//! context. Also copies that are refused or late, and the limits and reuse of device memory.

use std::time::Duration;

use tensor_relay_device::{
    AllocError, CopyEngine, CopyError, CopySegment, Copying, Slot,
    cuda::{CudaEngine, CudaError, CudaOptions, StreamHandle},
};
use tensor_relay_tests::fake_cuda::{Direction, Effect, Fault, Live, Turn};
use tokio::time::timeout;

use crate::{
    calls::{Block, Current, create_stream},
    endpoint::{CHUNK, Endpoint, LEN, pattern, short_timeouts, wait_for_no_objects},
    machine,
    order::handle,
};

/// Waits for the result of a copy, with a deadline.
async fn result_of(copying: Copying) -> Result<Slot, CopyError> {
    timeout(Duration::from_secs(5), copying)
        .await
        .expect("a copy completes, whatever its device does")
}

/// Starts to copy the first chunk from the device.
async fn start_read(endpoint: &Endpoint) -> Copying {
    let slot = timeout(Duration::from_secs(5), endpoint.slots.acquire())
        .await
        .expect("a slot is free");
    endpoint
        .engine
        .copy_out(vec![CopySegment::new(&endpoint.memory, 0, CHUNK)], slot)
}

#[tokio::test]
async fn a_corrupted_context_fails_all_requests_in_time() {
    let fake = machine();
    let (endpoint, other) =
        (Endpoint::open(0, short_timeouts()).unwrap(), Endpoint::open(1, short_timeouts()).unwrap());
    let gate = fake.hold(0, Direction::DeviceToHost);
    let copies = [start_read(&endpoint).await, start_read(&endpoint).await];
    gate.until_waiting(2);
    fake.fail_device(0, 700);
    for copy in copies {
        let failure = result_of(copy).await.unwrap_err();
        assert!(matches!(failure, CopyError::DeviceFailed { .. }), "{failure:?}");
        let text = format!("{:?}", messages(&failure));
        assert!(text.contains("cuda:0") && text.contains("700"), "{text}");
    }
    drop(gate);
    // Later copies fail at once with the same error, and return their slots.
    for _ in 0..6 {
        assert!(matches!(result_of(start_read(&endpoint).await).await, Err(CopyError::DeviceFailed { .. })));
    }
    assert!(matches!(endpoint.engine.allocate(100), Err(AllocError::Device { .. })));
    assert_eq!(endpoint.engine.stats().copies_leaked, 2);
    // The other device is unaffected.
    other.fill(&pattern(LEN)).await.unwrap();
    assert!(other.read().await.unwrap() == pattern(LEN));
    assert_eq!(fake.violations(), [""; 0]);
}

/// Waits until the engine reports that its device has failed, and checks that later requests fail.
async fn check_failed(fake: &Turn, endpoint: &Endpoint) {
    fake.wait_until("the engine declares the device failed", |_| endpoint.engine.failure().is_some());
    let failure = endpoint.engine.failure().expect("the device failed").to_string();
    assert!(failure.contains("700"), "{failure}");
    for _ in 0..6 {
        assert!(matches!(result_of(start_read(endpoint).await).await, Err(CopyError::DeviceFailed { .. })));
    }
    assert!(matches!(endpoint.memory.wait_on(StreamHandle::LEGACY), Err(CudaError::Driver(_))));
    assert!(matches!(endpoint.memory.record_use(StreamHandle::LEGACY), Err(CudaError::Driver(_))));
    assert_eq!(endpoint.engine.stats().copies_leaked, 0, "nothing was in flight");
    assert_eq!(fake.violations(), [""; 0]);
}

#[tokio::test]
async fn a_context_corrupted_between_copies_fails_the_next_copy() {
    let fake = machine();
    let endpoint = Endpoint::open(0, short_timeouts()).unwrap();
    endpoint.fill(&pattern(LEN)).await.unwrap();
    assert_eq!(endpoint.engine.stats().copies_in_flight, 0);
    fake.fail_device(0, 700);
    result_of(start_read(&endpoint).await).await.unwrap_err();
    check_failed(&fake, &endpoint).await;
}

#[tokio::test]
async fn a_context_corrupted_between_copies_fails_a_fence() {
    let fake = machine();
    let endpoint = Endpoint::open(0, short_timeouts()).unwrap();
    let current = Current::new(0);
    let producer = create_stream();
    let block = Block::in_stream(producer);
    let fence = endpoint.engine.fence(handle(producer)).unwrap();
    fake.fail_device(0, 700);
    let passed = timeout(Duration::from_secs(5), fence.passed()).await;
    passed.expect("a fence completes, whatever its device does").unwrap_err();
    check_failed(&fake, &endpoint).await;
    assert!(matches!(fence.wait_on(StreamHandle::LEGACY), Err(CudaError::Driver(_))));
    block.lift();
    drop(current);
}

#[tokio::test]
async fn a_refused_copy_does_not_fail_its_device() {
    let fake = machine();
    let endpoint = Endpoint::open(0, short_timeouts()).unwrap();
    endpoint.fill(&pattern(LEN)).await.unwrap();
    fake.fault(&Fault::once("cuMemcpyDtoHAsync_v2", 1, Effect::Fail(700)));
    let failure = result_of(start_read(&endpoint).await).await.unwrap_err();
    assert!(matches!(failure, CopyError::Refused { .. }), "{failure:?}");
    assert!(endpoint.read().await.unwrap() == pattern(LEN));
    assert_eq!(endpoint.engine.failure(), None);
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
    let endpoint = Endpoint::open(0, short_timeouts()).unwrap();
    endpoint.fill(&pattern(LEN)).await.unwrap();
    let copied = result_of(start_read(&endpoint).await).await.unwrap();
    let gate = fake.hold(0, Direction::DeviceToHost);
    let copy = start_read(&endpoint).await;
    gate.until_waiting(1);
    fake.destroy_context(0);
    let failure = result_of(copy).await.unwrap_err();
    assert!(matches!(failure, CopyError::DeviceFailed { .. }), "{failure:?}");
    assert!(copied[..] == pattern(LEN)[..CHUNK], "a slot that a reader still holds is unchanged");
    assert!(matches!(result_of(start_read(&endpoint).await).await, Err(CopyError::DeviceFailed { .. })));
    drop((gate, copied, endpoint));
    assert_eq!(fake.violations(), [""; 0]);
    // The device can be opened again.
    let again = Endpoint::open(0, short_timeouts()).unwrap();
    again.fill(&pattern(LEN)).await.unwrap();
    assert!(again.read().await.unwrap() == pattern(LEN));
}

#[tokio::test]
async fn a_copy_that_timed_out_is_quarantined_until_it_has_ended() {
    let fake = machine();
    let endpoint = Endpoint::open(0, short_timeouts()).unwrap();
    endpoint.fill(&pattern(LEN)).await.unwrap();
    fake.fault(&Fault::once("@dtoh", 1, Effect::Hang));
    let failure = result_of(start_read(&endpoint).await).await.unwrap_err();
    assert!(matches!(failure, CopyError::TimedOut { .. }), "{failure:?}");
    let stats = endpoint.engine.stats();
    assert_eq!(
        (stats.copies_quarantined, stats.quarantined_bytes, stats.copies_in_flight),
        (1, CHUNK as u64, 1)
    );
    assert_eq!(endpoint.slots.available(), 3, "the device may still write to its slot");

    fake.release();
    fake.wait_until("the slot is back", |_| endpoint.slots.available() == 4);
    let stats = endpoint.engine.stats();
    assert_eq!((stats.copies_quarantined, stats.copies_leaked, stats.copies_in_flight), (0, 0, 0));
    assert!(endpoint.read().await.unwrap() == pattern(LEN));
    drop(endpoint);
    wait_for_no_objects(&fake, 0).await;
    assert_eq!(fake.violations(), [""; 0]);
}

#[tokio::test]
async fn a_device_that_keeps_hanging_is_declared_failed() {
    let fake = machine();
    let options = CudaOptions { copy_timeout: Duration::from_millis(60), ..short_timeouts() };
    let endpoint = Endpoint::open(0, options).unwrap();
    fake.fault(&Fault::once("@dtoh", 1, Effect::Hang));
    let failure = result_of(start_read(&endpoint).await).await.unwrap_err();
    assert!(matches!(failure, CopyError::TimedOut { .. }), "{failure:?}");
    fake.wait_until("the engine declares the device failed", |_| endpoint.engine.stats().copies_leaked == 1);
    assert!(matches!(result_of(start_read(&endpoint).await).await, Err(CopyError::DeviceFailed { .. })));

    // Dropping the endpoint does not block, and frees no memory that the device may still write.
    drop(endpoint);
    fake.release();
    fake.wait_until("the released copy has ended", |fake| fake.live().in_flight == 0);
    assert_eq!(fake.violations(), [""; 0]);
}

#[tokio::test]
async fn memory_dropped_under_copies_is_kept_until_they_have_ended() {
    let fake = machine();
    let endpoint = Endpoint::open(0, short_timeouts()).unwrap();
    let gates = [fake.hold(0, Direction::DeviceToHost), fake.hold(0, Direction::HostToDevice)];
    drop(start_read(&endpoint).await);
    let slot = endpoint.slots.acquire().await;
    drop(
        endpoint
            .engine
            .copy_in(slot, vec![CopySegment::new(&endpoint.memory, 0, CHUNK)]),
    );
    gates.iter().for_each(|gate| gate.until_waiting(1));
    drop(endpoint);
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
    let limited = CudaEngine::open(0, budget(Some(1 << 20))).unwrap();
    let held = limited.allocate(600 << 10).unwrap();
    let refused = limited.allocate(600 << 10).unwrap_err();
    assert!(
        matches!(
            refused,
            AllocError::OverDeviceBudget { budget_bytes: 0x10_0000, asked_bytes: 0x9_6000, .. }
        ),
        "{refused:?}"
    );
    // Returned memory is reused, or freed if an allocation of another size needs the budget.
    drop(held);
    drop(limited.allocate(600 << 10).unwrap());
    drop(limited.allocate(1000 << 10).unwrap());

    let unlimited = CudaEngine::open(0, budget(None)).unwrap();
    let refused = unlimited.allocate(9 << 20).unwrap_err();
    assert!(matches!(refused, AllocError::DeviceFull { total_bytes: 0x80_0000, .. }), "{refused:?}");
    let large = unlimited.allocate(6 << 20).unwrap();
    drop((limited, large, unlimited));
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
