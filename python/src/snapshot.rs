//! `tensor_relay.Snapshot`: one version, complete and verified.

use crate::{
    description::Description,
    errors::{Kind, of_device},
    memory::{Exported, Readable, Reading, Stream},
    metadata,
    range::within,
    runtime::ProcessLocal,
    subscription::Arrived,
    tensor::Tensor,
    wait::{seconds, wait, wait_at_most},
};
use pyo3::{
    exceptions::PyKeyError,
    prelude::*,
    types::{PyDict, PyIterator, PyList},
};
use std::{path::PathBuf, sync::Arc};
use tensor_relay_cli::FollowedTopic;
use tensor_relay_client::{self as client, Gap, VersionId};

/// The tensors of one version by name, as a mapping. Their memory lives as long as anything refers to it, and is then
/// reused for a later version.
#[pyclass(frozen, mapping, weakref, module = "tensor_relay")]
pub(crate) struct Snapshot {
    version: client::Snapshot,
    /// False if the version was received into the user's own tensors.
    has_tensors: bool,
    /// In mode "every", with `on_gap="continue"`: a description of the versions missing before this one; None without a
    /// gap.
    #[pyo3(get)]
    gap: Option<String>,
    load_report: ProcessLocal<client::LoadReport>,
    /// The memory of tensors on a GPU; `None` on the host, or if they are empty.
    reading: Option<Arc<Reading>>,
}

/// Statistics of receiving a version.
#[pyclass(frozen, get_all, module = "tensor_relay")]
pub(crate) struct Receipt {
    /// The time from the version's announcement until it was complete, in seconds.
    duration_s: f64,
    /// The number of encoded bytes received over the network.
    wire_bytes: u64,
    /// The number of bytes of the tensors, or boxes, that were asked for.
    wanted_bytes: u64,
    /// The number of decoded bytes that were received for them: whole chunks, which also have padding and what lies
    /// between the runs of a box.
    received_bytes: u64,
    /// The number of verified chunks.
    chunks: u32,
    /// The number of times that the transfer was resumed over another connection.
    resumed: u32,
    /// The transport: "tcp", "quic" or "unix".
    transport: &'static str,
    /// Why this transport was chosen.
    transport_reason: &'static str,
    /// How the bytes came: "chunks", "memory" or "memory, copied", and on a GPU "GPU memory" or "GPU memory, copied";
    /// over a Unix socket with the reason for chunks, as in "chunks: REASON", or for host memory instead of the GPU's.
    sharing: String,
    /// The number of encoded bytes that came from the server.
    origin_bytes: u64,
    /// The number of encoded bytes that came from other subscribers, with `connect(share=…)`.
    peer_bytes: u64,
    /// The number of these subscribers.
    peers: u32,
    /// The counters of each codec by name; "sparse" are deltas against an earlier version.
    codecs: Py<PyDict>,
}

#[pymethods]
impl Receipt {
    fn __repr__(&self, py: Python<'_>) -> String {
        let Self { duration_s, wire_bytes, wanted_bytes, received_bytes, chunks, resumed, transport, .. } =
            self;
        let codecs: Vec<String> = self.codecs.bind(py).keys().iter().map(|codec| codec.to_string()).collect();
        let (codecs, resumed) = (
            codecs.join(", "),
            if *resumed > 0 { format!(", resumed {resumed} times") } else { String::new() },
        );
        format!(
            "Receipt({duration_s:.3} s, {wanted_bytes} bytes wanted of {received_bytes} received in {chunks} chunks, \
             {wire_bytes} on the wire over {transport}, {codecs}{resumed})"
        )
    }
}

/// The counters of one codec for a version.
#[pyclass(frozen, get_all, module = "tensor_relay")]
pub(crate) struct CodecCount {
    /// The number of chunks received in this codec. Chunks sent again after a lost connection count again.
    chunks: u64,
    /// The decoded size of these chunks in bytes.
    raw_bytes: u64,
    /// The encoded size of these chunks in bytes.
    wire_bytes: u64,
    /// The decoding time in seconds, summed over all workers.
    decode_s: f64,
}

#[pymethods]
impl CodecCount {
    fn __repr__(&self) -> String {
        let Self { chunks, raw_bytes, wire_bytes, decode_s } = self;
        format!("CodecCount({chunks} chunks, {raw_bytes} bytes as {wire_bytes}, decoded in {decode_s:.3} s)")
    }
}

impl Snapshot {
    pub(crate) fn with_tensors(Arrived { snapshot, gap }: &Arrived) -> Self {
        Self::new(snapshot.clone(), true, gap.as_ref().map(ToString::to_string))
    }

    pub(crate) fn without_tensors(snapshot: &client::Snapshot, gap: Option<&Gap>) -> Self {
        Self::new(snapshot.without_tensors(), false, gap.map(Gap::to_string))
    }

    fn new(version: client::Snapshot, has_tensors: bool, gap: Option<String>) -> Self {
        let load_report = ProcessLocal::new(version.load_report().clone());
        let reading = has_tensors.then(|| Reading::of(version.clone())).flatten();
        Self { version, has_tensors, gap, load_report, reading }
    }

    /// The version; without its tensors, if they were received into the user's own.
    pub(crate) fn received(&self) -> &client::Snapshot {
        &self.version
    }

    fn id(&self) -> &VersionId {
        self.version.id()
    }

    /// The version with its tensors, unless they were received into the user's own.
    fn tensors(&self) -> Option<&client::Snapshot> {
        self.has_tensors.then_some(&self.version)
    }

    /// The version with its tensors.
    ///
    /// # Errors
    /// `TensorRelayError` if they were received into the user's own.
    fn own_tensors(&self, py: Python<'_>) -> PyResult<&client::Snapshot> {
        self.tensors().ok_or_else(|| {
            Kind::Other.raise(
                py,
                "this version was received into `out`: use, copy or save the tensors that are there",
            )
        })
    }

    /// Records this version as the current one of `followed`, for the admin port.
    pub(crate) fn record(&self, followed: &FollowedTopic) {
        let version = &self.version;
        followed.committed(self.id(), version.payload_bytes(), version.skipped(), &version.receipt());
    }

    pub(crate) fn tensor(&self, name: &str) -> Option<Tensor> {
        let snapshot = self.tensors()?;
        let described = snapshot.selected(name)?;
        let bytes = match &self.reading {
            Some(reading) => Exported::Gpu(Readable::new(reading, snapshot.device_tensor(name)?.range())),
            None => Exported::Host(snapshot.volatile_tensor(name)?),
        };
        Some(Tensor::new(described, bytes))
    }

    /// A copy of a tensor in PyTorch's memory, which does not keep the version's.
    pub(crate) fn own_copy(&self, py: Python<'_>, name: &str) -> PyResult<Option<Py<PyAny>>> {
        let copied = self.tensor(name).map(|tensor| {
            let tensor = Bound::new(py, tensor)?.call_method0("torch")?;
            Ok(tensor.call_method0("clone")?.unbind())
        });
        copied.transpose()
    }

    /// The received version, to be copied to `out`.
    pub(crate) fn arrived(&self, py: Python<'_>) -> PyResult<Arrived> {
        Ok(Arrived { snapshot: self.own_tensors(py)?.clone(), gap: None })
    }

    /// Whether this is the version that `description` describes. False for a version received into the user's own
    /// tensors.
    pub(crate) fn is_of(&self, description: &Description) -> bool {
        self.tensors().is_some_and(|snapshot| description.is_of(snapshot))
    }

    /// The tensors in host memory, to be saved.
    fn on_host(&self, py: Python<'_>) -> PyResult<client::Snapshot> {
        let snapshot = self.own_tensors(py)?;
        match snapshot.is_on_device() {
            true => wait(py, snapshot.to_host())?.map_err(|error| of_device(py, &error)),
            false => Ok(snapshot.clone()),
        }
    }

    fn names(&self) -> Vec<&str> {
        let described = self.tensors().into_iter().flat_map(client::Snapshot::described);
        described.map(|tensor| tensor.name.as_str()).collect()
    }
}

#[pymethods]
impl Snapshot {
    /// The topic's name.
    #[getter]
    fn topic(&self) -> &str {
        self.id().topic.as_str()
    }

    /// The version's number, which rises within an epoch.
    #[getter]
    fn version(&self) -> u64 {
        self.id().version.0
    }

    /// The epoch of the topic: 16 hexadecimal digits, different after a restart of the publisher.
    #[getter]
    fn epoch(&self) -> String {
        self.id().epoch.to_string()
    }

    /// The metadata of this version: values published from Python unchanged, all others as text.
    ///
    /// Raises DamagedError if a value cannot be read.
    #[getter]
    fn metadata<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        metadata::to_user(py, self.version.metadata())
    }

    /// The metadata shared by all versions with these tensors, e.g. that of a safetensors file.
    #[getter]
    fn manifest_metadata<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        metadata::of_pairs(py, self.version.manifest().metadata())
    }

    /// The values that were published with the tensors but are not tensors: text, numbers, truth values and None, by
    /// name.
    ///
    /// Raises DamagedError if a value cannot be read.
    #[getter]
    fn entries<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        metadata::entries(py, self.version.metadata())
    }

    /// The number of versions that were published after the previous snapshot's version, and not delivered.
    #[getter]
    fn skipped(&self) -> u64 {
        self.version.skipped()
    }

    /// Whether this version does not continue the previous one: its epoch differs, because the publisher restarted and
    /// version numbers may have begun again from 1; or it has other content under the same epoch and number.
    #[getter]
    fn is_new_epoch(&self) -> bool {
        self.version.is_new_epoch()
    }

    /// The statistics of this version's transfer.
    #[getter]
    fn receipt(&self, py: Python<'_>) -> PyResult<Receipt> {
        let client::Receipt {
            duration,
            wire_bytes,
            wanted_bytes,
            received_bytes,
            chunks,
            resumed,
            codecs,
            transport,
            transport_reason,
            sharing,
            sources,
            ..
        } = self.version.receipt();
        let by_name = PyDict::new(py);
        for (codec, count) in codecs.iter() {
            let count = CodecCount {
                chunks: count.chunks,
                raw_bytes: count.raw_bytes,
                wire_bytes: count.wire_bytes,
                decode_s: count.worker_time.as_secs_f64(),
            };
            by_name.set_item(codec.name(), Py::new(py, count)?)?;
        }
        Ok(Receipt {
            duration_s: duration.as_secs_f64(),
            wire_bytes,
            wanted_bytes,
            received_bytes,
            chunks,
            resumed,
            transport: transport.name(),
            transport_reason: transport_reason.text(),
            sharing: sharing.to_string(),
            origin_bytes: sources.origin_bytes,
            peer_bytes: sources.peer_bytes,
            peers: sources.peers,
            codecs: by_name.unbind(),
        })
    }

    /// The size of the received chunks in bytes, decoded: of the tensors and the padding between them, and where boxes were
    /// received, of what lies between their runs. 0 if they were received into `out`.
    #[getter]
    fn payload_bytes(&self) -> u64 {
        self.tensors().map_or(0, client::Snapshot::payload_bytes)
    }

    /// Reports to the server that the program has loaded this version and uses it, for a publisher that waits
    /// (`Publication.wait_loaded`). Returns at once. It may be called again, after `out=`, and after the subscription's
    /// end. A server that does not know such reports counts nothing.
    fn loaded(&self, py: Python<'_>) -> PyResult<()> {
        self.load_report.get(py)?.send();
        Ok(())
    }

    /// Writes the tensors to `path` as a safetensors file, atomically and durably: readers see the old file or the new
    /// one. Missing parent folders are created. Tensors on a GPU are copied to the host first. Elements that another
    /// thread writes meanwhile are old or new ones in the file.
    ///
    /// Raises TensorRelayError when the file cannot be written, or when the tensors were received into `out`.
    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        let on_host = self.on_host(py)?;
        py.detach(|| on_host.save_safetensors(&path)).map_err(Kind::Other.because(py))
    }

    /// Writes the version below `folder` as the files that it was published from: for topic `a/b` a published folder
    /// becomes `folder/a/b`, and a single file e.g. `folder/a/b.safetensors`. It replaces an earlier version there: a
    /// file atomically, a folder atomically if the file system can exchange folders. Returns the path of that folder or
    /// file.
    ///
    /// With `keep`, the newest `keep` versions stay side by side, as `folder/a/b/VERSION-EPOCH` and so on, and the
    /// returned path is that of this version alone: its files are not replaced, and are deleted when `keep` newer
    /// versions were written.
    ///
    /// Raises TensorRelayError when the files cannot be written, when files of another origin are there, or when the
    /// tensors were received into `out`.
    #[pyo3(signature = (folder, *, keep = None))]
    fn save_files(&self, py: Python<'_>, folder: PathBuf, keep: Option<u32>) -> PyResult<PathBuf> {
        let keep = keep.map(|keep| within(py, "keep", keep, 1..=u32::MAX)).transpose()?;
        let on_host = self.on_host(py)?;
        let mirror = client::Mirror::new(folder, keep);
        py.detach(|| mirror.save(&on_host)).map_err(Kind::Other.because(py))
    }

    /// The GPU that the tensors lie on, as `cuda:0`; `cpu` for host memory.
    #[getter]
    fn device(&self) -> &str {
        let device = self.tensors().and_then(client::Snapshot::device);
        device.map_or("cpu", tensor_relay_device::Device::name)
    }

    /// A copy of this snapshot in host memory; the snapshot itself if it lies there. `timeout` is in seconds.
    ///
    /// Raises RelayTimeoutError after `timeout`, NoRoomError beyond `memory_bytes`, and TensorRelayError when the GPU
    /// fails or the tensors were received into `out`.
    #[pyo3(signature = (timeout = None))]
    fn to_host(slf: Bound<'_, Self>, timeout: Option<f64>) -> PyResult<Py<Self>> {
        let (py, this) = (slf.py(), slf.get());
        let timeout = seconds("timeout", timeout)?;
        let snapshot = this.own_tensors(py)?;
        if !snapshot.is_on_device() {
            return Ok(slf.unbind());
        }
        let copied = wait_at_most(py, timeout, snapshot.to_host())?
            .ok_or_else(|| Kind::Timeout.raise(py, "the tensors were not copied to the host in time"))?;
        let copied = copied.map_err(|error| of_device(py, &error))?;
        Py::new(py, Self::new(copied, true, this.gap.clone()))
    }

    /// Declares that `stream` reads the tensors. They are complete, so nothing is waited for. When the last tensor of
    /// this version is dropped, its GPU memory is reused only after the work that is queued on the stream at that time.
    ///
    /// stream: a stream of PyTorch, CuPy or Numba, an object with `__cuda_stream__`, or the number of a stream, which
    /// must then live until the last tensor is dropped; None is the legacy default stream. `torch()` declares PyTorch's
    /// current stream by itself, and `jax()` returns copies. For tensors in host memory this method has no effect.
    ///
    /// Raises TypeError for an object that is not a stream, ValueError for a stream of another GPU, and BufferError for
    /// 0 and for a stream that cannot be waited for, e.g. during graph capture.
    #[pyo3(signature = (stream = None))]
    fn wait(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        match (&self.reading, Stream::of(stream)?) {
            (Some(reading), Some(stream)) => reading.check_and_read_on(py, stream),
            _ => Ok(()),
        }
    }

    /// Whether it has tensors, unlike a version that was received into `out`.
    #[getter]
    fn _has_tensors(&self) -> bool {
        self.has_tensors
    }

    fn __getitem__(&self, name: &str) -> PyResult<Tensor> {
        self.tensor(name).ok_or_else(|| PyKeyError::new_err(name.to_owned()))
    }

    fn __contains__(&self, name: &Bound<'_, PyAny>) -> bool {
        name.extract::<String>().is_ok_and(|name| self.tensor(&name).is_some())
    }

    fn __len__(&self) -> usize {
        self.names().len()
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        PyList::new(py, self.names())?.try_iter()
    }

    fn __repr__(&self) -> String {
        format!("Snapshot({}, {} tensors, {} bytes)", self.id(), self.names().len(), self.payload_bytes())
    }
}
