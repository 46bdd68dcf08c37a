//! asyncio futures for work on the runtime.

use crate::{interpreter, runtime};
use pyo3::{panic::PanicException, prelude::*, types::PyCFunction};
use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
};
use tensor_relay_device::Lock;
use tokio::task::JoinError;

/// An asyncio future of the running event loop. Its result is that of `work`, converted by `convert` on the loop's
/// thread. When the future is cancelled, `work` is dropped, or its result if it has one already: a result that must
/// survive cancellation has to save itself in its `Drop`. If `work` or `convert` panics, the future fails with a
/// `PanicException`, like a panicking function that Python calls.
///
/// # Errors
/// `RuntimeError` when no event loop runs; those of [`runtime::handle`].
pub(crate) fn awaitable<'py, T: Send + 'static>(
    py: Python<'py>,
    work: impl Future<Output = T> + Send + 'static,
    convert: impl FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>> + Send + 'static,
) -> PyResult<Bound<'py, PyAny>> {
    let handle = runtime::handle(py)?;
    let event_loop = py.import("asyncio")?.call_method0("get_running_loop")?;
    let future = event_loop.call_method0("create_future")?;
    let (event_loop, to_complete) = (event_loop.unbind(), future.clone().unbind());
    let task = handle.spawn(work);
    let to_cancel = task.abort_handle();
    handle.spawn(async move {
        let result = task.await;
        interpreter::enqueue(move |py| {
            // A closed event loop refuses callbacks, and the result is dropped.
            let _ = call_soon(py, &event_loop, move |py| complete(to_complete.bind(py), result, convert));
        });
    });
    let cancel = PyCFunction::new_closure(py, None, None, move |args, _| -> PyResult<()> {
        if args.get_item(0)?.call_method0("cancelled")?.is_truthy()? {
            to_cancel.abort();
        }
        Ok(())
    })?;
    future.call_method1("add_done_callback", (cancel,))?;
    Ok(future)
}

/// Runs `action` once on the event loop's thread.
fn call_soon(
    py: Python<'_>,
    event_loop: &Py<PyAny>,
    action: impl FnOnce(Python<'_>) -> PyResult<()> + Send + 'static,
) -> PyResult<()> {
    let action = Lock::new(Some(action));
    let callback = PyCFunction::new_closure(py, None, None, move |args, _| -> PyResult<()> {
        let action = action.lock().take();
        action.map_or(Ok(()), |action| action(args.py()))
    })?;
    event_loop.call_method1(py, "call_soon_threadsafe", (callback,)).map(drop)
}

fn complete<T>(
    future: &Bound<'_, PyAny>,
    result: Result<T, JoinError>,
    convert: impl FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>>,
) -> PyResult<()> {
    if future.call_method0("done")?.is_truthy()? {
        return Ok(()); // It was cancelled, and the work with it.
    }
    let py = future.py();
    let result = result.map_err(JoinError::into_panic);
    let converted = result.and_then(|result| catch_unwind(AssertUnwindSafe(|| convert(py, result))));
    match converted.unwrap_or_else(|panic| Err(panic_exception(&*panic))) {
        Ok(value) => future.call_method1("set_result", (value,))?,
        Err(error) => future.call_method1("set_exception", (error,))?,
    };
    Ok(())
}

/// The exception that pyo3 raises for the same panic in a function that Python calls.
fn panic_exception(panic: &(dyn Any + Send)) -> PyErr {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    PanicException::new_err(text.unwrap_or("panic from Rust code").to_owned())
}
