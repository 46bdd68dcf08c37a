//! The interpreter's exit. Afterwards no task of this package may run that releases a user's objects: their library may
//! request the GIL, and CPython before 3.14 then ends the thread by unwinding its stack, which aborts the process.

use crate::{gpu, interpreter};
use pyo3::prelude::*;
use std::{
    sync::OnceLock,
    thread::{self, ThreadId},
    time::{Duration, Instant},
};

/// The maximum time that the exit waits for the return of lent memory, which calls the code of its library.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// The thread that ends the interpreter, set when the exit begins.
static ENDING: OnceLock<ThreadId> = OnceLock::new();

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

/// Waits until the interpreter thread has run its tasks. Called right before the interpreter ends. Returns whether that
/// happened within [`EXIT_TIMEOUT`].
#[pyfunction]
pub(crate) fn finish(py: Python<'_>) -> bool {
    py.detach(|| {
        let finished = interpreter::finish(Instant::now() + EXIT_TIMEOUT);
        gpu::close_all(); // After lent memory has been returned.
        finished
    })
}
