//! [`Workers`]: threads for CPU-bound work.

use rustix::time::{ClockId, clock_gettime};
use std::{sync::OnceLock, time::Duration};
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
const IN_PLACE_BYTES: usize = 64 << 10;

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
        Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
        // Blocking work is never aborted. It is refused only when the runtime shuts down; then this task will not be
        // polled again.
        Err(_) => std::future::pending().await,
    }
}

/// One permit per processor for the whole process, since its servers and clients share the processors.
fn permits() -> &'static Semaphore {
    static PERMITS: OnceLock<Semaphore> = OnceLock::new();
    PERMITS.get_or_init(|| Semaphore::new(std::thread::available_parallelism().map_or(2, usize::from)))
}
