//! [`Workers`]: threads for CPU-bound work.

use rustix::{
    process::setpriority_process,
    time::{ClockId, clock_gettime},
};
use std::{
    io,
    panic::resume_unwind,
    sync::OnceLock,
    thread::{self, Scope},
    time::Duration,
};
use tensor_relay_device::Lock;
use tokio::sync::Semaphore;

/// Runs hashing, encoding and decoding off the async executor, whose thread must stay free for packets: zstd takes
/// three milliseconds for a chunk of 4 MiB, in which a lane at 10 Gbit/s receives 2,500 packets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Workers {
    /// On blocking threads of the tokio runtime, at most one per processor. Further work waits in a queue; work that is
    /// cancelled in the queue costs nothing.
    #[default]
    Threads,
    /// In place. For simulations, where the order of events must follow from the seed alone.
    Inline,
}

/// The maximum number of bytes processed in place. Hashing them takes 4 microseconds, decoding 10 to 40; waking another
/// thread takes 20.
pub const IN_PLACE_BYTES: usize = 64 << 10;

impl Workers {
    /// Like [`run`](Self::run), but runs `work` in place if `bytes` is small. `work` must take at most about as long as
    /// decoding `bytes`.
    pub async fn run_over<T: Send + 'static>(
        self,
        bytes: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> T {
        match bytes {
            ..=IN_PLACE_BYTES => work(),
            _ => self.run(work).await,
        }
    }

    /// Runs `work` without waiting for its end, for example unmapping gigabytes of memory, which takes milliseconds.
    /// Does not count against the limit of one thread per processor. With [`Inline`](Self::Inline), and without a
    /// runtime, `work` runs in place.
    pub fn spawn(self, work: impl FnOnce() + Send + 'static) {
        match self {
            Self::Inline => work(),
            Self::Threads => match tokio::runtime::Handle::try_current() {
                Ok(runtime) => drop(runtime.spawn_blocking(work)),
                Err(_) => work(), // For example, in the drop of a value that outlives the runtime.
            },
        }
    }

    /// Begins `work` on a thread of its own and of the lowest priority, for processors that have nothing else to do. Do not
    /// hold a lock in it while it computes: others would wait until there is such a processor. The end of the process
    /// does not wait for it.
    ///
    /// # Errors
    /// Those of the system, if it has no thread.
    pub fn spawn_idle(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let run = move || {
            let _ = setpriority_process(None, 19); // The thread's own. Refused only by a sandbox.
            work();
        };
        thread::Builder::new().name(name.into()).spawn(run).map(drop)
    }

    /// The most threads of [`each`](Self::each).
    pub fn threads(self) -> usize {
        match self {
            Self::Threads => processors(),
            Self::Inline => 1,
        }
    }

    /// Does `work` with every item, on the calling thread and others of its own: at most one for each processor that the
    /// process may use, and for each item. Blocks.
    ///
    /// # Errors
    /// An error of `work`; the items that no thread has taken by then are dropped.
    pub fn each<T: Send, E: Send>(
        self,
        items: Vec<T>,
        work: impl Fn(T) -> Result<(), E> + Sync,
    ) -> Result<(), E> {
        if self == Self::Inline || items.len() <= 1 {
            return items.into_iter().try_for_each(work);
        }
        let threads = self.threads().min(items.len());
        let items = Lock::new(items.into_iter());
        let take = || items.lock().next();
        let run = || {
            let outcome = std::iter::from_fn(take).try_for_each(&work);
            outcome.inspect_err(|_| items.lock().by_ref().for_each(drop))
        };
        thread::scope(|scope: &Scope<'_, '_>| {
            let begin = |_| thread::Builder::new().name("relay-copy".into()).spawn_scoped(scope, run).ok();
            let threads: Vec<_> = (1..threads).filter_map(begin).collect();
            let outcome = run();
            let ends = threads
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)));
            ends.fold(outcome, Result::and)
        })
    }

    /// The processor time that this process has used; zero in simulations, whose events follow from the seed alone.
    pub fn processor_time(self) -> Duration {
        let clock = clock_gettime(ClockId::ProcessCPUTime);
        self.real(Duration::new(clock.tv_sec as u64, clock.tv_nsec as u32))
    }

    /// A measured time; zero in simulations.
    pub(crate) fn real<T: Default>(self, time: T) -> T {
        match self {
            Self::Threads => time,
            Self::Inline => T::default(),
        }
    }

    /// Runs `work` and returns its result. Once begun it runs to completion, even if the future is dropped.
    pub async fn run<T: Send + 'static>(self, work: impl FnOnce() -> T + Send + 'static) -> T {
        match self {
            Self::Inline => work(),
            Self::Threads => run_on_thread(work).await,
        }
    }
}

async fn run_on_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let permit = permits().acquire().await.expect("the semaphore is never closed");
    let working = tokio::task::spawn_blocking(move || {
        let _permit = permit;
        work()
    });
    match working.await {
        Ok(output) => output,
        Err(error) if error.is_panic() => resume_unwind(error.into_panic()),
        // Blocking work is never aborted. It is refused only when the runtime shuts down; then this task will not be
        // polled again.
        Err(_) => std::future::pending().await,
    }
}

/// One permit per processor for the whole process, since its servers and clients share the processors.
fn permits() -> &'static Semaphore {
    static PERMITS: OnceLock<Semaphore> = OnceLock::new();
    PERMITS.get_or_init(|| Semaphore::new(processors()))
}

/// The processors that this process may use.
fn processors() -> usize {
    thread::available_parallelism().map_or(2, usize::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::getpriority_process;
    use std::{sync::mpsc, time::Duration};

    #[test]
    fn each_item_is_taken_once() {
        for workers in [Workers::Inline, Workers::Threads] {
            for count in [0, 1, 2, 1000] {
                let taken = Lock::new(vec![]);
                let work = |item: usize| {
                    taken.lock().push(item);
                    Ok::<(), ()>(())
                };
                workers.each((0..count).collect(), work).unwrap();
                let mut taken = taken.into_inner();
                taken.sort_unstable();
                assert_eq!(taken, (0..count).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn after_an_error_no_more_items_are_taken() {
        for workers in [Workers::Inline, Workers::Threads] {
            let taken = Lock::new(0);
            let work = |_| {
                *taken.lock() += 1;
                Err("requested")
            };
            assert_eq!(workers.each((0..1000).collect(), work), Err("requested"));
            assert!(taken.into_inner() <= processors());
        }
    }

    #[test]
    fn idle_work_has_the_lowest_priority() {
        let (sender, receiver) = mpsc::channel();
        let work = move || sender.send(getpriority_process(None)).unwrap();
        Workers::spawn_idle("idle", work).unwrap();
        assert_eq!(receiver.recv_timeout(Duration::from_secs(60)).unwrap(), Ok(19));
        assert_ne!(getpriority_process(None), Ok(19), "the caller keeps its own");
    }
}
