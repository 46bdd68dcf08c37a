//! `tensor_relay.Publication`: the state of one published version.

use crate::{
    errors::Kind,
    interpreter,
    runtime::{self, ProcessLocal},
    wait::{deadline, seconds, wait},
};
use pyo3::{exceptions::PyTypeError, prelude::*};
use std::time::{Duration, Instant};
use tensor_relay_server::{
    self as server, VersionId,
    sidecar::{self, MemoryKind},
};

/// A version that was published. Holds none of its memory.
#[pyclass(frozen, module = "tensor_relay")]
pub(crate) struct Publication {
    publication: ProcessLocal<Handle>,
    payload_bytes: u64,
    copied_bytes: u64,
}

/// A publication through a server in this process, or in another one.
#[derive(Clone)]
enum Handle {
    ProcessLocal(server::Publication),
    /// Beside this process.
    Beside(sidecar::Publication),
}

impl Handle {
    fn id(&self) -> &VersionId {
        match self {
            Self::ProcessLocal(publication) => publication.id(),
            Self::Beside(publication) => publication.id(),
        }
    }

    fn committed_count(&self) -> u64 {
        match self {
            Self::ProcessLocal(publication) => publication.committed_count(),
            Self::Beside(publication) => publication.committed_count(),
        }
    }

    async fn committed(&mut self, count: u64, timeout: Duration) -> Result<bool, sidecar::ConnectionLost> {
        match self {
            Self::ProcessLocal(publication) => Ok(publication.committed(count, timeout).await),
            Self::Beside(publication) => publication.committed(count, timeout).await,
        }
    }

    async fn released(&mut self, timeout: Duration) -> Result<bool, sidecar::ConnectionLost> {
        match self {
            Self::ProcessLocal(publication) => Ok(publication.released(timeout).await),
            Self::Beside(publication) if publication.path() == MemoryKind::CudaIpc => {
                publication.released(timeout).await
            }
            Self::Beside(_) => Ok(true), // They were copied.
        }
    }
}

impl Publication {
    pub(crate) fn new(publication: server::Publication, payload_bytes: u64, copied_bytes: u64) -> Self {
        Self {
            publication: ProcessLocal::new(Handle::ProcessLocal(publication)),
            payload_bytes,
            copied_bytes,
        }
    }

    /// One of a server beside this process; so many bytes were copied before they were copied for it.
    pub(crate) fn from_sidecar(publication: sidecar::Publication, copied_bytes: u64) -> Self {
        let payload_bytes = publication.payload_bytes();
        let copied_bytes = copied_bytes + publication.copied_bytes();
        Self { publication: ProcessLocal::new(Handle::Beside(publication)), payload_bytes, copied_bytes }
    }

    /// A handle of our own to wait with, and the deadline that the wait has.
    fn to_wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<(Handle, Duration)> {
        let timeout = seconds("timeout", timeout)?.unwrap_or(Duration::MAX);
        Ok((self.publication.get(py)?.clone(), timeout))
    }
}

#[pymethods]
impl Publication {
    /// The topic's name.
    #[getter]
    fn topic(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.publication.get(py)?.id().topic.to_string())
    }

    /// Its number: one more than that of the version before, in this epoch.
    #[getter]
    fn version(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.publication.get(py)?.id().version.0)
    }

    /// The epoch of the topic: 16 hexadecimal digits, different after a restart.
    #[getter]
    fn epoch(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.publication.get(py)?.id().epoch.to_string())
    }

    /// The size of its tensors in bytes, with the padding between them.
    #[getter]
    fn payload_bytes(&self) -> u64 {
        self.payload_bytes
    }

    /// The number of bytes copied to publish it: all with `hold="stage"`, and by a `Producer` unless `path` is
    /// "cuda_ipc"; with `hold="borrow"` those of tensors that are not contiguous. Copies made by a framework itself, e.g.
    /// to cast, are not counted.
    #[getter]
    fn copied_bytes(&self) -> u64 {
        self.copied_bytes
    }

    /// The number of subscribers that have received it completely and verified.
    #[getter]
    fn committed(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.publication.get(py)?.committed_count())
    }

    /// Whether the tensors may be written again: at once with `hold="stage"`; with `hold="borrow"` once the version was replaced or
    /// withdrawn and nobody reads it any more. A `Producer` borrows tensors on GPUs alone (`path` is "cuda_ipc").
    #[getter]
    fn released(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(match self.publication.get(py)? {
            Handle::ProcessLocal(publication) => publication.is_released(),
            Handle::Beside(publication) => {
                publication.path() != MemoryKind::CudaIpc || publication.is_released()
            }
        })
    }

    /// By which way its tensors came to the server: to one that runs beside this process by "memfd", shared memory of the host,
    /// "cuda_fd", a copy on their GPU, or "cuda_ipc", from where they lie; "process" where it runs in this one.
    #[getter]
    fn path(&self, py: Python<'_>) -> PyResult<&'static str> {
        Ok(match self.publication.get(py)? {
            Handle::ProcessLocal(_) => "process",
            Handle::Beside(publication) => publication.path().name(),
        })
    }

    /// Why by that way, for people.
    #[getter]
    fn path_reason(&self, py: Python<'_>) -> PyResult<String> {
        Ok(match self.publication.get(py)? {
            Handle::ProcessLocal(_) => "the server runs in this process".into(),
            Handle::Beside(publication) => publication.reason().into(),
        })
    }

    /// Waits until `count` subscribers have received it. `timeout` is in seconds; None waits for as long as it takes.
    ///
    /// Raises RelayTimeoutError after `timeout`, and PublishError when it was replaced or withdrawn before, so that no
    /// more can receive it; ServerUnreachableError when the connection to a server beside this process is lost.
    #[pyo3(signature = (count = 1, timeout = Some(60.0)), text_signature = "($self, count=1, timeout=60.0)")]
    fn wait_committed(&self, py: Python<'_>, count: u64, timeout: Option<f64>) -> PyResult<()> {
        let (mut publication, timeout) = self.to_wait(py, timeout)?;
        let ends = deadline((timeout < Duration::MAX).then_some(timeout));
        let reached = wait(py, publication.committed(count, timeout))?;
        let reached = reached.map_err(Kind::Unreachable.because(py))?;
        if reached {
            return Ok(());
        }
        let (id, found) = (publication.id(), publication.committed_count());
        Err(match ends.is_some_and(|ends| Instant::now() >= ends) {
            true => {
                let waited = timeout.as_secs_f64();
                let message = format!("{found} of {count} subscribers received {id} within {waited} s");
                Kind::Timeout.raise(py, message)
            }
            false => Kind::Publish.raise(
                py,
                format!("{found} of {count} subscribers received {id}, and no more can: it was replaced or withdrawn"),
            ),
        })
    }

    /// Waits until the tensors may be written again (`released`). A borrowed version is read as long as it is the newest:
    /// publish the next one, or `withdraw()`, before waiting. `timeout` is in seconds; None waits for as long as it takes.
    ///
    /// Raises RelayTimeoutError after `timeout`: the tensors are still being read then, and must not be written.
    /// ServerUnreachableError when the connection to a server beside this process is lost: whether it still reads them is not
    /// known then.
    #[pyo3(signature = (timeout = Some(60.0)), text_signature = "($self, timeout=60.0)")]
    fn wait_released(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let (mut publication, timeout) = self.to_wait(py, timeout)?;
        let released = wait(py, publication.released(timeout))?;
        match released.map_err(Kind::Unreachable.because(py))? {
            true => Ok(()),
            false => Err(Kind::Timeout.raise(
                py,
                format!(
                    "{} was not released within {} s: it is on offer until another is published or it is withdrawn, and \
                     then until those who read it are done",
                    publication.id(),
                    timeout.as_secs_f64()
                ),
            )),
        }
    }

    /// Calls `callback(publication)` once the tensors may be written again (`released`); at once where they may. It is called
    /// on a thread of Python's that all callbacks share, one after the other, also when nothing refers to the publication any
    /// more; what it raises is logged. What the end of the interpreter releases has a second for its callbacks.
    ///
    /// It is not called, and the log says so, when the connection to a server beside this process is lost: whether that still
    /// reads the tensors is not known then.
    ///
    /// Raises TypeError for what cannot be called.
    fn on_released(slf: Bound<'_, Self>, callback: Bound<'_, PyAny>) -> PyResult<()> {
        let py = slf.py();
        if !callback.is_callable() {
            return Err(PyTypeError::new_err(format!("{callback} is not callable")));
        }
        let mut publication = slf.get().publication.get(py)?.clone();
        let runtime = runtime::handle(py)?;
        let due = py
            .import("tensor_relay._released")?
            .call_method1("register", (callback, slf))?
            .unbind();
        // It ends with the version, which the topic bounds; or with the process.
        runtime.spawn(async move {
            let lost = publication.released(Duration::MAX).await.err();
            interpreter::later(move |py| {
                let lost = lost.map(|lost| lost.to_string());
                // It fails only without memory, and then the error cannot be reported either.
                let _ = due.call1(py, (lost,));
            });
        });
        Ok(())
    }

    /// Takes the version back before its turn. Those who are receiving it may finish.
    fn withdraw(&self, py: Python<'_>) -> PyResult<()> {
        match self.publication.get(py)? {
            Handle::ProcessLocal(publication) => publication.withdraw(),
            Handle::Beside(publication) => publication.withdraw(),
        }
        Ok(())
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let id = self.publication.get(py)?.id();
        Ok(format!("Publication({id}, {} bytes)", self.payload_bytes))
    }
}
