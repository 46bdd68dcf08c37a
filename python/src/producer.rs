//! `tensor_relay.Producer`: publishes through a server on the same machine.

use crate::{
    errors::Kind,
    gpu::{GpuOptions, Gpus},
    hold::HoldUntil,
    metadata,
    publication::Publication,
    relay::{REMEMBERED_MAX, parse_topic},
    runtime::{self, ProcessLocal},
    split,
    tensors_in::{TensorOptions, TensorsIn},
    until_closed::UntilClosed,
    version::OnOneGpu,
    wait::{finite_seconds, seconds, wait, wait_at_most},
};
use pyo3::prelude::*;
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tensor_relay_device::Lock;
use tensor_relay_server::{
    Topic,
    sidecar::{self, ConnectError, MemoryKind, PublishDeviceError, PublishError, Refusal, SealError},
};

/// A connection to a server on this machine, which sends the published tensors to its subscribers.
#[pyclass(frozen, weakref, module = "tensor_relay")]
pub(crate) struct Producer {
    open: UntilClosed<Arc<sidecar::Producer>>,
    path: PathBuf,
    timeout: Duration,
    gpus: ProcessLocal<Gpus>,
    /// The user that the server's process must run as.
    server_uid: Option<u32>,
    /// The topics that this producer ended, and whether it withdrew them: ending them again is not an error. They are
    /// forgotten at [`REMEMBERED_MAX`].
    ended: Lock<HashMap<Topic, bool>>,
}

/// Connects to the server that made the socket at `path`. `tensor_relay.publish_to` documents the options.
#[pyfunction]
pub(crate) fn publish_to(
    py: Python<'_>,
    path: PathBuf,
    timeout: f64,
    server_uid: Option<u32>,
) -> PyResult<Producer> {
    let timeout = finite_seconds("timeout", timeout)?;
    let gpus = ProcessLocal::new(Gpus::new(py, GPUS)?);
    let producer = connect(py, &path, timeout, server_uid)?;
    let open =
        UntilClosed::new(producer, "this producer was closed: connect again with `tensor_relay.publish_to`");
    Ok(Producer { open, path, timeout, gpus, server_uid, ended: Lock::default() })
}

/// The slots through which GPU tensors reach the host: 16 of 4 MiB, several times the bytes in flight.
const GPUS: GpuOptions = GpuOptions { memory_bytes: None, pinned_bytes: 64 << 20, chunk_bytes: 4 << 20 };

#[pymethods]
impl Producer {
    /// The path of the server's socket.
    #[getter]
    fn path(&self) -> PathBuf {
        self.path.clone()
    }

    /// Publishes tensors as the next version of `topic`, atomically for all of the server's subscribers.
    ///
    /// `tensors`, `metadata`, `dtype`, `rename`, `split`, `allow_empty` and `timeout` are as for `Relay.publish`. With
    /// `split`, GPU tensors are copied through the host.
    ///
    /// With `hold="stage"` all tensors are copied once, to memory that the server sends from, and may be written again
    /// when this returns. The copy is on their GPU if all tensors lie on one GPU that the server also uses, else on the
    /// host.
    ///
    /// With `hold="borrow"` the server reads tensors on such a GPU without a copy, if the GPU's driver can share them.
    /// They must not be written before `Publication.wait_released`, and the version is withdrawn when this process
    /// ends. Other tensors are copied as with "stage".
    ///
    /// The publication's `path` and `path_reason` tell which of these happened. The server decides how many versions a
    /// topic keeps. If the server was restarted since the last call, this call connects again first.
    ///
    /// Raises UnsupportedTensorError, which names the value that cannot be published; PublishError when the server
    /// refuses the version; NoRoomError beyond the server's memory; RelayTimeoutError after `timeout`. In these cases
    /// nothing was published. ServerUnreachableError when the connection is lost: the version may or may not have been
    /// published.
    #[pyo3(signature = (topic, tensors, *, hold = "stage", metadata = None, dtype = None, rename = None,
                        split = None, allow_empty = false, timeout = None))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn publish(
        &self,
        py: Python<'_>,
        topic: &str,
        tensors: &Bound<'_, PyAny>,
        hold: &str,
        metadata: Option<&Bound<'_, PyAny>>,
        dtype: Option<&Bound<'_, PyAny>>,
        rename: Option<&Bound<'_, PyAny>>,
        split: Option<&Bound<'_, PyAny>>,
        allow_empty: bool,
        timeout: Option<f64>,
    ) -> PyResult<Publication> {
        let (topic, timeout) = (parse_topic(py, topic)?, seconds("timeout", timeout)?);
        let hold = HoldUntil::parse(py, hold)?;
        let mut metadata = metadata.map_or_else(|| Ok(vec![]), metadata::of_user)?;
        let producer = self.connected(py, timeout)?;
        let options = TensorOptions { dtype, rename, split: split::of(py, split)?, allow_empty };
        let mut lent = TensorsIn::of(tensors, &options, HoldUntil::Stage, self.gpus.get(py)?)?;
        metadata.append(&mut lent.entries);
        let readable = py.detach(|| lent.into_readable()).map_err(Kind::Publish.because(py))?;
        let late = || {
            let waited = timeout.unwrap_or_default().as_secs_f64();
            let message = format!("{topic} was not published within {waited} s, and is withdrawn");
            Kind::Timeout.raise(py, message)
        };
        let readable = match readable.on_one_gpu() {
            Ok(OnOneGpu { device, tensors, copied_bytes, returning }) => {
                let may_borrow = matches!(hold, HoldUntil::Borrow);
                let publish =
                    producer.publish_from_device(topic.clone(), may_borrow, &device, tensors, metadata);
                let published = wait_at_most(py, timeout, publish)?.ok_or_else(late)?;
                let publication = published.map_err(|error| of_publish_device(py, &error))?;
                if publication.path() != MemoryKind::CudaIpc {
                    returning.give_back(py);
                }
                return Ok(Publication::from_sidecar(publication, copied_bytes));
            }
            Err(readable) => readable,
        };
        let (version, copied_bytes) = readable.seal(py, producer.terms())?;
        let published = wait_at_most(py, timeout, producer.publish(topic.clone(), version, metadata))?;
        let publication = published.ok_or_else(late)?.map_err(|error| of_publish(py, &error))?;
        Ok(Publication::from_sidecar(publication, copied_bytes))
    }

    /// Ends `topic`, as `Relay.end` does. Ending a topic that this producer ended or withdrew has no effect.
    ///
    /// Raises PublishError if the topic is not open for another reason.
    fn end(&self, py: Python<'_>, topic: &str) -> PyResult<()> {
        self.end_topic(py, topic, false)
    }

    /// Withdraws `topic`: subscriptions end, and retained versions are dropped. Withdrawing a topic again has no
    /// effect.
    ///
    /// Raises PublishError if the topic is not open for another reason. If it was ended, the server keeps its retained
    /// versions.
    fn withdraw(&self, py: Python<'_>, topic: &str) -> PyResult<()> {
        self.end_topic(py, topic, true)
    }

    /// Ends the connection. The server keeps copied versions. Closing again does nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        drop(self.open.lock(py)?.take());
        self.gpus.get(py)?.close(py);
        Ok(())
    }

    fn __repr__(&self) -> String {
        format!("Producer({})", self.path.display())
    }
}

impl Producer {
    /// The connection; a new one if it was lost, made within the producer's own timeout or `timeout`, whichever is
    /// shorter.
    fn connected(&self, py: Python<'_>, timeout: Option<Duration>) -> PyResult<Arc<sidecar::Producer>> {
        let producer = self.open.with(py, |producer| Ok(Arc::clone(producer)))?;
        if producer.lost().is_none() {
            return Ok(producer);
        }
        let timeout = timeout.map_or(self.timeout, |timeout| timeout.min(self.timeout));
        let reconnected = connect(py, &self.path, timeout, self.server_uid)?;
        // If another thread has reconnected first, and may have published, its connection stays.
        self.open.with(py, |producer| {
            if producer.lost().is_some() {
                *producer = reconnected;
            }
            Ok(Arc::clone(producer))
        })
    }

    fn end_topic(&self, py: Python<'_>, topic: &str, withdraw: bool) -> PyResult<()> {
        let (topic, producer) = (parse_topic(py, topic)?, self.connected(py, None)?);
        let Err(error) = wait(py, producer.end(topic.clone(), withdraw))? else {
            let mut ended = self.ended.lock();
            if ended.len() >= REMEMBERED_MAX {
                ended.clear();
            }
            ended.insert(topic, withdraw);
            return Ok(());
        };
        let is_not_open = matches!(error, PublishError::Refused { reason: Refusal::TopicEnded, .. });
        match is_not_open && self.ended.lock().get(&topic).is_some_and(|withdrawn| *withdrawn || !withdraw) {
            true => Ok(()),
            false => Err(of_publish(py, &error)),
        }
    }
}

fn connect(
    py: Python<'_>,
    path: &Path,
    timeout: Duration,
    server_uid: Option<u32>,
) -> PyResult<Arc<sidecar::Producer>> {
    let _in_runtime = runtime::handle(py)?.enter();
    let connected = wait(py, sidecar::Producer::connect_to(path, timeout, server_uid))?;
    connected.map(Arc::new).map_err(|error| {
        let kind = match error {
            ConnectError::NotPermitted { .. }
            | ConnectError::Refused { .. }
            | ConnectError::Stranger { .. } => Kind::Refused,
            _ => Kind::Unreachable,
        };
        kind.raise(py, error)
    })
}

fn of_publish(py: Python<'_>, error: &PublishError) -> PyErr {
    match error {
        PublishError::Refused { reason: Refusal::Forbidden, .. } => Kind::Refused.raise(py, error),
        PublishError::Refused { reason: Refusal::NoRoom, .. } => Kind::NoRoom.raise(py, error),
        PublishError::ConnectionLost(_) => Kind::Unreachable.raise(py, error),
        _ => Kind::Publish.raise(py, error),
    }
}

fn of_publish_device(py: Python<'_>, error: &PublishDeviceError) -> PyErr {
    match error {
        PublishDeviceError::Publish(error) => of_publish(py, error),
        PublishDeviceError::Memory(SealError::Memory { .. }) => Kind::NoRoom.raise(py, error),
        _ => Kind::Publish.raise(py, error),
    }
}
