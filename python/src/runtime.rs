//! The one tokio runtime of the process, on a thread of its own.

use crate::{errors::Kind, logging};
use pyo3::prelude::*;
use std::{io, sync::OnceLock, thread};
use tokio::runtime::{Builder, Handle};

/// The runtime's handle, and the process that its thread runs in.
struct Runtime {
    handle: Handle,
    pid: u32,
}

static RUNTIME: OnceLock<Result<Runtime, String>> = OnceLock::new();

/// The runtime, started at the first call.
///
/// It has one thread, which never waits for the interpreter: a lane is one task, and a second thread would only add
/// hand-overs. Further lanes of a session run on other threads.
///
/// # Errors
/// `ForkError` in a forked child of the process that started the runtime; `TensorRelayError` when no thread can be
/// started.
pub(crate) fn handle(py: Python<'_>) -> PyResult<&'static Handle> {
    let started = RUNTIME.get_or_init(|| {
        logging::begin(py);
        start().map_err(|error| format!("cannot start a thread: {error}"))
    });
    match started {
        Ok(runtime) if runtime.pid == std::process::id() => Ok(&runtime.handle),
        Ok(runtime) => Err(forked(py, runtime.pid)),
        Err(error) => Err(Kind::Other.raise(py, error)),
    }
}

fn start() -> io::Result<Runtime> {
    let runtime = Builder::new_current_thread()
        .enable_all()
        .thread_name("tensor-relay-work")
        .build()?;
    let handle = runtime.handle().clone();
    thread::Builder::new()
        .name("tensor-relay".into())
        .spawn(move || runtime.block_on(std::future::pending::<()>()))?;
    Ok(Runtime { handle, pid: std::process::id() })
}

/// The `ForkError` of this process, which was forked from `parent` after the runtime had started there.
pub(crate) fn forked(py: Python<'_>, parent: u32) -> PyErr {
    let message = format!(
        "process {} was forked from {parent} after tensor_relay had started there, and threads do not survive a fork: \
         fork first, or start processes by `spawn` (`multiprocessing_context=\"spawn\"` of a PyTorch DataLoader, \
         `multiprocessing.get_context(\"spawn\")`)",
        std::process::id()
    );
    Kind::Fork.raise(py, message)
}

/// A value whose threads live in the process that created it. After a fork, the child's copy cannot be used and is
/// never dropped: its locks may be held by threads that the child does not have.
pub(crate) struct ProcessLocal<T> {
    pid: u32,
    /// `None` only during `drop`.
    value: Option<T>,
}

impl<T> ProcessLocal<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { pid: std::process::id(), value: Some(value) }
    }

    /// Whether this process created the value.
    pub(crate) fn is_usable(&self) -> bool {
        self.pid == std::process::id()
    }

    /// The value.
    ///
    /// # Errors
    /// `ForkError` in a forked child.
    pub(crate) fn get(&self, py: Python<'_>) -> PyResult<&T> {
        match &self.value {
            Some(value) if self.is_usable() => Ok(value),
            _ => Err(forked(py, self.pid)),
        }
    }
}

impl<T> Drop for ProcessLocal<T> {
    fn drop(&mut self) {
        if !self.is_usable() {
            std::mem::forget(self.value.take());
        }
    }
}
