//! Futures of asyncio for work on the runtime.

use crate::{interpreter, runtime};
use pyo3::{prelude::*, types::PyCFunction};
use std::sync::{Arc, Mutex, PoisonError};

/// What a result becomes for Python, and what happens to one that nobody waits for any more.
pub(crate) struct Outcome<T> {
    /// Runs on the event loop's thread.
    pub(crate) give: Box<dyn FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>> + Send>,
    /// For a result that came while it was being cancelled: a version that is taken must not get lost.
    pub(crate) keep: Box<dyn FnOnce(T) + Send>,
}

/// A future of the running event loop. When it is cancelled, `work` is dropped.
///
/// # Errors
/// `RuntimeError` when no event loop runs; as [`runtime::handle`].
pub(crate) fn awaitable<'py, T: Send + 'static>(
    py: Python<'py>,
    work: impl Future<Output = T> + Send + 'static,
    outcome: Outcome<T>,
) -> PyResult<Bound<'py, PyAny>> {
    let handle = runtime::handle(py)?;
    let event_loop = py.import("asyncio")?.call_method0("get_running_loop")?;
    let future = event_loop.call_method0("create_future")?;
    let (event_loop, promised) = (event_loop.unbind(), future.clone().unbind());
    let task = handle.spawn(async move {
        let result = work.await;
        interpreter::later(move |py| deliver(py, &event_loop, promised, result, outcome));
    });
    let task = task.abort_handle();
    let cancel = PyCFunction::new_closure(py, None, None, move |args, _| -> PyResult<()> {
        if args.get_item(0)?.call_method0("cancelled")?.is_truthy()? {
            task.abort();
        }
        Ok(())
    })?;
    future.call_method1("add_done_callback", (cancel,))?;
    Ok(future)
}

/// Hands a result over to the event loop's thread.
fn deliver<T: Send + 'static>(
    py: Python<'_>,
    event_loop: &Py<PyAny>,
    promised: Py<PyAny>,
    result: T,
    Outcome { give, keep }: Outcome<T>,
) {
    let waiting = Arc::new(Mutex::new(Some((result, give, keep, promised))));
    let take = {
        let waiting = Arc::clone(&waiting);
        move || waiting.lock().unwrap_or_else(PoisonError::into_inner).take()
    };
    let settle = {
        let take = take.clone();
        move |py: Python<'_>| -> PyResult<()> {
            let Some((result, give, keep, promised)) = take() else { return Ok(()) };
            let promised = promised.bind(py);
            if promised.call_method0("done")?.is_truthy()? {
                keep(result);
                return Ok(());
            }
            match give(py, result) {
                Ok(value) => promised.call_method1("set_result", (value,))?,
                Err(error) => promised.call_method1("set_exception", (error,))?,
            };
            Ok(())
        }
    };
    let told = PyCFunction::new_closure(py, None, None, move |args, _| settle(args.py()))
        .and_then(|settle| event_loop.call_method1(py, "call_soon_threadsafe", (settle,)));
    // An event loop that was closed takes nothing any more.
    if told.is_err()
        && let Some((result, _, keep, _)) = take()
    {
        keep(result);
    }
}
