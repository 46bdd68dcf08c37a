//! Waiting for the runtime from a Python thread, without the GIL.

use crate::runtime;
use pyo3::{exceptions::PyValueError, prelude::*};
use std::{
    pin::pin,
    time::{Duration, Instant},
};

/// The maximum delay of Ctrl-C: the interval at which signals are checked. It does not delay results.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(50);

/// The longest timeout: longer ones would overflow the clock.
const TIMEOUT_MAX: Duration = Duration::from_secs(10 * 365 * 24 * 3_600);

/// Runs `future` to its end on this thread, while the runtime's thread serves the network. Other Python threads run
/// meanwhile.
///
/// # Errors
/// An exception of a signal handler, e.g. `KeyboardInterrupt`, which drops `future`; those of [`runtime::handle`].
pub(crate) fn wait<F>(py: Python<'_>, future: F) -> PyResult<F::Output>
where
    F: Future + Send,
    F::Output: Send,
{
    let handle = runtime::handle(py)?;
    let mut future = pin!(future);
    loop {
        let turn = py.detach(|| {
            handle.block_on(async { tokio::time::timeout(SIGNAL_INTERVAL, future.as_mut()).await })
        });
        match turn {
            Ok(output) => return Ok(output),
            Err(_) => py.check_signals()?,
        }
    }
}

/// As [`wait`], for at most `timeout`. When it passes first, `future` is dropped and the result is `None`.
///
/// # Errors
/// As [`wait`].
pub(crate) fn wait_at_most<F>(
    py: Python<'_>,
    timeout: Option<Duration>,
    future: F,
) -> PyResult<Option<F::Output>>
where
    F: Future + Send,
    F::Output: Send,
{
    wait(py, at_most(timeout, future))
}

/// The output of `future`, or `None` once `timeout` passed. An output that is ready is returned even after the timeout.
pub(crate) async fn at_most<F: Future>(timeout: Option<Duration>, future: F) -> Option<F::Output> {
    match timeout {
        Some(timeout) => tokio::time::timeout(timeout, future).await.ok(),
        None => Some(future.await),
    }
}

/// A timeout in seconds, as Python users pass it; `None` and infinity mean no deadline.
///
/// # Errors
/// `ValueError` for a negative number or NaN.
pub(crate) fn seconds(name: &str, seconds: Option<f64>) -> PyResult<Option<Duration>> {
    match seconds {
        None => Ok(None),
        Some(f64::INFINITY) => Ok(None),
        Some(seconds) if seconds > TIMEOUT_MAX.as_secs_f64() => Ok(Some(TIMEOUT_MAX)),
        Some(seconds) => match Duration::try_from_secs_f64(seconds) {
            Ok(duration) => Ok(Some(duration)),
            Err(_) => {
                Err(PyValueError::new_err(format!("{name} is {seconds}, but must be in seconds, 0 or more")))
            }
        },
    }
}

/// As [`seconds`], where a deadline is required: infinity becomes [`TIMEOUT_MAX`].
///
/// # Errors
/// `ValueError` for a negative number or NaN.
pub(crate) fn finite_seconds(name: &str, value: f64) -> PyResult<Duration> {
    Ok(seconds(name, Some(value))?.unwrap_or(TIMEOUT_MAX))
}

/// The end of `timeout` from now; `None` for no deadline.
pub(crate) fn deadline(timeout: Option<Duration>) -> Option<Instant> {
    timeout.map(|timeout| Instant::now() + timeout)
}
