//! [`UntilClosed`]: what an object holds until the program closes it.

use crate::{errors::Kind, runtime::ProcessLocal};
use pyo3::{prelude::*, sync::MutexExt};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The state of an object until it is closed, in the process that made it.
pub(crate) struct UntilClosed<T> {
    state: ProcessLocal<Mutex<Option<T>>>,
    /// The message of `ClosedError`, with what to do instead.
    closed: &'static str,
}

impl<T> UntilClosed<T> {
    pub(crate) fn new(state: T, closed: &'static str) -> Self {
        Self { state: ProcessLocal::new(Mutex::new(Some(state))), closed }
    }

    /// The result of `action` with the state, which is locked meanwhile.
    ///
    /// # Errors
    /// `ClosedError` once it is closed; `ForkError` in a forked child; those of `action`.
    pub(crate) fn with<R>(&self, py: Python<'_>, action: impl FnOnce(&mut T) -> PyResult<R>) -> PyResult<R> {
        match &mut *self.lock(py)? {
            Some(state) => action(state),
            None => Err(Kind::Closed.raise(py, self.closed)),
        }
    }

    /// The state; `None` once it is closed. Waiting for the lock releases the GIL, so that the thread that holds the lock
    /// can use Python.
    ///
    /// # Errors
    /// `ForkError` in a forked child.
    pub(crate) fn lock(&self, py: Python<'_>) -> PyResult<MutexGuard<'_, Option<T>>> {
        Ok(self.state.get(py)?.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner))
    }
}
