//! asyncio futures for work on the runtime.

use crate::{interpreter, runtime};
use pyo3::{prelude::*, types::PyCFunction};
use std::sync::{Mutex, PoisonError};

/// A future of the running event loop for what `give` makes of the result of `work`, on the loop's thread. When it is
/// cancelled, `work` is dropped, or its result where that had come: a result that must not get lost sees to that itself.
///
/// # Errors
/// `RuntimeError` when no event loop runs; as [`runtime::handle`].
pub(crate) fn awaitable<'py, T: Send + 'static>(
    py: Python<'py>,
    work: impl Future<Output = T> + Send + 'static,
    give: impl FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>> + Send + 'static,
) -> PyResult<Bound<'py, PyAny>> {
    let handle = runtime::handle(py)?;
    let event_loop = py.import("asyncio")?.call_method0("get_running_loop")?;
    let future = event_loop.call_method0("create_future")?;
    let (event_loop, promised) = (event_loop.unbind(), future.clone().unbind());
    let task = handle.spawn(async move {
        let result = work.await;
        interpreter::later(move |py| {
            // An event loop that was closed takes nothing any more, and the result is dropped.
            let _ = tell(py, &event_loop, move |py| settle(promised.bind(py), result, give));
        });
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

/// Lets the event loop's thread do `errand`, once.
fn tell(
    py: Python<'_>,
    event_loop: &Py<PyAny>,
    errand: impl FnOnce(Python<'_>) -> PyResult<()> + Send + 'static,
) -> PyResult<()> {
    let errand = Mutex::new(Some(errand));
    let callback = PyCFunction::new_closure(py, None, None, move |args, _| -> PyResult<()> {
        let errand = errand.lock().unwrap_or_else(PoisonError::into_inner).take();
        errand.map_or(Ok(()), |errand| errand(args.py()))
    })?;
    event_loop.call_method1(py, "call_soon_threadsafe", (callback,)).map(drop)
}

fn settle<T>(
    promised: &Bound<'_, PyAny>,
    result: T,
    give: impl FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>>,
) -> PyResult<()> {
    if promised.call_method0("done")?.is_truthy()? {
        return Ok(()); // It was cancelled.
    }
    match give(promised.py(), result) {
        Ok(value) => promised.call_method1("set_result", (value,))?,
        Err(error) => promised.call_method1("set_exception", (error,))?,
    };
    Ok(())
}
