//! Copies of short runs, which pass through scratch memory of the device.

#![expect(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

use std::sync::Arc;

use tensor_relay_device::{
    Capacity, CopyEngine, CopyError, CopySegment, Rectangle, SlotPool,
    cuda::{CudaEngine, CudaMemory, CudaOptions},
};
use tensor_relay_tests::fake_cuda::{Direction, Effect, Fault, Turn};

use crate::{
    endpoint::{short_timeouts, wait_for_no_objects},
    machine,
};

const SLOT_BYTES: usize = 16 * ROWS;
const ROWS: usize = 1000;
const INVALID_VALUE: u32 = 1;
const NOT_SUPPORTED: u32 = 801;

/// An engine with four slots, and a matrix of which a slot holds a column.
struct Matrix {
    engine: Arc<CudaEngine>,
    memory: Arc<CudaMemory>,
    slots: SlotPool,
}

impl Matrix {
    fn new(options: CudaOptions) -> Self {
        let engine = CudaEngine::open(0, options).unwrap();
        let memory = engine.allocate(8 * SLOT_BYTES).unwrap();
        let slots = engine.slots(Capacity { slots: 4, slot_bytes: SLOT_BYTES }).unwrap();
        Self { engine, memory, slots }
    }

    /// One of eight columns of 16 bytes.
    fn column(&self, column: u64) -> Vec<CopySegment<CudaMemory>> {
        let run = Rectangle::run(0, 16 * column, 16);
        let rectangle = Rectangle { runs: ROWS as u64, memory_stride: 128, ..run };
        vec![CopySegment { memory: Arc::clone(&self.memory), rectangle }]
    }
}

fn calls<const N: usize>(fake: &Turn, names: [&str; N]) -> [u64; N] {
    names.map(|name| fake.calls().get(name).copied().unwrap_or(0))
}

/// Goal: a column costs one copy over the bus and one within the device, and all copies in flight of a direction share one
/// scratch memory, which goes back when they have ended. Method: hold four copies, and count calls and memory.
#[tokio::test]
async fn copies_in_flight_share_a_scratch() {
    let fake = machine();
    let matrix = Matrix::new(short_timeouts());
    let in_use_bytes = matrix.engine.stats().device_bytes;
    let gate = fake.hold(0, Direction::HostToDevice);
    let copy = |column| {
        matrix
            .engine
            .copy_in(matrix.slots.try_acquire().unwrap(), matrix.column(column))
    };
    let copies = [0, 1, 2, 3].map(copy);
    gate.until_waiting(4);
    assert_eq!(calls(&fake, ["cuMemAlloc_v2", "cuMemcpyHtoDAsync_v2", "cuMemcpy2DAsync_v2"]), [2, 4, 4]);
    assert!(matrix.engine.stats().device_bytes - in_use_bytes < 2 * SLOT_BYTES as u64);
    drop(gate);
    for copying in copies {
        copying.await.unwrap();
    }
    let wait_for_scratch =
        || fake.wait_until("the scratch is back", |_| matrix.engine.stats().device_bytes == in_use_bytes);
    for column in 0..4 {
        wait_for_scratch(); // Or the copy might find it neither in use nor in the cache.
        let slot = matrix.slots.acquire().await;
        matrix.engine.copy_out(matrix.column(column), slot).await.unwrap();
    }
    let out = ["cuMemAlloc_v2", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuMemcpy2DAsync_v2"];
    assert_eq!(calls(&fake, out), [2, 4, 4, 8], "the scratch comes from the cache");
    let stats = matrix.engine.stats();
    assert_eq!((stats.in_bytes, stats.out_bytes), (4 * SLOT_BYTES as u64, 4 * SLOT_BYTES as u64));
    wait_for_scratch();
    drop(matrix);
    wait_for_no_objects(&fake, 0).await;
    assert_eq!(fake.violations(), [""; 0]);
}

/// Goal: without memory for the scratch a copy is refused, and its slot comes back; copies of one run still succeed.
#[tokio::test]
async fn without_room_for_a_scratch_a_copy_is_refused() {
    let _fake = machine();
    let options = CudaOptions { memory_limit_bytes: Some(8 * SLOT_BYTES as u64), ..short_timeouts() };
    let matrix = Matrix::new(options);
    let refused = matrix
        .engine
        .copy_in(matrix.slots.acquire().await, matrix.column(1))
        .await
        .unwrap_err();
    assert!(matches!(refused, CopyError::NoScratch { .. }) && !refused.is_final(), "{refused}");
    assert!(refused.to_string().contains("memory limit"), "{refused}");
    let whole = vec![CopySegment::new(&matrix.memory, 0, SLOT_BYTES)];
    assert!(matrix.engine.copy_in(matrix.slots.acquire().await, whole).await.is_ok());
    assert_eq!(matrix.slots.available(), 4);
}

/// Goal: a driver that refuses a copy within the device fails that copy alone, after the upload before it has ended.
#[tokio::test]
async fn a_refused_copy_of_runs_returns_its_slot() {
    let fake = machine();
    let matrix = Matrix::new(short_timeouts());
    fake.fault(&Fault::once("cuMemcpy2DAsync_v2", 1, Effect::Fail(NOT_SUPPORTED)));
    let refused = matrix
        .engine
        .copy_in(matrix.slots.acquire().await, matrix.column(1))
        .await
        .unwrap_err();
    assert!(matches!(refused, CopyError::Refused { .. }), "{refused:?}");
    assert!(
        matrix
            .engine
            .copy_in(matrix.slots.acquire().await, matrix.column(1))
            .await
            .is_ok()
    );
    assert_eq!(matrix.slots.available(), 4);
}

/// Goal: on a device that does not copy such strides, every run arrives by a copy of its own. Method: refuse all strided
/// copies, and once the batch of runs too; copy a column each way, and compare its bytes and the driver's calls.
#[tokio::test]
async fn refused_strides_are_copied_run_by_run() {
    let fake = machine();
    let matrix = Matrix::new(short_timeouts());
    fake.fault(&Fault::from("cuMemcpy2DAsync_v2", 1, Effect::Fail(INVALID_VALUE)));
    fake.fault(&Fault::once("cuMemcpyBatchAsync_v2", 2, Effect::Fail(NOT_SUPPORTED)));
    let bytes: Vec<u8> = (0..SLOT_BYTES).map(|at| (at / 7) as u8).collect();
    let mut slot = matrix.slots.acquire().await;
    slot.copy_from_slice(&bytes);
    slot = matrix.engine.copy_in(slot, matrix.column(3)).await.unwrap();
    slot.fill(0);
    slot = matrix.engine.copy_out(matrix.column(3), slot).await.unwrap();
    assert!(slot[..] == bytes);
    let names = ["cuMemcpy2DAsync_v2", "cuMemcpyBatchAsync_v2", "cuMemcpyDtoDAsync_v2"];
    assert_eq!(calls(&fake, names), [2, 2, ROWS as u64]);
    let stats = matrix.engine.stats();
    assert_eq!((stats.in_bytes, stats.out_bytes), (SLOT_BYTES as u64, SLOT_BYTES as u64));
}

/// Goal: a copy whose runs hang within the device is late like any other, and its slot and scratch are used by nobody
/// until it has ended. Method: hold copies within the device for longer than the timeout.
#[tokio::test]
async fn a_late_copy_of_runs_keeps_its_scratch() {
    let fake = machine();
    let matrix = Matrix::new(short_timeouts());
    let in_use_bytes = matrix.engine.stats().device_bytes;
    let gate = fake.hold(0, Direction::DeviceToDevice);
    let late = matrix
        .engine
        .copy_in(matrix.slots.acquire().await, matrix.column(1))
        .await
        .unwrap_err();
    assert!(matches!(late, CopyError::TimedOut { .. }), "{late:?}");
    assert!(matrix.engine.stats().device_bytes > in_use_bytes);
    assert_eq!(matrix.slots.available(), 3);
    drop(gate);
    fake.wait_until("the late copy has ended", |_| matrix.engine.stats().device_bytes == in_use_bytes);
    assert_eq!((matrix.slots.available(), matrix.engine.stats().copies_quarantined), (4, 0));
    assert_eq!(fake.violations(), [""; 0]);
}
