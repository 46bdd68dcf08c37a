//! Workers: threads for CPU-bound work.

use std::sync::OnceLock;
use tokio::sync::Semaphore;

/// Runs hashing, encoding and decoding away from the async executor, whose thread must stay free for packets: a chunk of
/// 4 MiB takes zstd three milliseconds, in which a lane at line rate receives ten thousand packets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Workers {
    /// On the blocking threads of the tokio runtime, at most one per processor at once. Further work queues; cancelled
    /// work in the queue costs nothing.
    #[default]
    Threads,
    /// In place. For simulations, where the order of events must follow from the seed alone.
    Inline,
}

/// The most bytes processed in place. Hashing them takes 4 microseconds, decoding them 10 to 40; another thread takes
/// 20 to wake.
const IN_PLACE_BYTES: usize = 64 << 10;

impl Workers {
    /// Like [`run`](Self::run), for `work` that takes about as long as decoding `bytes` does, or less: little work is done in place.
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

    /// Starts `work` without a waiter, such as unmapping memory, which takes milliseconds for gigabytes.
    pub fn begin(self, work: impl FnOnce() + Send + 'static) {
        match self {
            Self::Inline => work(),
            Self::Threads => match tokio::runtime::Handle::try_current() {
                Ok(runtime) => drop(runtime.spawn_blocking(work)),
                Err(_) => work(), // As when the runtime is gone, and this drops what is left.
            },
        }
    }

    /// Runs `work` to its end, even when the future is dropped, and returns what it returns.
    pub async fn run<T: Send + 'static>(self, work: impl FnOnce() -> T + Send + 'static) -> T {
        match self {
            Self::Inline => work(),
            Self::Threads => run_on_thread(work).await,
        }
    }
}

async fn run_on_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let permit = permits().acquire().await.expect("nobody closes the semaphore");
    let done = tokio::task::spawn_blocking(move || {
        let _permit = permit;
        work()
    });
    match done.await {
        Ok(done) => done,
        Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
        // Blocking work is never aborted; it is only refused when the runtime itself ends, and then nothing that waits
        // for it will be polled again.
        Err(_) => std::future::pending().await,
    }
}

/// One permit per processor, for the whole process: several servers and clients share its processors too.
fn permits() -> &'static Semaphore {
    static PERMITS: OnceLock<Semaphore> = OnceLock::new();
    PERMITS.get_or_init(|| Semaphore::new(std::thread::available_parallelism().map_or(2, usize::from)))
}
