//! `Client.describe`: the contents of a version, without its tensors.

use crate::metadata;
use pyo3::{
    prelude::*,
    types::{PyDict, PyTuple},
};
use std::sync::Arc;
use tensor_relay_client::{
    Client, Epoch, GetError, Manifest, Request, Shape, Snapshot, Topic, Version, VersionId,
};

/// The description of a version: its metadata, and each tensor's name, dtype and shape.
#[pyclass(frozen, module = "tensor_relay")]
pub(crate) struct Description(Snapshot);

/// The description of a tensor.
#[pyclass(frozen, module = "tensor_relay")]
pub(crate) struct TensorInfo {
    /// The type of the elements, e.g. `bf16`.
    #[pyo3(get)]
    dtype: &'static str,
    shape: Shape,
    /// The tensor's size in bytes.
    #[pyo3(get)]
    nbytes: u64,
}

/// The version of `get` or `describe`: the newest, or one by its number.
pub(crate) struct VersionSelector {
    pub(crate) topic: Topic,
    pub(crate) version: Option<(Option<Epoch>, Version)>,
}

impl VersionSelector {
    pub(crate) fn request(&self) -> Request {
        let topic = self.topic.clone();
        match self.version {
            None => Request::newest(topic),
            Some((epoch, version)) => Request::exactly(topic, epoch, version).awaited(),
        }
    }

    /// Receives the version's description.
    pub(crate) async fn receive(&self, client: &Client) -> Result<Description, GetError> {
        client.get(self.request().describe()).await.map(Description)
    }
}

impl Description {
    pub(crate) fn id(&self) -> &VersionId {
        self.0.id()
    }

    pub(crate) fn manifest(&self) -> &Arc<Manifest> {
        self.0.manifest()
    }

    /// Whether `snapshot` is of this very version: by topic, epoch and number, manifest and metadata.
    pub(crate) fn is_of(&self, snapshot: &Snapshot) -> bool {
        snapshot.id() == self.id()
            && snapshot.manifest() == self.manifest()
            && snapshot.metadata() == self.0.metadata()
    }
}

#[pymethods]
impl Description {
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

    /// The epoch of the topic: 16 hexadecimal digits.
    #[getter]
    fn epoch(&self) -> String {
        self.id().epoch.to_string()
    }

    /// The metadata of this version, as `Snapshot.metadata`.
    ///
    /// Raises DamagedError if a value cannot be read.
    #[getter]
    fn metadata<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        metadata::to_user(py, self.0.metadata())
    }

    /// The metadata shared by all versions with these tensors, as `Snapshot.manifest_metadata`.
    #[getter]
    fn manifest_metadata<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        metadata::of_pairs(py, self.manifest().metadata())
    }

    /// The values that were published with the tensors but are not tensors, as `Snapshot.entries`.
    ///
    /// Raises DamagedError if a value cannot be read.
    #[getter]
    fn entries<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        metadata::entries(py, self.0.metadata())
    }

    /// The size of all tensors in bytes, including the padding between them.
    #[getter]
    fn payload_bytes(&self) -> u64 {
        self.manifest().payload_bytes()
    }

    /// The tensors by name, in published order.
    #[getter]
    fn tensors<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let by_name = PyDict::new(py);
        for tensor in self.manifest().tensors() {
            let (dtype, shape) = (tensor.dtype.name(), tensor.shape.clone());
            let info = TensorInfo { dtype, shape, nbytes: tensor.byte_len() };
            by_name.set_item(tensor.name.as_str(), Py::new(py, info)?)?;
        }
        Ok(by_name)
    }

    fn __repr__(&self) -> String {
        format!(
            "Description({}, {} tensors, {} bytes)",
            self.id(),
            self.manifest().tensors().len(),
            self.manifest().payload_bytes()
        )
    }
}

#[pymethods]
impl TensorInfo {
    /// The tensor's dimensions, outermost first.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.shape.dimensions())
    }

    fn __repr__(&self) -> String {
        format!("TensorInfo({} {:?}, {} bytes)", self.dtype, self.shape.dimensions(), self.nbytes)
    }
}
