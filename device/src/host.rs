use crate::Lock;
use std::{
    fmt, io,
    sync::{Arc, mpsc},
    thread,
};

use crate::{
    engine::{Completion, CopyEngine, CopySegment, Copying, check_copy},
    host_memory::{AllocError, HostMemory},
    id::Id,
    pool::{Capacity, SlotPool},
    region::Region,
    slot::Slot,
};

/// The reference copy engine: its device is host memory, and a thread makes its copies.
///
/// Other engines are tested against it, and everything built on engines can be tested with it, without a GPU: the
/// copies of its thread are as asynchronous as those on a GPU stream. Payloads that stay on the host need no engine:
/// [`HostSource`](crate::HostSource) and [`HostSink`](crate::HostSink) copy nothing.
///
/// Dropping it does not block. Requested copies still run to their end, then the thread ends.
pub struct HostEngine {
    id: Id,
    memory: HostMemory,
    /// The queue of the copy thread; `None` for an inline engine. The channel is unbounded, but its length is limited
    /// by the number of slots: each job owns one (`check_copy`).
    jobs: Option<mpsc::Sender<Job>>,
}

impl HostEngine {
    /// Starts the copy thread. Tensor memory is allocated from `memory`. Fails if no thread can be started.
    pub fn new(memory: HostMemory) -> io::Result<Self> {
        let (jobs, queue) = mpsc::channel::<Job>();
        let copy_all = move || queue.into_iter().for_each(Job::run);
        thread::Builder::new().name("relay-copy".into()).spawn(copy_all)?;
        Ok(Self { id: Id::unique(), memory, jobs: Some(jobs) })
    }

    /// An engine without a thread, whose copies have ended when the request returns: for simulations, in which a seed
    /// must determine the order of events.
    pub fn inline(memory: HostMemory) -> Self {
        Self { id: Id::unique(), memory, jobs: None }
    }

    fn start(
        &self,
        direction: Direction,
        segments: Vec<CopySegment<HostEngineMemory>>,
        slot: Slot,
    ) -> Copying {
        if let Err(error) = check_copy(self.id, &slot, &segments, |memory| memory.len as u64) {
            return Copying::refused(error);
        }
        let (completion, copying) = Copying::pair();
        let job = Job { direction, slot, segments, completion };
        match &self.jobs {
            // If the thread is gone, the job is returned and dropped here, which reports `EngineStopped`.
            Some(jobs) => drop(jobs.send(job)),
            None => job.run(),
        }
        copying
    }
}

impl CopyEngine for HostEngine {
    type Memory = HostEngineMemory;

    fn name(&self) -> &str {
        "host"
    }

    fn allocate(&self, len: usize) -> Result<Arc<HostEngineMemory>, AllocError> {
        let bytes = Lock::new(self.memory.allocate(len)?);
        Ok(Arc::new(HostEngineMemory { len, bytes }))
    }

    fn slots(&self, capacity: Capacity) -> Result<SlotPool, AllocError> {
        SlotPool::of_engine(capacity, self.id)
    }

    fn memory_len(&self, memory: &HostEngineMemory) -> u64 {
        memory.len as u64
    }

    fn copy_out(&self, from: Vec<CopySegment<HostEngineMemory>>, slot: Slot) -> Copying {
        self.start(Direction::Out, from, slot)
    }

    fn copy_in(&self, slot: Slot, to: Vec<CopySegment<HostEngineMemory>>) -> Copying {
        self.start(Direction::In, to, slot)
    }
}

impl fmt::Debug for HostEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostEngine")
            .field("memory", &self.memory)
            .finish_non_exhaustive()
    }
}

/// Tensor memory of the [`HostEngine`]. As with device memory, only copies access its bytes.
pub struct HostEngineMemory {
    len: usize,
    bytes: Lock<Region>,
}

impl fmt::Debug for HostEngineMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostEngineMemory")
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

enum Direction {
    Out,
    In,
}

/// A checked copy. The fields of a job that is dropped unrun are dropped in order: the slot is returned before the
/// waiter is notified.
struct Job {
    direction: Direction,
    slot: Slot,
    segments: Vec<CopySegment<HostEngineMemory>>,
    completion: Completion,
}

impl Job {
    fn run(self) {
        let Self { direction, mut slot, segments, completion } = self;
        for CopySegment { memory, rectangle } in segments {
            let mut bytes = memory.bytes.lock();
            match direction {
                Direction::Out => rectangle.gather(&bytes, &mut slot),
                Direction::In => rectangle.place(&slot, &mut bytes),
            }
        } // The tensor memory is released before the end is reported.
        completion.finish(Ok(slot));
    }
}

#[cfg(test)]
mod tests {
    use std::{
        pin::Pin,
        task::{Context, Poll, Waker},
        time::Duration,
    };

    use super::*;
    use crate::{CopyError, engine::CopySegment};

    fn new_engine() -> Arc<HostEngine> {
        Arc::new(HostEngine::new(HostMemory::new(64 << 20)).unwrap())
    }

    fn new_inline_engine() -> Arc<HostEngine> {
        Arc::new(HostEngine::inline(HostMemory::new(64 << 20)))
    }

    crate::engine_cases!(host_engine, new_engine);
    crate::engine_cases!(inline_host_engine, new_inline_engine);

    #[tokio::test]
    async fn a_slot_returns_after_its_copy_even_if_the_future_is_dropped() {
        let engine = new_engine();
        let memory = engine.allocate(100).unwrap();
        let slots = engine.slots(Capacity { slots: 1, slot_bytes: 100 }).unwrap();

        {
            let _copies_blocked_guard = memory.bytes.lock();
            drop(engine.copy_in(slots.try_acquire().unwrap(), vec![CopySegment::new(&memory, 0, 100)]));
            // The copy cannot end while its bytes are locked, however long this waits.
            for _ in 0..20 {
                thread::sleep(Duration::from_millis(1));
                assert!(slots.try_acquire().is_none());
            }
        }
        slots.acquire().await;
        assert_eq!(Arc::strong_count(&memory), 1);
    }

    #[tokio::test]
    async fn memory_outlives_its_owner_while_a_copy_runs() {
        let engine = new_engine();
        let memory = engine.allocate(100).unwrap();
        let slots = engine.slots(Capacity { slots: 2, slot_bytes: 100 }).unwrap();

        let copies_blocked_guard = memory.bytes.lock();
        let copy = |offset| {
            engine.copy_in(slots.try_acquire().unwrap(), vec![CopySegment::new(&memory, offset, 50)])
        };
        let copies = [0, 50].map(copy);
        assert!(engine.memory.stats().in_use_bytes > 0);
        drop(copies_blocked_guard);
        drop(memory);
        for copy in copies {
            copy.await.unwrap();
        }
        assert_eq!(engine.memory.stats().in_use_bytes, 0);
    }

    #[test]
    fn a_dropped_engine_finishes_the_requested_copies() {
        let engine = new_engine();
        let memory = engine.allocate(100).unwrap();
        let slots = engine.slots(Capacity { slots: 8, slot_bytes: 100 }).unwrap();

        let copies_blocked_guard = memory.bytes.lock();
        let copy = |_| engine.copy_in(slots.try_acquire().unwrap(), vec![CopySegment::new(&memory, 0, 100)]);
        let copies = [0; 8].map(copy);
        drop(engine);
        assert_eq!(slots.available(), 0);
        drop(copies_blocked_guard);
        for mut copy in copies {
            assert!(poll_to_end(&mut copy).is_ok());
        }
        assert_eq!(slots.available(), 8);
    }

    /// Polls a copy to its end, on a thread without a runtime.
    fn poll_to_end(copy: &mut Copying) -> Result<Slot, CopyError> {
        let mut context = Context::from_waker(Waker::noop());
        loop {
            if let Poll::Ready(end) = Pin::new(&mut *copy).poll(&mut context) {
                return end;
            }
            thread::yield_now();
        }
    }
}
