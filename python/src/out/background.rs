//! Copying to `out` for coroutines, without holding the event loop.

use super::copy::{Copied, Copying};
use crate::{awaitable::awaitable, runtime, snapshot::Snapshot};
use pyo3::{prelude::*, types::PyCFunction};
use std::sync::mpsc;
use tensor_relay_device::Lock;
use tokio::sync::oneshot;

/// Begins the copy on a thread of the runtime. Returns a pair for `_subscription`: an asyncio future of the
/// end of the copy, and a function that finishes it. The function waits for the end, since nothing may write to the
/// tensors after the coroutine; its argument, and that of `deliver`, is whether the coroutine returns the version.
pub(crate) fn copying_in_background(
    py: Python<'_>,
    mut copying: Copying,
    deliver: impl FnOnce(bool, PyResult<Snapshot>) -> PyResult<Snapshot> + Send + 'static,
) -> PyResult<Py<PyAny>> {
    let runtime = runtime::handle(py)?;
    let (end, ended) = oneshot::channel::<()>();
    let future = awaitable(py, async { drop(ended.await) }, |py, ()| Ok(py.None()))?;
    let (sender, result) = mpsc::channel::<(Copying, Copied)>();
    let handle = runtime.clone();
    runtime.spawn_blocking(move || {
        let copied = copying.run(&handle);
        let _ = sender.send((copying, copied));
        drop(end);
    });
    let unfinished = Lock::new(Some((result, deliver)));
    let finish = PyCFunction::new_closure(py, None, None, move |args, _| -> PyResult<Snapshot> {
        let (py, is_delivered): (_, bool) = (args.py(), args.get_item(0)?.extract()?);
        let unfinished = unfinished.lock().take();
        let (result, deliver) = unfinished.expect("`_subscription` calls it once");
        let (copying, copied) = py.detach(move || result.recv()).expect("the copy sends its result");
        deliver(is_delivered, copying.finish(py, copied))
    })?;
    Ok((future, finish).into_pyobject(py)?.into_any().unbind())
}
