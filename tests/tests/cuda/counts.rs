//! Driver calls: their number for copies of many segments.

#![expect(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

use std::sync::Arc;

use tensor_relay_device::{
    Capacity, CopyEngine, CopySegment, Slot,
    cuda::{CudaEngine, CudaMemory},
};
use tensor_relay_tests::fake_cuda::{Effect, Fault, Turn};

use crate::{endpoint::short_timeouts, machine};

const NOT_SUPPORTED: u32 = 801;

/// The number of calls of a function so far.
fn calls(fake: &Turn, name: &str) -> u64 {
    fake.calls().get(name).copied().unwrap_or(0)
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
            .map(|(i, memory)| CopySegment { at: i * LEN, ..CopySegment::new(memory, 0, LEN) })
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
