//! The interpreter's exit. Afterwards no thread of this package may request the GIL: CPython before 3.14 ends such a
//! thread by unwinding its stack, which aborts the process in Rust code, and later versions suspend it for ever.

use crate::{gpu, interpreter, runtime};
use pyo3::prelude::*;
use std::{
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    thread::{self, ThreadId},
    time::{Duration, Instant},
};

/// The maximum time that the exit waits for other threads, which may be in code of the user: returning lent memory
/// calls the code of its library.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// The interval at which the exit checks whether the other threads' calls have returned.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// The thread that ends the interpreter, set when the exit begins.
static ENDING: OnceLock<ThreadId> = OnceLock::new();

/// The number of calls that have released the GIL and will request it again.
static DETACHED: AtomicUsize = AtomicUsize::new(0);

/// Runs `call` without the GIL. The interpreter's exit waits for it.
pub(crate) fn detach<T: Send>(py: Python<'_>, call: impl FnOnce() -> T + Send) -> T {
    /// Counts the call until the thread holds the GIL again, also when the call panics.
    struct Detached;
    impl Drop for Detached {
        fn drop(&mut self) {
            DETACHED.fetch_sub(1, SeqCst);
        }
    }
    DETACHED.fetch_add(1, SeqCst);
    let _detached = Detached;
    py.detach(call)
}

/// Records that this thread ends the interpreter, before it closes relays and clients. Any other Python thread that
/// still runs is a daemon thread: Python has waited for the others.
#[pyfunction]
pub(crate) fn prepare_exit() {
    let _ = ENDING.set(thread::current().id());
}

/// Whether the interpreter is exiting, on another thread.
pub(crate) fn ends_elsewhere() -> bool {
    ENDING.get().is_some_and(|ending| *ending != thread::current().id())
}

/// Waits until daemon threads have returned from their calls, whose objects are closed, and until the interpreter
/// thread has run its tasks. Called right before the interpreter ends. Returns whether both happened within
/// [`EXIT_TIMEOUT`].
#[pyfunction]
pub(crate) fn finish(py: Python<'_>) -> bool {
    let deadline = Instant::now() + EXIT_TIMEOUT;
    py.detach(|| {
        let returned = daemon_threads_return(deadline); // They may add tasks.
        let finished = interpreter::finish(deadline);
        gpu::close_all(); // After lent memory has been returned.
        returned && finished
    })
}

fn daemon_threads_return(deadline: Instant) -> bool {
    while DETACHED.load(SeqCst) > 0 && !runtime::is_forked() {
        if Instant::now() > deadline {
            return false;
        }
        thread::sleep(POLL_INTERVAL);
    }
    true
}
