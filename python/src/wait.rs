//! Waiting for the runtime from a Python thread, without the GIL.

use crate::runtime;
use pyo3::{exceptions::PyValueError, prelude::*};
use std::{
    pin::pin,
    time::{Duration, Instant},
};

/// The maximum delay of Ctrl-C: the interval at which signals are checked. It does not delay results.
const SIGNALS: Duration = Duration::from_millis(50);

/// The longest deadline that is one: longer ones would overflow the clock.
const LONGEST: Duration = Duration::from_secs(10 * 365 * 24 * 3_600);

/// Runs `future` to its end on this thread, while the runtime's thread does the network. Other Python threads run
/// meanwhile.
///
/// # Errors
/// An exception of a signal handler, e.g. `KeyboardInterrupt`, which drops `future`; or as [`runtime::handle`].
pub(crate) fn wait<F>(py: Python<'_>, future: F) -> PyResult<F::Output>
where
    F: Future + Send,
    F::Output: Send,
{
    let handle = runtime::handle(py)?;
    let mut future = pin!(future);
    loop {
        let turn =
            py.detach(|| handle.block_on(async { tokio::time::timeout(SIGNALS, future.as_mut()).await }));
        match turn {
            Ok(output) => return Ok(output),
            Err(_) => py.check_signals()?,
        }
    }
}

/// The same for at most `timeout`; `None` when that passed first, and `future` is dropped.
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

/// `future`, or `None` once `timeout` passed. A result that is there is taken, however late.
pub(crate) async fn at_most<F: Future>(timeout: Option<Duration>, future: F) -> Option<F::Output> {
    match timeout {
        Some(timeout) => tokio::time::timeout(timeout, future).await.ok(),
        None => Some(future.await),
    }
}

/// Seconds as Python gives them; `None`, and infinity, for no deadline.
///
/// # Errors
/// `ValueError` for what is no length of time.
pub(crate) fn seconds(name: &str, seconds: Option<f64>) -> PyResult<Option<Duration>> {
    match seconds {
        None => Ok(None),
        Some(f64::INFINITY) => Ok(None),
        Some(seconds) if seconds > LONGEST.as_secs_f64() => Ok(Some(LONGEST)),
        Some(seconds) => match Duration::try_from_secs_f64(seconds) {
            Ok(duration) => Ok(Some(duration)),
            Err(_) => {
                Err(PyValueError::new_err(format!("{name} is in seconds, 0 or more; {seconds} is none")))
            }
        },
    }
}

/// The same where there must be a deadline.
///
/// # Errors
/// `ValueError` for what is no length of time.
pub(crate) fn finite_seconds(name: &str, value: f64) -> PyResult<Duration> {
    Ok(seconds(name, Some(value))?.unwrap_or(LONGEST))
}

/// When something that may take `timeout` from now has to end.
pub(crate) fn deadline(timeout: Option<Duration>) -> Option<Instant> {
    timeout.map(|timeout| Instant::now() + timeout)
}
