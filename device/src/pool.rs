use crate::Lock;
use std::{fmt, sync::Arc};

use tokio::sync::Semaphore;

use crate::{
    host_memory::{AllocError, HostMemory},
    id::Id,
    mapping::PAGE_BYTES,
    region::Region,
    slot::Slot,
};

/// The capacity of a [`SlotPool`].
///
/// QUIC keeps a sent slot until it is acknowledged, so bandwidth × round-trip time / `slot_bytes` slots fill the path.
/// A few more are filled meanwhile; any further ones do not speed a transfer up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// The number of slots.
    pub slots: usize,
    /// The bytes of each slot, and of the longest chunk that fits into one.
    pub slot_bytes: usize,
}

/// A pool of staging buffers of one size. Waiting for a slot is the back-pressure on every step that needs one.
///
/// All memory is mapped at the start; unless it is page-locked, the kernel provides it when a slot is first used. The
/// slot returned last is handed out first, so that a lightly used pool stays small and warm. A clone is cheap and
/// shares the slots.
#[derive(Clone)]
pub struct SlotPool {
    shared: Arc<Shared>,
}

impl SlotPool {
    /// Makes a pool in one mapping of ordinary memory, outside any budget. Each slot starts on a page.
    ///
    /// Its slots are for hashing, coding and the network. Copy engines refuse them: use
    /// [`CopyEngine::slots`](crate::CopyEngine::slots) there. Fails if the capacity is zero or the system has no room.
    pub fn new(capacity: Capacity) -> Result<Self, AllocError> {
        Self::in_host_memory(capacity, None)
    }

    /// Like `new`, for slots that `engine` copies from and to.
    pub(crate) fn of_engine(capacity: Capacity, engine: Id) -> Result<Self, AllocError> {
        Self::in_host_memory(capacity, Some(engine))
    }

    /// Waits for a slot, first come, first served. Dropping the future leaves the queue and loses no slot. There is no
    /// deadline: add one if you do not control the holders of slots.
    pub async fn acquire(&self) -> Slot {
        let permit = self.shared.permits.acquire().await.expect("nobody closes the semaphore");
        permit.forget();
        self.shared.hand_out()
    }

    /// Takes a slot if one is free and no other caller waits for one.
    pub fn try_acquire(&self) -> Option<Slot> {
        self.shared.permits.try_acquire().ok()?.forget();
        Some(self.shared.hand_out())
    }

    /// The number of free slots. A slot that was returned while a caller waits is that caller's, and not free.
    pub fn available(&self) -> usize {
        self.shared.permits.available_permits()
    }

    /// The number of slots, free or not, and their length.
    pub fn capacity(&self) -> Capacity {
        self.shared.capacity
    }

    /// Whether both share the same slots.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    /// The bytes of each slot.
    pub fn slot_bytes(&self) -> usize {
        self.shared.capacity.slot_bytes
    }

    /// The bytes of memory that a pool needs. Fails for a pool without slots, or with slots of no bytes.
    pub(crate) fn memory_len(capacity: Capacity) -> Result<usize, AllocError> {
        let Capacity { slots, slot_bytes } = capacity;
        if slots == 0 || slot_bytes == 0 {
            return Err(AllocError::EmptyPool { slots, slot_bytes });
        }
        // An overflow saturates, and the system refuses it.
        Ok(stride(slot_bytes).saturating_mul(slots))
    }

    /// Makes a pool of `memory`, which starts on a page and has at least `memory_len` bytes.
    pub(crate) fn cut(mut memory: Region, capacity: Capacity, engine: Option<Id>) -> Self {
        let Capacity { slots, slot_bytes } = capacity;
        let mut cut_slot = || {
            let mut region = memory.split_to(stride(slot_bytes)).expect("the memory is `slots` strides long");
            drop(region.split_off(slot_bytes)); // The end of the slot's last page stays unused.
            region
        };
        let free = Lock::new((0..slots).map(|_| cut_slot()).collect());
        let permits = Semaphore::new(slots);
        Self { shared: Arc::new(Shared { free, permits, capacity, engine }) }
    }

    fn in_host_memory(capacity: Capacity, engine: Option<Id>) -> Result<Self, AllocError> {
        let memory = HostMemory::lazy(u64::MAX).allocate(Self::memory_len(capacity)?)?;
        Ok(Self::cut(memory, capacity, engine))
    }
}

/// The distance from the start of one slot to that of the next: whole pages.
fn stride(slot_bytes: usize) -> usize {
    slot_bytes.checked_next_multiple_of(PAGE_BYTES).unwrap_or(usize::MAX)
}

impl fmt::Debug for SlotPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlotPool")
            .field("capacity", &self.shared.capacity)
            .field("available", &self.available())
            .finish()
    }
}

/// The state shared by a pool and its slots. Slots hold it, so the memory may outlive the last `SlotPool`.
pub(crate) struct Shared {
    /// The memory of free slots: at least one region for each permit that is free or just taken.
    free: Lock<Vec<Region>>,
    /// One permit per free slot. The semaphore keeps waiters in order.
    permits: Semaphore,
    capacity: Capacity,
    engine: Option<Id>,
}

impl Shared {
    pub(crate) fn engine(&self) -> Option<Id> {
        self.engine
    }

    /// Returns the memory of a slot to the pool. The memory is added before the permit, so that a permit always finds
    /// memory.
    pub(crate) fn put_back(&self, region: Region) {
        self.free.lock().push(region);
        self.permits.add_permits(1);
    }

    /// Makes the slot for a permit that the caller has taken and forgotten.
    fn hand_out(self: &Arc<Self>) -> Slot {
        let region = self.free.lock().pop();
        Slot::new(region.expect("put_back adds a region before its permit"), Arc::clone(self))
    }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::VecDeque,
        pin::Pin,
        task::{Context, Poll, Waker},
    };

    use bytes::Bytes;
    use proptest::{collection::vec, prelude::*};

    use super::*;

    fn new_pool(slots: usize, slot_bytes: usize) -> SlotPool {
        SlotPool::new(Capacity { slots, slot_bytes }).unwrap()
    }

    #[test]
    fn slots_are_aligned_and_do_not_overlap() {
        let pool = new_pool(3, 5000);
        let mut slots: Vec<Slot> = std::iter::from_fn(|| pool.try_acquire()).collect();
        assert_eq!(slots.len(), 3);
        for (i, slot) in slots.iter_mut().enumerate() {
            assert_eq!((slot.len(), slot.as_ptr().addr() % 4096), (5000, 0));
            slot.fill(i as u8 + 1);
        }
        assert!(
            slots
                .iter()
                .enumerate()
                .all(|(i, slot)| slot.iter().all(|&byte| byte == i as u8 + 1))
        );
    }

    #[test]
    fn a_pool_without_capacity_is_refused() {
        for (slots, slot_bytes) in [(0, 1), (1, 0)] {
            let refused = SlotPool::new(Capacity { slots, slot_bytes });
            assert!(matches!(refused, Err(AllocError::EmptyPool { .. })));
        }
    }

    #[test]
    fn a_pool_beyond_all_memory_is_refused() {
        for (slots, slot_bytes) in [(usize::MAX, 1), (1, usize::MAX), (1 << 40, 1 << 40)] {
            let refused = SlotPool::new(Capacity { slots, slot_bytes });
            assert!(matches!(refused, Err(AllocError::Os { .. })));
        }
    }

    #[test]
    fn frozen_bytes_hold_their_slot() {
        let pool = new_pool(1, 100);
        let mut slot = pool.try_acquire().unwrap();
        slot.fill(9);
        let bytes = slot.freeze(60);
        let part = bytes.slice(10..20);
        drop(bytes);
        assert_eq!((&part[..], pool.available()), (&[9; 10][..], 0));
        drop(part);
        assert_eq!(pool.available(), 1);
    }

    #[test]
    fn empty_frozen_bytes_hold_no_slot() {
        let pool = new_pool(1, 100);
        let empty = pool.try_acquire().unwrap().freeze(0);
        assert_eq!((empty.len(), pool.available()), (0, 1));
    }

    #[test]
    fn a_forfeited_slot_is_replaced() {
        let pool = new_pool(1, 5000);
        let mut slot = pool.try_acquire().unwrap();
        slot.fill(7);
        let leaked = slot.as_ptr();
        assert_eq!(slot.forfeit(), 5000);
        let replacement = pool.try_acquire().unwrap();
        assert_eq!(replacement.len(), 5000);
        assert_ne!(replacement.as_ptr(), leaked);
        assert!(replacement.iter().all(|&byte| byte == 0), "new memory, which no device writes");
    }

    #[test]
    fn a_slot_outlives_its_pool() {
        let mut slot = new_pool(1, 100).try_acquire().unwrap();
        slot.fill(3);
        assert_eq!(slot.freeze(100), [3; 100][..]);
    }

    #[derive(Debug, Clone)]
    enum Op {
        Acquire,
        TryAcquire,
        Release(usize),
        Freeze(usize),
        DropFrozen(usize),
        GiveUp(usize),
        GiveUpServed(usize),
    }

    fn any_op() -> impl Strategy<Value = Op> {
        prop_oneof![
            3 => Just(Op::Acquire),
            1 => Just(Op::TryAcquire),
            2 => any::<usize>().prop_map(Op::Release),
            1 => any::<usize>().prop_map(Op::Freeze),
            1 => any::<usize>().prop_map(Op::DropFrozen),
            1 => any::<usize>().prop_map(Op::GiveUp),
            1 => any::<usize>().prop_map(Op::GiveUpServed),
        ]
    }

    type Waiting = Pin<Box<dyn Future<Output = Slot>>>;

    fn poll(waiting: &mut Waiting) -> Poll<Slot> {
        waiting.as_mut().poll(&mut Context::from_waker(Waker::noop()))
    }

    /// A pool of `SLOTS`, and all holders and waiters of its slots, oldest waiter first.
    struct Model {
        pool: SlotPool,
        held: Vec<Slot>,
        frozen: Vec<Bytes>,
        waiting: VecDeque<Waiting>,
    }

    const SLOTS: usize = 3;

    impl Model {
        fn out(&self) -> usize {
            self.held.len() + self.frozen.len()
        }

        fn apply(&mut self, op: Op) {
            match op {
                Op::Acquire => {
                    let pool = self.pool.clone();
                    let mut waiting: Waiting = Box::pin(async move { pool.acquire().await });
                    match poll(&mut waiting) {
                        Poll::Ready(slot) => self.held.push(slot),
                        Poll::Pending => self.waiting.push_back(waiting),
                    }
                }
                Op::TryAcquire => self.held.extend(self.pool.try_acquire()),
                Op::Release(i) if !self.held.is_empty() => {
                    self.held.swap_remove(i % self.held.len());
                }
                Op::Freeze(i) if !self.held.is_empty() => {
                    self.frozen.push(self.held.swap_remove(i % self.held.len()).freeze(1));
                }
                Op::DropFrozen(i) if !self.frozen.is_empty() => {
                    self.frozen.swap_remove(i % self.frozen.len());
                }
                Op::GiveUp(i) if !self.waiting.is_empty() => {
                    self.waiting.remove(i % self.waiting.len());
                }
                // A released slot is assigned to the oldest waiter, which is dropped before it is polled.
                Op::GiveUpServed(i) if !self.held.is_empty() => {
                    self.held.swap_remove(i % self.held.len());
                    self.waiting.pop_front();
                }
                _ => {}
            }
        }

        /// Checks that free slots go to the oldest waiters only: all others are still pending, the youngest polled
        /// first.
        fn serve(&mut self) {
            let free = SLOTS - self.out();
            let served = free.min(self.waiting.len());
            for i in (served..self.waiting.len()).rev() {
                assert!(poll(&mut self.waiting[i]).is_pending(), "waiter {i} jumped the queue");
            }
            for mut waiting in self.waiting.drain(..served) {
                match poll(&mut waiting) {
                    Poll::Ready(slot) => self.held.push(slot),
                    Poll::Pending => panic!("a slot is free, and the oldest waiter did not get it"),
                }
            }
        }
    }

    proptest! {
        #[test]
        fn no_slot_is_lost_and_nobody_jumps_the_queue(ops in vec(any_op(), 0..80)) {
            let (held, frozen, waiting) = Default::default();
            let mut model = Model { pool: new_pool(SLOTS, 64), held, frozen, waiting };
            for op in ops {
                model.apply(op);
                model.serve();
                prop_assert!(model.out() <= SLOTS);
                prop_assert_eq!(model.pool.available(), SLOTS - model.out());
            }
            let pool = model.pool.clone();
            drop(model);
            prop_assert_eq!(pool.available(), SLOTS);
        }
    }
}
