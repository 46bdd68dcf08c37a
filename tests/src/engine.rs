//! A copy engine for tests: wraps the host engine and counts, delays, holds, fails or hangs its copies.

use futures_util::FutureExt;
use std::{
    collections::VecDeque,
    fmt, mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tensor_relay_device::{
    AllocError, Capacity, Completion, CopyEngine, CopyError, CopySegment, Copying, Device, HostEngine,
    HostEngineMemory, HostMemory, Slot, SlotPool,
};
use tokio::time::Instant;

/// The behaviour of copies that are requested from now on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Behaviour {
    /// Copies are complete when the request returns.
    AtOnce,
    /// Each copy takes this long on the scenario's clock, one after the other.
    Taking(Duration),
    /// Copies wait for [`TestEngine::release`].
    Held,
    /// Copies are refused, as by a stopped engine.
    Failing,
    /// One copy is refused, and later ones are complete when the request returns.
    FailingOnce,
    /// Copies never complete, and retain their slot and memory.
    Hanging,
}

/// The host engine, with copies that behave as the test chooses.
pub struct TestEngine {
    host: HostEngine,
    memory: HostMemory,
    state: Mutex<State>,
}

struct State {
    behaviour: Behaviour,
    copies_out: u64,
    copies_in: u64,
    /// The time at which the last copy with a duration ends.
    idle_at: Instant,
    held: VecDeque<RequestedCopy>,
    hanging: Vec<RequestedCopy>,
}

/// A copy that has not ended. Its completion is `None` after [`TestEngine::report_stopped`].
struct RequestedCopy {
    is_out: bool,
    segments: Vec<CopySegment<HostEngineMemory>>,
    slot: Slot,
    completion: Option<Completion>,
}

impl TestEngine {
    /// An engine with this much memory, whose copies complete at once.
    pub fn new(memory_bytes: u64) -> Arc<Self> {
        let state = State {
            behaviour: Behaviour::AtOnce,
            copies_out: 0,
            copies_in: 0,
            idle_at: Instant::now(),
            held: VecDeque::new(),
            hanging: Vec::new(),
        };
        let memory = HostMemory::new(memory_bytes);
        Arc::new(Self { host: HostEngine::inline(memory.clone()), memory, state: Mutex::new(state) })
    }

    /// A device of this engine, with `slots` slots of `slot_bytes` bytes each.
    pub fn device(self: &Arc<Self>, slots: usize, slot_bytes: usize) -> Device {
        Device::new(Arc::clone(self), Capacity { slots, slot_bytes }).unwrap()
    }

    /// Sets the behaviour of copies from now on.
    pub fn behave(&self, behaviour: Behaviour) {
        self.state().behaviour = behaviour;
    }

    /// Completes up to `count` held copies, the oldest first.
    pub fn release(&self, count: usize) {
        for _ in 0..count {
            let Some(copy) = self.state().held.pop_front() else { return };
            self.finish(copy);
        }
    }

    /// Completes the newest held copy; returns whether there was one.
    pub fn release_newest(&self) -> bool {
        let copy = self.state().held.pop_back();
        copy.map(|copy| self.finish(copy)).is_some()
    }

    /// Completes all held copies, and holds no later ones.
    pub fn release_all(&self) {
        self.behave(Behaviour::AtOnce);
        self.release(usize::MAX);
    }

    /// Reports `EngineStopped` for the held copies, whose outcome is then unknown: their bytes are still moved when
    /// they are released.
    pub fn report_stopped(&self) {
        for copy in &mut self.state().held {
            if let Some(completion) = copy.completion.take() {
                completion.finish(Err(CopyError::EngineStopped));
            }
        }
    }

    /// The number of held copies.
    pub fn held(&self) -> usize {
        self.state().held.len()
    }

    /// Drops the hanging copies, with their slots and memory.
    pub fn forget_hanging(&self) {
        let hanging = mem::take(&mut self.state().hanging);
        drop(hanging);
    }

    /// The number of requested copies out of the device's memory.
    pub fn copies_out(&self) -> u64 {
        self.state().copies_out
    }

    /// The number of requested copies into the device's memory.
    pub fn copies_in(&self) -> u64 {
        self.state().copies_in
    }

    /// The number of allocated bytes of the device's memory, including those of copies that have not ended.
    pub fn in_use_bytes(&self) -> u64 {
        self.memory.stats().in_use_bytes
    }

    fn start(&self, is_out: bool, segments: Vec<CopySegment<HostEngineMemory>>, slot: Slot) -> Copying {
        let mut state = self.state();
        *(if is_out { &mut state.copies_out } else { &mut state.copies_in }) += 1;
        let (completion, copying) = Copying::pair();
        let copy = RequestedCopy { is_out, segments, slot, completion: Some(completion) };
        match state.behaviour {
            Behaviour::AtOnce => {
                drop(state);
                self.finish(copy);
            }
            Behaviour::Taking(time) => {
                state.idle_at = state.idle_at.max(Instant::now()) + time;
                let ends_at = state.idle_at;
                drop(state);
                return self.finish_at(copy, copying, ends_at);
            }
            Behaviour::Held => state.held.push_back(copy),
            Behaviour::Failing => return Copying::refused(CopyError::EngineStopped),
            Behaviour::FailingOnce => {
                state.behaviour = Behaviour::AtOnce;
                return Copying::refused(CopyError::EngineStopped);
            }
            Behaviour::Hanging => state.hanging.push(copy),
        }
        copying
    }

    /// Moves the bytes now, and reports completion at `ends_at`.
    fn finish_at(&self, copy: RequestedCopy, copying: Copying, ends_at: Instant) -> Copying {
        let RequestedCopy { is_out, segments, slot, completion } = copy;
        let memory: Vec<_> = segments.iter().map(|segment| Arc::clone(&segment.memory)).collect();
        let ended = self.run(is_out, segments, slot);
        tokio::spawn(async move {
            tokio::time::sleep_until(ends_at).await;
            drop(memory);
            report(completion, ended);
        });
        copying
    }

    fn finish(&self, copy: RequestedCopy) {
        let RequestedCopy { is_out, segments, slot, completion } = copy;
        let ended = self.run(is_out, segments, slot);
        report(completion, ended);
    }

    fn run(
        &self,
        is_out: bool,
        segments: Vec<CopySegment<HostEngineMemory>>,
        slot: Slot,
    ) -> Result<Slot, CopyError> {
        let copying = match is_out {
            true => self.host.copy_out(segments, slot),
            false => self.host.copy_in(slot, segments),
        };
        // Outside tokio's cooperative budget: once it is used up, even a complete copy is pending.
        tokio::task::unconstrained(copying)
            .now_or_never()
            .expect("copies of the inline engine complete at once")
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn report(completion: Option<Completion>, ended: Result<Slot, CopyError>) {
    if let Some(completion) = completion {
        completion.finish(ended);
    }
}

impl CopyEngine for TestEngine {
    type Memory = HostEngineMemory;

    fn name(&self) -> &str {
        "test"
    }

    fn allocate(&self, len: usize) -> Result<Arc<HostEngineMemory>, AllocError> {
        self.host.allocate(len)
    }

    fn slots(&self, capacity: Capacity) -> Result<SlotPool, AllocError> {
        self.host.slots(capacity)
    }

    fn memory_len(&self, memory: &HostEngineMemory) -> u64 {
        self.host.memory_len(memory)
    }

    fn copy_out(&self, from: Vec<CopySegment<HostEngineMemory>>, slot: Slot) -> Copying {
        self.start(true, from, slot)
    }

    fn copy_in(&self, slot: Slot, to: Vec<CopySegment<HostEngineMemory>>) -> Copying {
        self.start(false, to, slot)
    }
}

impl fmt::Debug for TestEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TestEngine")
            .field("behaviour", &self.state().behaviour)
            .finish_non_exhaustive()
    }
}
