use crate::Lock;
use std::{
    collections::BTreeMap,
    fmt, io,
    sync::{Arc, Condvar, PoisonError},
    thread,
    time::{Duration, Instant},
};

use crate::{
    engine::{Completion, CopyError},
    slot::Slot,
};

/// The waiters for an engine's copies, each with a deadline that holds even while a driver call blocks the engine's
/// thread.
///
/// A separate thread watches the deadlines. It sleeps until the earliest one that it knows of, so most copies that end
/// in time do not wake it.
#[derive(Debug)]
pub(super) struct Waiters {
    shared: Arc<Shared>,
}

struct Shared {
    device: Arc<str>,
    timeout: Duration,
    state: Lock<State>,
    woken: Condvar,
}

#[derive(Default)]
struct State {
    next_id: u64,
    /// The waiters by id, which is the order of their deadlines too. One for each copy, and each copy owns a slot,
    /// which bounds them.
    waiting: BTreeMap<u64, Waiter>,
    /// Whether the watching thread has no deadline to wake up for.
    asleep: bool,
    closed: bool,
}

struct Waiter {
    until: Instant,
    completion: Completion,
}

impl Waiters {
    /// Starts the watching thread, which reports a copy as timed out after `timeout`.
    pub(super) fn watch(device: Arc<str>, timeout: Duration) -> io::Result<Self> {
        let shared = Shared { device, timeout, state: Lock::default(), woken: Condvar::new() };
        let shared = Arc::new(shared);
        let watcher = Arc::clone(&shared);
        thread::Builder::new()
            .name("relay-patience".into())
            .spawn(move || watcher.watch())?;
        Ok(Self { shared })
    }

    /// Registers a waiter, and returns the handle for the report to it.
    pub(super) fn add(&self, completion: Completion) -> WaiterHandle {
        let mut state = self.shared.state.lock();
        let id = state.next_id;
        state.next_id += 1;
        state
            .waiting
            .insert(id, Waiter { until: Instant::now() + self.shared.timeout, completion });
        if std::mem::take(&mut state.asleep) {
            self.shared.woken.notify_one();
        }
        drop(state);
        WaiterHandle { id, shared: Arc::clone(&self.shared) }
    }
}

impl Drop for Waiters {
    fn drop(&mut self) {
        self.shared.state.lock().closed = true;
        self.shared.woken.notify_one();
    }
}

/// The engine's handle of a waiter. Dropping it reports that the engine has stopped.
#[derive(Debug)]
pub(super) struct WaiterHandle {
    id: u64,
    shared: Arc<Shared>,
}

impl WaiterHandle {
    /// Reports the end of the copy. If the waiter was removed at its deadline, the slot returns to its pool.
    pub(super) fn finish(self, end: Result<Slot, CopyError>) {
        match self.shared.take(self.id) {
            Some(waiter) => waiter.completion.finish(end),
            None => drop(end),
        }
    }
}

impl Drop for WaiterHandle {
    fn drop(&mut self) {
        drop(self.shared.take(self.id));
    }
}

impl Shared {
    fn take(&self, id: u64) -> Option<Waiter> {
        let mut state = self.state.lock();
        let waiter = state.waiting.remove(&id);
        if state.closed && state.waiting.is_empty() {
            self.woken.notify_one();
        }
        waiter
    }

    fn watch(&self) {
        let mut state = self.state.lock();
        while !(state.closed && state.waiting.is_empty()) {
            let now = Instant::now();
            let oldest = state.waiting.first_key_value().map(|(_, waiter)| waiter.until);
            state = match oldest {
                None => {
                    state.asleep = true;
                    self.woken.wait(state).unwrap_or_else(PoisonError::into_inner)
                }
                Some(until) if until <= now => {
                    let late = state.waiting.pop_first();
                    drop(state); // Reporting runs the waiter's code, which must not find the lock held.
                    late.into_iter().for_each(|(_, waiter)| self.report_late(waiter));
                    self.state.lock()
                }
                Some(until) => {
                    let woken = self.woken.wait_timeout(state, until - now);
                    woken.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    fn report_late(&self, waiter: Waiter) {
        let (device, waited) = (self.device.to_string(), self.timeout);
        waiter.completion.finish(Err(CopyError::TimedOut { device, waited }));
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waiters")
            .field("device", &self.device)
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Capacity, SlotPool, engine::Copying};

    const LONG_TIMEOUT: Duration = Duration::from_secs(3600);

    fn new_waiters(timeout: Duration) -> Waiters {
        Waiters::watch("cuda:9".into(), timeout).unwrap()
    }

    #[tokio::test]
    async fn the_end_of_a_copy_is_reported() {
        let pool = SlotPool::new(Capacity { slots: 1, slot_bytes: 8 }).unwrap();
        let waiters = new_waiters(LONG_TIMEOUT);
        let (completion, copying) = Copying::pair();
        let handle = waiters.add(completion);
        handle.finish(Ok(pool.try_acquire().unwrap()));
        assert!(copying.await.is_ok());
    }

    #[tokio::test]
    async fn a_dropped_handle_reports_that_the_engine_has_stopped() {
        let waiters = new_waiters(LONG_TIMEOUT);
        let (completion, copying) = Copying::pair();
        drop(waiters.add(completion));
        assert_eq!(copying.await.unwrap_err(), CopyError::EngineStopped);
    }

    #[tokio::test]
    async fn a_copy_times_out_and_its_slot_still_returns() {
        let pool = SlotPool::new(Capacity { slots: 1, slot_bytes: 8 }).unwrap();
        let waited = Duration::from_millis(2);
        let waiters = new_waiters(waited);
        for _ in 0..3 {
            let (completion, copying) = Copying::pair();
            let handle = waiters.add(completion);
            let slot = pool.try_acquire().unwrap();
            let device = "cuda:9".into();
            assert_eq!(copying.await.unwrap_err(), CopyError::TimedOut { device, waited });
            handle.finish(Ok(slot));
            assert_eq!(pool.available(), 1);
        }
    }

    #[test]
    fn the_thread_ends_with_the_last_handle() {
        let waiters = new_waiters(LONG_TIMEOUT);
        let (completion, _copying) = Copying::pair();
        let handle = waiters.add(completion);
        let shared = Arc::downgrade(&waiters.shared);
        drop(waiters);
        assert!(shared.strong_count() > 0);
        drop(handle);
        while shared.strong_count() > 0 {
            thread::yield_now();
        }
    }
}
