//! [`LaneThreads`]: a pool of threads for lanes, each with a tokio runtime, and the placement of lanes on them.

use crate::network::moving::TaskMover;
use std::{
    fmt, io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};
use tensor_relay_device::Lock;
use tokio::{
    runtime::{Builder, Handle},
    sync::oneshot,
};

/// A thread that runs only lanes. Dropping this stops the thread and drops its tasks.
pub struct LaneThread {
    handle: Handle,
    /// The number of lanes on it.
    lanes: AtomicUsize,
    /// Dropping it stops the thread.
    _stop: oneshot::Sender<()>,
}

impl LaneThread {
    /// Starts a thread called `name`.
    ///
    /// # Errors
    /// The system's error when no thread can be started.
    pub(crate) fn start(name: &str) -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel();
        thread::Builder::new().name(name.into()).spawn(move || {
            // Returns an error when the sender is dropped; nothing is ever sent.
            let _ = runtime.block_on(stopped);
        })?;
        Ok(Self { handle, lanes: AtomicUsize::new(0), _stop: stop })
    }

    /// The runtime for its tasks.
    pub(crate) fn handle(&self) -> &Handle {
        &self.handle
    }
}

/// A lane's slot on a thread. The thread counts the lane until the slot is dropped. All clones of the lane share the
/// slot.
#[derive(Debug)]
pub(crate) struct ThreadSlot(Arc<LaneThread>);

impl ThreadSlot {
    pub(crate) fn new(thread: Arc<LaneThread>) -> Self {
        thread.lanes.fetch_add(1, Ordering::Relaxed);
        Self(thread)
    }

    /// The runtime for the lane's tasks.
    pub(crate) fn handle(&self) -> &Handle {
        self.0.handle()
    }
}

impl Drop for ThreadSlot {
    fn drop(&mut self) {
        self.0.lanes.fetch_sub(1, Ordering::Relaxed);
    }
}

impl fmt::Debug for LaneThread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LaneThread")
            .field("runtime", &self.handle.id())
            .finish_non_exhaustive()
    }
}

/// The thread pool for the further lanes of a server's sessions.
///
/// Threads are started on demand, so a server whose sessions have one lane each starts none. Started threads are kept,
/// and sleep without lanes.
#[derive(Debug)]
pub struct LaneThreads {
    max: usize,
    threads: Lock<Vec<Arc<LaneThread>>>,
}

impl LaneThreads {
    /// A pool of at most `max` threads. If `max` is 0, lanes stay on the runtime that accepted them.
    pub fn new(max: usize) -> Self {
        Self { max, threads: Lock::default() }
    }

    /// Takes a slot on the thread with the fewest lanes, or on a new one if all have lanes and more threads are
    /// allowed. `None` if there is no thread, and none is allowed or can be started.
    pub(crate) fn take_slot(&self) -> Option<ThreadSlot> {
        let mut threads = self.threads.lock();
        let lanes: Vec<usize> = threads.iter().map(|thread| thread.lanes.load(Ordering::Relaxed)).collect();
        let thread = match place(&lanes, self.max) {
            Placement::None => None,
            Placement::Existing(index) => Some(Arc::clone(&threads[index])),
            Placement::New => match LaneThread::start(&format!("lanes-{}", lanes.len() + 1)) {
                Ok(thread) => {
                    let thread = Arc::new(thread);
                    threads.push(Arc::clone(&thread));
                    Some(thread)
                }
                Err(error) => {
                    tracing::warn!(%error, "A thread for a further lane cannot be started; the lane shares a thread.");
                    threads.first().cloned()
                }
            },
        };
        // Counted under the lock, before the next lane is placed.
        thread.map(ThreadSlot::new)
    }
}

/// The placement of the next lane.
#[derive(Debug, PartialEq, Eq)]
enum Placement {
    /// On the thread with this index.
    Existing(usize),
    /// On a new thread.
    New,
    /// On no thread, since none is allowed.
    None,
}

/// The placement of the next lane, given the `lanes` of each thread and at most `max` threads.
fn place(lanes: &[usize], max: usize) -> Placement {
    let least = lanes.iter().copied().enumerate().min_by_key(|(_, lanes)| *lanes);
    match least {
        Some((index, 0)) => Placement::Existing(index),
        _ if lanes.len() < max => Placement::New,
        Some((index, _)) => Placement::Existing(index),
        None => Placement::None,
    }
}

/// Moves the connection of `mover` to the least used of `threads`; returns its slot there.
pub(crate) fn move_to_thread(mover: &TaskMover, threads: &LaneThreads) -> Option<ThreadSlot> {
    let slot = threads.take_slot()?;
    mover.move_to(slot.handle().clone());
    Some(slot)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Lanes spread evenly: no thread gets another lane while one has fewer or could be started.
        #[test]
        fn lanes_spread_evenly(lanes in prop::collection::vec(0usize..5, 0..9), max in 0usize..9) {
            match place(&lanes, max) {
                Placement::Existing(index) => {
                    prop_assert!(lanes.iter().all(|other| *other >= lanes[index]));
                    prop_assert!(lanes[index] == 0 || lanes.len() >= max);
                }
                Placement::New => prop_assert!(lanes.len() < max && !lanes.contains(&0)),
                Placement::None => prop_assert!(lanes.is_empty() && max == 0),
            }
        }
    }

    #[test]
    fn threads_are_started_on_demand_and_then_shared() {
        let threads = LaneThreads::new(2);
        let id = |slot: &ThreadSlot| slot.handle().id();
        let (first, second) = (threads.take_slot().unwrap(), threads.take_slot().unwrap());
        assert_ne!(id(&first), id(&second));
        let also_second = Arc::clone(&second.0);
        let third = threads.take_slot().unwrap();
        assert_eq!(id(&third), id(&first));
        drop(second);
        assert_ne!(id(&threads.take_slot().unwrap()), id(&first), "the second thread is free again");
        drop(also_second);
        assert!(LaneThreads::new(0).take_slot().is_none());
    }

    /// A thread ends when its owner is dropped, and drops its tasks.
    #[test]
    fn a_thread_ends_with_its_owner() {
        let thread = LaneThread::start("test").unwrap();
        let (held, mut dropped) = oneshot::channel::<()>();
        let (running, began) = std::sync::mpsc::channel();
        thread.handle().spawn(async move {
            running.send(thread::current().name().map(str::to_owned)).unwrap();
            std::future::pending::<()>().await;
            drop(held);
        });
        assert_eq!(began.recv().unwrap().as_deref(), Some("test"));
        assert!(dropped.try_recv().is_err());
        drop(thread);
        assert!(dropped.blocking_recv().is_err());
    }
}
