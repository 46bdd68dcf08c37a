//! Driver calls: their number for copies in flight together, and for copies of many segments.

#![expect(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

use std::sync::Arc;

use tensor_relay_device::{
    Capacity, CopyEngine, CopySegment, Slot,
    cuda::{CudaEngine, CudaMemory},
};
use tensor_relay_tests::fake_cuda::{Direction, Effect, Fault, Turn};

use crate::{endpoint::short_timeouts, machine};

const SLOTS: usize = 8;
const NOT_SUPPORTED: u32 = 801;

/// The number of calls of a function so far.
fn calls(fake: &Turn, name: &str) -> u64 {
    fake.calls().get(name).copied().unwrap_or(0)
}

/// Goal: eight copies in flight cost 18 calls to begin, not 32: the copy and an event for each, and one signal for all,
/// since the copies that end before the engine has handled it are found with it. Method: hold the copies until the engine
/// has polled them in vain, and count its calls.
#[tokio::test]
async fn copies_in_flight_have_one_signal_to_come() {
    let fake = machine();
    let engine = CudaEngine::open(0, short_timeouts()).unwrap();
    let memory = engine.allocate(LEN).unwrap();
    let slots = engine.slots(Capacity { slots: SLOTS, slot_bytes: LEN }).unwrap();
    let begun = || {
        ["cuMemcpyDtoHAsync_v2", "cuEventRecord", "cuStreamWaitEvent", "cuLaunchHostFunc"]
            .map(|name| calls(&fake, name))
    };
    let gate = fake.hold(0, Direction::DeviceToHost);
    let copy = |()| engine.copy_out(vec![CopySegment::new(&memory, 0, LEN)], slots.try_acquire().unwrap());
    let copies = [(); SLOTS].map(copy);
    gate.until_waiting(SLOTS as u64);
    fake.wait_until("the engine has polled", |_| calls(&fake, "cuEventQuery") > 2);
    assert_eq!(begun(), [SLOTS as u64, SLOTS as u64, 1, 1]);
    drop(gate);
    for copying in copies {
        copying.await.unwrap();
    }
    let [copies, events, waits, signals] = begun();
    assert!(copies == events && waits == signals && signals <= SLOTS as u64, "{waits} {signals}");
    assert_eq!(engine.stats().copies_ended, SLOTS as u64);
}

/// A thousand tensors in allocations of their own, and a slot that holds all of them.
struct Many {
    engine: Arc<CudaEngine>,
    memories: Vec<Arc<CudaMemory>>,
    slot: Slot,
}

const LEN: usize = 100;

impl Many {
    async fn new() -> Self {
        let engine = CudaEngine::open(0, short_timeouts()).unwrap();
        let memories = (0..1000).map(|_| engine.allocate(LEN).unwrap()).collect();
        let capacity = Capacity { slots: 1, slot_bytes: 1000 * LEN };
        let slot = engine.slots(capacity).unwrap().acquire().await;
        Self { engine, memories, slot }
    }

    fn segments(&self) -> Vec<CopySegment<CudaMemory>> {
        let memories = self.memories.iter().enumerate();
        memories
            .map(|(i, memory)| CopySegment::new(memory, 0, LEN).at(i * LEN))
            .collect()
    }

    /// Copies bytes to all tensors and back, and compares them.
    async fn round_trip(mut self, seed: u8) -> Self {
        let bytes: Vec<u8> = (0..1000 * LEN).map(|i| (i / 77) as u8 ^ seed).collect();
        self.slot.copy_from_slice(&bytes);
        let [to, from] = [self.segments(), self.segments()];
        let Self { engine, memories, mut slot } = self;
        slot = engine.copy_in(slot, to).await.unwrap();
        slot.fill(0);
        slot = engine.copy_out(from, slot).await.unwrap();
        assert!(slot[..] == bytes);
        Self { engine, memories, slot }
    }
}

/// Goal: the copies of a chunk of many tensors are one call each way, and without it, as with older drivers, one for each
/// tensor; a driver that refuses the call is not asked again.
#[tokio::test]
async fn many_segments_are_copied_in_one_call() {
    let fake = machine();
    let many = Many::new().await.round_trip(1).await;
    assert_eq!(calls(&fake, "cuMemcpyBatchAsync_v2"), 2);
    let singles = |fake: &Turn| calls(fake, "cuMemcpyDtoHAsync_v2") + calls(fake, "cuMemcpyHtoDAsync_v2");
    assert_eq!(singles(&fake), 0);
    fake.fault(&Fault::once("cuMemcpyBatchAsync_v2", 1, Effect::Fail(NOT_SUPPORTED)));
    drop(many.round_trip(2).await);
    assert_eq!((calls(&fake, "cuMemcpyBatchAsync_v2"), singles(&fake)), (3, 2000));
}
