//! A copy engine for tests: copies to its device wait at a gate, and can be made to fail.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard},
};
use tensor_relay_device::{
    AllocError, Capacity, Completion, CopyEngine, CopyError, CopySegment, Copying, Device, HostEngine,
    HostEngineMemory, HostMemory, Slot, SlotPool,
};

/// A host engine with a gate. While it is open, copies are complete when the request returns; while it is closed, they
/// stay in flight until the test lets them pass.
#[derive(Debug)]
pub struct GatedEngine {
    engine: HostEngine,
    memory: HostMemory,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    closed: bool,
    waiting: VecDeque<Waiting>,
    failing: usize,
    begun: u64,
}

/// A copy in flight. Its completion is `None` after [`GatedEngine::report_stopped`].
#[derive(Debug)]
struct Waiting {
    slot: Slot,
    to: Vec<CopySegment<HostEngineMemory>>,
    completion: Option<Completion>,
}

impl GatedEngine {
    /// An engine with `budget_bytes` of memory and an open gate, and its device with `slots`.
    pub fn device(budget_bytes: u64, slots: Capacity) -> (Arc<Self>, Device) {
        let memory = HostMemory::new(budget_bytes);
        let engine = HostEngine::inline(memory.clone());
        let engine = Arc::new(Self { engine, memory, state: Mutex::default() });
        let device = Device::new(Arc::clone(&engine), slots).unwrap();
        (engine, device)
    }

    /// Holds every copy to the device from now on.
    pub fn close(&self) {
        self.state().closed = true;
    }

    /// Completes the waiting copies in order, and holds no later ones.
    pub fn open(&self) {
        self.state().closed = false;
        while self.let_one_pass() {}
    }

    /// Completes the oldest waiting copy; returns whether there was one.
    pub fn let_one_pass(&self) -> bool {
        let waiting = self.state().waiting.pop_front();
        waiting.map(|waiting| self.end(waiting)).is_some()
    }

    /// Completes the newest waiting copy; returns whether there was one.
    pub fn let_newest_pass(&self) -> bool {
        let waiting = self.state().waiting.pop_back();
        waiting.map(|waiting| self.end(waiting)).is_some()
    }

    /// Reports `EngineStopped` for the waiting copies, whose outcome is then unknown. Their bytes are still written
    /// when the gate lets them pass.
    pub fn report_stopped(&self) {
        for waiting in &mut self.state().waiting {
            if let Some(completion) = waiting.completion.take() {
                completion.finish(Err(CopyError::EngineStopped));
            }
        }
    }

    /// Makes the next `copies` copies to the device fail.
    pub fn fail(&self, copies: usize) {
        self.state().failing = copies;
    }

    /// The number of copies to the device that are in flight.
    pub fn in_flight(&self) -> usize {
        self.state().waiting.len()
    }

    /// The number of copies to the device that were requested, including failed ones.
    pub fn begun(&self) -> u64 {
        self.state().begun
    }

    /// The number of allocated bytes of the device's memory, including those of copies in flight.
    pub fn in_use_bytes(&self) -> u64 {
        self.memory.stats().in_use_bytes
    }

    fn end(&self, waiting: Waiting) {
        let Waiting { slot, to, completion } = waiting;
        let copied = result_of(self.engine.copy_in(slot, to));
        match completion {
            Some(completion) => completion.finish(copied),
            None => drop(copied),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }
}

/// The result of a synchronous copy.
fn result_of(copying: Copying) -> Result<Slot, CopyError> {
    // Outside tokio's cooperative budget, which may be used up.
    let copying = tokio::task::unconstrained(copying);
    futures_util::FutureExt::now_or_never(copying).expect("the engine copies in place")
}

impl CopyEngine for GatedEngine {
    type Memory = HostEngineMemory;

    fn name(&self) -> &str {
        "gated"
    }

    fn allocate(&self, len: usize) -> Result<Arc<HostEngineMemory>, AllocError> {
        self.engine.allocate(len)
    }

    fn slots(&self, capacity: Capacity) -> Result<SlotPool, AllocError> {
        self.engine.slots(capacity)
    }

    fn memory_len(&self, memory: &HostEngineMemory) -> u64 {
        self.engine.memory_len(memory)
    }

    fn copy_out(&self, from: Vec<CopySegment<HostEngineMemory>>, slot: Slot) -> Copying {
        self.engine.copy_out(from, slot)
    }

    fn copy_in(&self, slot: Slot, to: Vec<CopySegment<HostEngineMemory>>) -> Copying {
        let mut state = self.state();
        state.begun += 1;
        if state.failing > 0 {
            state.failing -= 1;
            return Copying::refused(CopyError::EngineStopped);
        }
        if !state.closed {
            return self.engine.copy_in(slot, to);
        }
        let (completion, copying) = Copying::pair();
        state.waiting.push_back(Waiting { slot, to, completion: Some(completion) });
        copying
    }
}
