//! asyncio futures for work on the runtime.

use crate::{interpreter, runtime};
use pyo3::{prelude::*, types::PyCFunction};
use std::panic::resume_unwind;
use tensor_relay_device::Lock;

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
    let new = py.import("tensor_relay._futures")?.getattr("new")?;
    let task = handle.spawn(work);
    let to_cancel = task.abort_handle();
    let cancel = PyCFunction::new_closure(py, None, None, move |_, _| to_cancel.abort())?;
    let made = new.call1((cancel,)).inspect_err(|_| task.abort());
    let (future, complete): (Bound<'py, PyAny>, Py<PyAny>) = made?.extract()?;
    handle.spawn(async move {
        let result = task.await;
        interpreter::enqueue(move |py| {
            let result = Lock::new(Some((result, convert)));
            let result = PyCFunction::new_closure(py, None, None, move |args, _| {
                let (result, convert) = result.lock().take().expect("`_futures` calls it once");
                convert(args.py(), result.unwrap_or_else(|failed| resume_unwind(failed.into_panic())))
            });
            // A closed event loop refuses callbacks, and the result is dropped.
            let _ = result.and_then(|result| complete.call1(py, (result,)));
        });
    });
    Ok(future)
}
