//! `tensor_relay.Tensor`: one tensor of a snapshot, for any framework.

use crate::{
    errors::Kind,
    gpu::copies::CopyFailed,
    memory::{
        self, CPU, Export, Exported, Readable, Stream, ViewSource, capsule, dense, fill_view, format_of,
        to_dlpack,
    },
    runtime::forked,
    wait::wait,
};
use pyo3::{exceptions::PyBufferError, ffi, prelude::*, types::PyTuple};
use tensor_relay_client::{Dtype, Shard, Tensor as Described};
use tensor_relay_device::{Region, VolatileBytes};

/// One tensor of a snapshot. Arrays made of it (`torch`, `numpy`, …) lie in the snapshot's memory and keep it alive,
/// unless said otherwise.
#[pyclass(frozen, weakref, module = "tensor_relay")]
pub(crate) struct Tensor {
    bytes: Exported,
    dtype: Dtype,
    shape: Vec<u64>,
    /// Where it lies in the whole tensor, if it is a box of one.
    place: Option<Shard>,
    /// Shape, and strides in bytes, for the buffer protocol.
    buffer_layout: (Vec<isize>, Vec<isize>),
}

impl Tensor {
    pub(crate) fn new(described: &Described, bytes: Exported) -> Self {
        let shape = described.shape.dimensions().to_vec();
        Self { place: described.shard.clone(), ..Self::of(bytes, described.dtype, shape) }
    }

    fn of(bytes: Exported, dtype: Dtype, shape: Vec<u64>) -> Self {
        let item_bytes = dtype.bits() as isize / 8;
        // No overflow: the manifest was checked, and all bytes of the tensor are in memory.
        let strides = dense(&shape).iter().map(|stride| *stride as isize * item_bytes).collect();
        let buffer_layout = (shape.iter().map(|len| *len as isize).collect(), strides);
        Self { bytes, dtype, shape, place: None, buffer_layout }
    }

    pub(crate) fn is_on_gpu(&self) -> bool {
        matches!(self.bytes, Exported::Gpu(_))
    }
}

#[pymethods]
impl Tensor {
    /// The type of the elements, e.g. `bf16` or `f8_e4m3fn`.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.dtype.name()
    }

    /// The dimensions, outermost first.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    /// The box of the whole tensor that this is; None if it is the whole.
    #[getter]
    fn r#box<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let Some(Shard { start, .. }) = &self.place else { return Ok(None) };
        let class = py.import("tensor_relay._boxes")?.getattr("Box")?;
        class.call1((PyTuple::new(py, start)?, self.shape(py)?)).map(Some)
    }

    /// The dimensions of the whole tensor: `shape`, unless this is a box.
    #[getter]
    fn global_shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let whole = self.place.as_ref().map(|place| place.global_shape.dimensions());
        PyTuple::new(py, whole.unwrap_or(&self.shape))
    }

    /// The size in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.bytes.len()
    }

    /// The bytes as a tensor of `u8` with one dimension.
    #[getter]
    fn raw(&self) -> Self {
        Self::of(self.bytes.clone(), Dtype::U8, vec![self.bytes.len() as u64])
    }

    /// The same elements as unsigned integers of the same size.
    ///
    /// Raises UnsupportedTensorError for elements smaller than one byte or larger than eight bytes.
    #[getter]
    fn bits(&self, py: Python<'_>) -> PyResult<Self> {
        let dtype = match self.dtype.bits() {
            8 => Dtype::U8,
            16 => Dtype::U16,
            32 => Dtype::U32,
            64 => Dtype::U64,
            bits => {
                let message =
                    format!("no unsigned integers have {bits} bits, the size of {}: use `raw`", self.dtype);
                return Err(Kind::UnsupportedTensor.raise(py, message));
            }
        };
        let bits = Self::of(self.bytes.clone(), dtype, self.shape.clone());
        Ok(Self { place: self.place.clone(), ..bits })
    }

    /// A copy in host memory; the tensor itself if it lies there. Waits for the copy.
    ///
    /// Raises NoRoomError, and TensorRelayError when the GPU fails.
    fn to_host(slf: Bound<'_, Self>) -> PyResult<Py<Self>> {
        let (py, tensor) = (slf.py(), slf.get());
        match &tensor.bytes {
            Exported::Host(_) => Ok(slf.unbind()),
            Exported::Gpu(bytes) => {
                let copy = Exported::Host(copied(py, bytes, bytes.to_host())?);
                let copy = Self::of(copy, tensor.dtype, tensor.shape.clone());
                Py::new(py, Self { place: tensor.place.clone(), ..copy })
            }
        }
    }

    /// The device in DLPack's terms: `(1, 0)` for the host, `(2, N)` for `cuda:N`.
    fn __dlpack_device__(&self) -> (i32, i32) {
        self.bytes.device()
    }

    /// Exports the tensor by DLPack, without a copy unless `copy` is True: in a capsule of DLPack 1 if `max_version`
    /// allows it, else in a legacy capsule.
    ///
    /// The memory is exported as writable, because frameworks ignore the read-only flag; writes change the snapshot.
    /// With `dl_device=(1, 0)` a tensor on a GPU is copied to the host.
    ///
    /// On a GPU, `stream` is the number of the stream that reads the tensor: 1 or None is the legacy default stream, 2
    /// the per-thread default stream. The stream may read at once, because the data is complete. When the last tensor
    /// of the version is dropped, its memory is reused only after the work that is queued on the stream at that time,
    /// so the stream must live until then (PyTorch's and default streams do), or be passed as an object to
    /// `Snapshot.wait`, which keeps it. With -1 the caller must make sure that nothing reads the tensor when it is
    /// dropped.
    ///
    /// Raises BufferError for another device, an invalid stream, elements that DLPack's consumers do not support, and
    /// when a copy of host memory fails; NoRoomError or TensorRelayError when a copy of GPU memory fails.
    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__(
        &self,
        py: Python<'_>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Py<PyAny>> {
        let (bytes, is_copy) = match &self.bytes {
            Exported::Host(bytes) => on_host(bytes, stream, dl_device, copy)?,
            Exported::Gpu(bytes) => on_gpu(py, bytes, stream, dl_device, copy)?,
        };
        let (dtype, shape) = self.dlpack_type()?;
        let strides = dense(&shape);
        let shape = shape.iter().map(|len| *len as i64).collect();
        let is_versioned = max_version.is_some_and(|(major, _)| major >= 1);
        capsule(py, Export { bytes, dtype, shape, strides, is_copy }, is_versioned)
    }

    /// # Safety
    /// Called by Python alone, with a view to be filled.
    #[expect(unsafe_code, reason = "the buffer protocol is a C function, implemented in `memory::buffer`")]
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: i32) -> PyResult<()> {
        let tensor = slf.get();
        let format = format_of(tensor.dtype).ok_or_else(|| {
            let dtype = tensor.dtype;
            PyBufferError::new_err(format!(
                "the buffer protocol has no format for {dtype}: take `bits` or `raw`"
            ))
        })?;
        let (shape, strides) = &tensor.buffer_layout;
        let item_bytes = tensor.dtype.bits() as usize / 8;
        let Exported::Host(bytes) = &tensor.bytes else {
            return Err(PyBufferError::new_err(
                "it lies on a GPU, which the buffer protocol does not support: use `to_host()`",
            ));
        };
        let source = ViewSource { bytes, format, item_bytes, shape, strides };
        // SAFETY: Python passes a valid `view`. All parts of `source` belong to `slf`, which is frozen.
        unsafe { fill_view(view, flags, slf.clone().into_any(), &source) }
    }

    fn __repr__(&self) -> String {
        format!("Tensor({}, {:?}, {} bytes)", self.dtype, self.shape, self.bytes.len())
    }
}

impl Tensor {
    /// The dtype and shape in DLPack's terms.
    fn dlpack_type(&self) -> PyResult<(memory::DataType, Vec<u64>)> {
        let refuse = |why| {
            PyBufferError::new_err(format!("{} cannot be exported by DLPack: {why}; use `raw`", self.dtype))
        };
        let (dtype, per_element) =
            to_dlpack(self.dtype).ok_or_else(|| refuse("frameworks do not support such elements"))?;
        let mut shape = self.shape.clone();
        match shape.last_mut() {
            _ if per_element == 1 => {}
            Some(last) if last.is_multiple_of(per_element) => *last /= per_element,
            _ => return Err(refuse("frameworks store two in a byte, and the last dimension is odd")),
        }
        Ok((dtype, shape))
    }
}

/// Bytes on the host for a consumer on the host, and whether they are a copy.
fn on_host(
    bytes: &VolatileBytes,
    stream: Option<i64>,
    dl_device: Option<(i32, i32)>,
    copy: Option<bool>,
) -> PyResult<(Exported, bool)> {
    if stream.is_some_and(|stream| stream != -1) {
        return Err(PyBufferError::new_err(
            "it lies on the host, which has no streams: `stream` must be None",
        ));
    }
    if dl_device.is_some_and(|device| device != CPU) {
        return Err(PyBufferError::new_err("it lies on the host: import it there, and move the result"));
    }
    let is_copy = copy == Some(true);
    let bytes = if is_copy { copy_of(bytes)? } else { bytes.clone() };
    Ok((Exported::Host(bytes), is_copy))
}

/// A copy of bytes that Python code may be writing to.
fn copy_of(bytes: &VolatileBytes) -> PyResult<VolatileBytes> {
    let mut copy = vec![];
    let no_memory = |_| PyBufferError::new_err("there is no memory for a copy of it");
    copy.try_reserve_exact(bytes.len()).map_err(no_memory)?;
    copy.resize(bytes.len(), 0);
    bytes.copy_to(&mut copy);
    Ok(Region::from_owner(copy).into())
}

/// Bytes on a GPU for a consumer on that GPU or on the host, and whether they are a copy.
fn on_gpu(
    py: Python<'_>,
    bytes: &Readable,
    stream: Option<i64>,
    dl_device: Option<(i32, i32)>,
    copy: Option<bool>,
) -> PyResult<(Exported, bool)> {
    let here = Exported::Gpu(bytes.clone()).device();
    let wanted = dl_device.unwrap_or(here);
    if wanted == CPU {
        return match copy {
            Some(false) => {
                let message =
                    format!("it lies on {}, and can be on the host only as a copy", bytes.device().name());
                Err(PyBufferError::new_err(message))
            }
            _ => Ok((Exported::Host(copied(py, bytes, bytes.to_host())?), true)),
        };
    }
    if wanted != here {
        let message = format!("it lies on {}: import it there, and move the result", bytes.device().name());
        return Err(PyBufferError::new_err(message));
    }
    let is_copy = copy == Some(true);
    let bytes = if is_copy { copied(py, bytes, bytes.copy())? } else { bytes.clone() };
    check_fork(py, &bytes)?;
    if let Some(stream) = Stream::of_consumer(py, stream)? {
        bytes.reading.read_on(stream);
    }
    Ok((Exported::Gpu(bytes), is_copy))
}

/// Waits for a copy of bytes on a GPU.
fn copied<T: Send>(
    py: Python<'_>,
    bytes: &Readable,
    copy: impl Future<Output = Result<T, CopyFailed>> + Send,
) -> PyResult<T> {
    check_fork(py, bytes)?;
    wait(py, copy)?.map_err(|failed| failed.raise(py))
}

fn check_fork(py: Python<'_>, bytes: &Readable) -> PyResult<()> {
    match bytes.reading.forked_from() {
        Some(parent) => Err(forked(py, parent)),
        None => Ok(()),
    }
}
