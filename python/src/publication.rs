//! `tensor_relay.Publication`: the state of one published version.

use crate::{
    errors::Kind,
    interpreter,
    runtime::{self, ProcessLocal},
    wait::{deadline, seconds, wait},
};
use pyo3::prelude::*;
use std::time::{Duration, Instant};
use tensor_relay_server::{
    self as server, VersionId,
    sidecar::{self, MemoryKind},
};

/// A published version. It keeps none of the version's memory.
#[pyclass(frozen, module = "tensor_relay")]
pub(crate) struct Publication {
    publication: ProcessLocal<Handle>,
    /// The size of the tensors in bytes, including the padding between them.
    #[pyo3(get)]
    payload_bytes: u64,
    /// The number of bytes copied to publish it: all with `hold="stage"`, and by a `Producer` unless `path` is
    /// "cuda_ipc"; with `hold="borrow"` those of tensors that are not contiguous. Copies made by a framework itself,
    /// e.g. to cast, are not counted.
    #[pyo3(get)]
    copied_bytes: u64,
}

/// A publication by a server in this process, or by a sidecar.
#[derive(Clone)]
enum Handle {
    InProcess(server::Publication),
    Sidecar(sidecar::Publication),
}

/// What consumers do with a version, and a publication counts.
#[derive(Debug, Clone, Copy)]
enum Step {
    Committed,
    Loaded,
}

impl Handle {
    fn id(&self) -> &VersionId {
        match self {
            Self::InProcess(publication) => publication.id(),
            Self::Sidecar(publication) => publication.id(),
        }
    }

    fn count(&self, step: Step) -> u64 {
        match (self, step) {
            (Self::InProcess(publication), Step::Committed) => publication.committed_count(),
            (Self::InProcess(publication), Step::Loaded) => publication.loaded_count(),
            (Self::Sidecar(publication), Step::Committed) => publication.committed_count(),
            (Self::Sidecar(publication), Step::Loaded) => publication.loaded_count(),
        }
    }

    /// Whether `count` consumers took the step within `timeout`.
    async fn reached(
        &mut self,
        step: Step,
        count: u64,
        timeout: Duration,
    ) -> Result<bool, sidecar::ConnectionLost> {
        match (self, step) {
            (Self::InProcess(publication), Step::Committed) => {
                Ok(publication.committed(count, timeout).await)
            }
            (Self::InProcess(publication), Step::Loaded) => Ok(publication.loaded(count, timeout).await),
            (Self::Sidecar(publication), Step::Committed) => publication.committed(count, timeout).await,
            (Self::Sidecar(publication), Step::Loaded) => publication.loaded(count, timeout).await,
        }
    }

    /// Why it became unreadable, if so. A sidecar's server logs it.
    fn failure(&self) -> Option<&str> {
        match self {
            Self::InProcess(publication) => publication.failure(),
            Self::Sidecar(_) => None,
        }
    }

    async fn released(&mut self, timeout: Duration) -> Result<bool, sidecar::ConnectionLost> {
        match self {
            Self::InProcess(publication) => Ok(publication.released(timeout).await),
            Self::Sidecar(publication) if publication.path() == MemoryKind::CudaIpc => {
                publication.released(timeout).await
            }
            Self::Sidecar(_) => Ok(true), // The tensors were copied.
        }
    }
}

impl Publication {
    pub(crate) fn new(publication: server::Publication, payload_bytes: u64, copied_bytes: u64) -> Self {
        Self { publication: ProcessLocal::new(Handle::InProcess(publication)), payload_bytes, copied_bytes }
    }

    /// A publication by a sidecar. `copied_bytes` were copied in this process before the copy for the sidecar.
    pub(crate) fn from_sidecar(publication: sidecar::Publication, copied_bytes: u64) -> Self {
        let payload_bytes = publication.payload_bytes();
        let copied_bytes = copied_bytes + publication.copied_bytes();
        Self { publication: ProcessLocal::new(Handle::Sidecar(publication)), payload_bytes, copied_bytes }
    }

    /// A copy of the handle, and the timeout, for a wait.
    fn to_wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<(Handle, Duration)> {
        let timeout = seconds("timeout", timeout)?.unwrap_or(Duration::MAX);
        Ok((self.publication.get(py)?.clone(), timeout))
    }

    fn wait_for(&self, py: Python<'_>, step: Step, count: u64, timeout: Option<f64>) -> PyResult<()> {
        let (mut publication, timeout) = self.to_wait(py, timeout)?;
        let ends = deadline((timeout < Duration::MAX).then_some(timeout));
        let reached = wait(py, publication.reached(step, count, timeout))?;
        if reached.map_err(Kind::Unreachable.because(py))? {
            return Ok(());
        }
        let (did, why) = match step {
            Step::Committed => ("received", publication.failure().unwrap_or("it was replaced or withdrawn")),
            Step::Loaded => ("loaded", "the server counts the loads of later versions only"),
        };
        let progress = format!("{} of {count} consumers {did} {}", publication.count(step), publication.id());
        Err(match ends.is_some_and(|ends| Instant::now() >= ends) {
            true => Kind::Timeout.raise(py, format!("{progress} within {} s", timeout.as_secs_f64())),
            false => Kind::Publish.raise(py, format!("{progress}, and no more can: {why}")),
        })
    }
}

#[pymethods]
impl Publication {
    /// The topic's name.
    #[getter]
    fn topic(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.publication.get(py)?.id().topic.to_string())
    }

    /// The version's number: one more than that of the previous version of this epoch.
    #[getter]
    fn version(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.publication.get(py)?.id().version.0)
    }

    /// The epoch of the topic: 16 hexadecimal digits, different after a restart.
    #[getter]
    fn epoch(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.publication.get(py)?.id().epoch.to_string())
    }

    /// The number of consumers that have received it completely and verified: see `wait_committed`.
    #[getter]
    fn committed(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.publication.get(py)?.count(Step::Committed))
    }

    /// The number of consumers that have loaded it, by their own report: see `wait_loaded`.
    #[getter]
    fn loaded(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.publication.get(py)?.count(Step::Loaded))
    }

    /// Whether the tensors may be written again: at once with `hold="stage"`; with `hold="borrow"` once the version was
    /// replaced or withdrawn and is no longer read. A `Producer` borrows only tensors on GPUs (`path` is "cuda_ipc").
    #[getter]
    fn released(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(match self.publication.get(py)? {
            Handle::InProcess(publication) => publication.is_released(),
            Handle::Sidecar(publication) => {
                publication.path() != MemoryKind::CudaIpc || publication.is_released()
            }
        })
    }

    /// How the server got the tensors: "process" in the server's own process; from a `Producer` "memfd", a copy in
    /// shared host memory, "cuda_fd", a copy on their GPU, or "cuda_ipc", their own GPU memory.
    #[getter]
    fn path(&self, py: Python<'_>) -> PyResult<&'static str> {
        Ok(match self.publication.get(py)? {
            Handle::InProcess(_) => "process",
            Handle::Sidecar(publication) => publication.path().name(),
        })
    }

    /// The reason for `path`, as a text.
    #[getter]
    fn path_reason(&self, py: Python<'_>) -> PyResult<String> {
        Ok(match self.publication.get(py)? {
            Handle::InProcess(_) => "the server runs in this process".into(),
            Handle::Sidecar(publication) => publication.reason().into(),
        })
    }

    /// Why the version was withdrawn before its end, if it became unreadable, e.g. because borrowed tensors were written
    /// or freed before their release; otherwise None. Of a `Producer`'s versions only the server's log tells.
    #[getter]
    fn failure(&self, py: Python<'_>) -> PyResult<Option<&str>> {
        Ok(self.publication.get(py)?.failure())
    }

    /// Waits until `count` consumers have received and verified the version, each counted once: processes, and named
    /// readers. Whether they use it is another question: see `wait_loaded`.
    /// `timeout` is in seconds; None waits without limit.
    ///
    /// Raises RelayTimeoutError after `timeout`; PublishError when the version was replaced or withdrawn before, so
    /// that no more consumers can receive it, or became unreadable (`failure`); ServerUnreachableError when a
    /// `Producer` has lost its connection.
    #[pyo3(signature = (count = 1, timeout = Some(60.0)), text_signature = "($self, count=1, timeout=60.0)")]
    fn wait_committed(&self, py: Python<'_>, count: u64, timeout: Option<f64>) -> PyResult<()> {
        self.wait_for(py, Step::Committed, count, timeout)
    }

    /// Waits until `count` consumers have loaded the version: their programs have called `loaded()` of its snapshot. A
    /// consumer that reports other content than was sent to it is not counted, and the server logs a warning. Each
    /// consumer counts once, as in `wait_committed`. `timeout` is in seconds; None waits without limit.
    ///
    /// Raises RelayTimeoutError after `timeout`; PublishError when loads are counted no longer: after 16 later versions,
    /// and of a `Producer`'s version after its release; ServerUnreachableError when a `Producer` has lost its
    /// connection.
    #[pyo3(signature = (count = 1, timeout = Some(60.0)), text_signature = "($self, count=1, timeout=60.0)")]
    fn wait_loaded(&self, py: Python<'_>, count: u64, timeout: Option<f64>) -> PyResult<()> {
        self.wait_for(py, Step::Loaded, count, timeout)
    }

    /// Waits until the tensors may be written again (`released`). A borrowed version is read as long as it is the
    /// newest: publish the next one, or `withdraw()`, before waiting. `timeout` is in seconds; None waits without
    /// limit.
    ///
    /// Raises RelayTimeoutError after `timeout`: the tensors are still being read, and must not be written.
    /// ServerUnreachableError when a `Producer` has lost its connection: the server may still be reading the tensors.
    #[pyo3(signature = (timeout = Some(60.0)), text_signature = "($self, timeout=60.0)")]
    fn wait_released(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let (mut publication, timeout) = self.to_wait(py, timeout)?;
        let released = wait(py, publication.released(timeout))?;
        match released.map_err(Kind::Unreachable.because(py))? {
            true => Ok(()),
            false => Err(Kind::Timeout.raise(
                py,
                format!(
                    "{} was not released within {} s: subscribers may begin to read it until another is published or it is \
                     withdrawn, and active transfers finish after that",
                    publication.id(),
                    timeout.as_secs_f64()
                ),
            )),
        }
    }

    /// Calls `released` on the interpreter thread once the tensors may be written again, with the reason if that will
    /// never be known.
    fn _on_released(&self, py: Python<'_>, released: Py<PyAny>) -> PyResult<()> {
        let mut publication = self.publication.get(py)?.clone();
        // The task ends when the version is released. The topic bounds the number of such versions.
        runtime::handle(py)?.spawn(async move {
            let lost = publication.released(Duration::MAX).await.err();
            interpreter::enqueue(move |py| {
                let lost = lost.map(|lost| lost.to_string());
                // It fails only when out of memory, and then the error cannot be reported either.
                let _ = released.call1(py, (lost,));
            });
        });
        Ok(())
    }

    /// Withdraws the version before the next one replaces it. Active transfers of it finish.
    fn withdraw(&self, py: Python<'_>) -> PyResult<()> {
        match self.publication.get(py)? {
            Handle::InProcess(publication) => publication.withdraw(),
            Handle::Sidecar(publication) => publication.withdraw(),
        }
        Ok(())
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let id = self.publication.get(py)?.id();
        Ok(format!("Publication({id}, {} bytes)", self.payload_bytes))
    }
}
