//! Importing tensors of other libraries, by DLPack or by the buffer protocol.
#![allow(unsafe_code, reason = "reads the contents of DLPack's capsules")]

use super::{
    dlpack::{self, DataType, LEGACY, LegacyTensor, Names, VERSIONED, VersionedTensor},
    foreign::{Foreign, Keep},
    layout::Layout,
    on_gpu::OnGpu,
    strides::{ContiguousRuns, dense},
};
use crate::{
    gpu::{Gpus, Opened},
    tensors_in::is_of_tensor,
};
use pyo3::{
    buffer::{ElementType, PyUntypedBuffer},
    exceptions::{PyBufferError, PyTypeError},
    ffi,
    prelude::*,
    types::{PyCapsule, PyDict},
};
use std::{collections::BTreeMap, ffi::c_void, fmt::Display, ops::Deref, ptr::NonNull};
use tensor_relay_client::Dtype;

/// The lent memory of another library's tensor.
#[derive(Debug)]
pub(crate) enum Lent {
    Host(Foreign),
    Gpu(OnGpu),
}

impl Lent {
    /// Imports `tensor` without a copy. The memory of a GPU may be used once a fence of [`CudaEngine::fence_intake`] has
    /// passed that was recorded after [`Unordered::order`].
    ///
    /// # Errors
    /// `TypeError` for an object that is not a tensor; `BufferError` for a tensor on another kind of device, or whose
    /// elements have no dtype here; and exceptions of the tensor's own library.
    ///
    /// [`CudaEngine::fence_intake`]: tensor_relay_device::cuda::CudaEngine::fence_intake
    pub(crate) fn of<'py>(
        tensor: &Bound<'py, PyAny>,
        gpus: &Gpus,
        unordered: &mut Unordered<'py>,
    ) -> PyResult<Self> {
        if !tensor.hasattr("__dlpack__")? {
            return Ok(Self::Host(Foreign::from_buffer(tensor)?));
        }
        let device = tensor.call_method0("__dlpack_device__");
        let (kind, id): (i32, i32) = device.map_err(|error| not_lent(tensor.py(), error))?.extract()?;
        match kind {
            dlpack::DEVICE_CPU | dlpack::DEVICE_CUDA_HOST => {
                Ok(Self::Host(Foreign::in_capsule(Capsule::take(&export(tensor, None)?)?, None)?))
            }
            dlpack::DEVICE_CUDA | dlpack::DEVICE_CUDA_MANAGED => {
                let ordinal = usize::try_from(id).unwrap_or(usize::MAX);
                Ok(Self::Gpu(on_gpu(tensor, gpus, ordinal, unordered)?))
            }
            other => Err(PyBufferError::new_err(format!(
                "it lies in memory of {} (DLPack's {kind}:{id}), and only tensors on the host and on CUDA's GPUs are supported: \
                 publish a copy on the host, or receive into a tensor there",
                dlpack::device_name(other)
            ))),
        }
    }

    /// Changes the dtype to one of the same size, which the tensor's own library cannot express.
    pub(crate) fn reinterpret_as(&mut self, dtype: Dtype) {
        let tensor = match self {
            Self::Host(tensor) => tensor,
            Self::Gpu(OnGpu { tensor, .. }) => tensor,
        };
        tensor.layout.dtype = dtype;
    }

    /// Returns the memory to its library at once, with the GIL held.
    pub(crate) fn give_back(self, py: Python<'_>) {
        match self {
            Self::Host(tensor) => tensor.give_back(py),
            Self::Gpu(tensor) => tensor.give_back(py),
        }
    }
}

impl Deref for Lent {
    type Target = Layout;

    fn deref(&self) -> &Layout {
        match self {
            Self::Host(tensor) => tensor,
            Self::Gpu(tensor) => tensor,
        }
    }
}

/// Exporters of tensors that wait for no work yet, the last one for each library and GPU, with the engine's stream. It
/// stands for all: these libraries order each tensor alike, after their current stream.
#[derive(Default)]
pub(crate) struct Unordered<'py>(BTreeMap<(String, usize), (Bound<'py, PyAny>, usize)>);

impl Unordered<'_> {
    /// Makes the engines' streams wait for the work queued on the libraries' streams so far. Once for each library and
    /// GPU: for each tensor, the libraries' events would cost more than all else.
    pub(crate) fn order(self) -> PyResult<()> {
        let mut exporters = self.0.into_values();
        exporters.try_for_each(|(exporter, intake)| {
            Capsule::take(&export(&exporter, Some(intake.cast_signed()))?).map(drop)
        })
    }
}

/// DLPack's stream for an export that waits for nothing.
const NO_STREAM: isize = -1;

/// Imports a tensor on GPU `ordinal`. The tensor's library makes the engine's stream (in DLPack's terms, the
/// consumer's) wait for the work queued on the library's stream, now or at [`Unordered::order`].
fn on_gpu<'py>(
    tensor: &Bound<'py, PyAny>,
    gpus: &Gpus,
    ordinal: usize,
    unordered: &mut Unordered<'py>,
) -> PyResult<OnGpu> {
    let refuse = |why: &dyn Display| {
        PyBufferError::new_err(format!("it lies on cuda:{ordinal}, which cannot be used: {why}"))
    };
    let Opened { device, intake } = gpus.opened(tensor.py(), ordinal).map_err(|error| refuse(&error))?;
    let stream = match tensor.getattr_opt("_tensor_relay_ordered_by")? {
        None => intake.cast_signed(),
        Some(library) => {
            unordered.0.insert((library.extract()?, ordinal), (tensor.clone(), intake));
            NO_STREAM
        }
    };
    let tensor = Foreign::in_capsule(Capsule::take(&export(tensor, Some(stream))?)?, Some(ordinal))?;
    Ok(OnGpu::new(tensor, device))
}

impl Foreign {
    /// The tensor in a capsule. Its library has reported this GPU, or the host, as its device.
    fn in_capsule(capsule: Capsule, gpu: Option<usize>) -> PyResult<Self> {
        let tensor = capsule.tensor()?;
        check_device(tensor.device, gpu)?;
        // SAFETY: the capsule keeps its tensor, and the tensor's library vouches for `ndim` numbers at its pointers.
        let (shape, strides) = unsafe { dimensions(tensor) }?;
        let (dtype, per_element) = dlpack::from_dlpack(tensor.dtype).ok_or_else(|| unknown(tensor.dtype))?;
        let item_bytes = usize::from(tensor.dtype.bits) * usize::from(tensor.dtype.lanes) / 8;
        let strides = strides.unwrap_or_else(|| dense(&shape));
        let strides: Vec<isize> =
            strides.iter().map(|stride| *stride as isize * item_bytes as isize).collect();
        let len = length(&shape, item_bytes)?;
        let start = match NonNull::new(tensor.data.cast::<u8>()) {
            // SAFETY: the tensor's library vouches that its memory contains this offset.
            Some(data) if len > 0 => unsafe { data.byte_add(tensor.byte_offset as usize) },
            _ if len > 0 => return Err(PyBufferError::new_err("its library exported it without memory")),
            _ => NonNull::dangling(),
        };
        let runs = ContiguousRuns::of(&shape, &strides, item_bytes);
        let shape = in_our_elements(shape, per_element)?;
        let is_writable = !capsule.is_read_only();
        let layout = Layout { gpu, start, dtype, shape, len, runs, is_writable };
        Ok(Self { layout, keep: Some(Keep::Capsule(capsule)) })
    }

    fn from_buffer(tensor: &Bound<'_, PyAny>) -> PyResult<Self> {
        let buffer = PyUntypedBuffer::get(tensor).map_err(|_| {
            PyTypeError::new_err(
                "it is no tensor: it has neither `__dlpack__` nor the buffer protocol; use an array instead \
                 (`.to_numpy()`, `.toarray()`, …)",
            )
        })?;
        if buffer
            .suboffsets()
            .is_some_and(|offsets| offsets.iter().any(|offset| *offset >= 0))
        {
            return Err(PyBufferError::new_err(
                "its elements lie behind pointers (suboffsets of the buffer protocol): publish a contiguous copy, \
                 or receive into a contiguous array",
            ));
        }
        let dtype = dtype_of_format(&buffer).ok_or_else(|| {
            PyBufferError::new_err(format!("no dtype stands for its elements (format {:?})", buffer.format()))
        })?;
        let shape: Vec<u64> = buffer.shape().iter().map(|len| *len as u64).collect();
        let runs = ContiguousRuns::of(&shape, buffer.strides(), buffer.item_size());
        let len = buffer.len_bytes();
        let start = NonNull::new(buffer.buf_ptr().cast())
            .filter(|_| len > 0)
            .unwrap_or(NonNull::dangling());
        let is_writable = !buffer.readonly();
        let layout = Layout { gpu: None, start, dtype, shape, len, runs, is_writable };
        Ok(Self { layout, keep: Some(Keep::Buffer(buffer)) })
    }
}

/// The tensor's capsule, of DLPack 1 if its library supports that, else a legacy one. On a GPU, `stream` is the stream
/// that waits for the tensor.
fn export<'py>(tensor: &Bound<'py, PyAny>, stream: Option<isize>) -> PyResult<Bound<'py, PyCapsule>> {
    let keywords = PyDict::new(tensor.py());
    if let Some(stream) = stream {
        keywords.set_item("stream", stream)?;
    }
    let legacy_keywords = keywords.copy()?;
    keywords.set_item("max_version", (dlpack::VERSION.major, dlpack::VERSION.minor))?;
    let capsule = match tensor.call_method("__dlpack__", (), Some(&keywords)) {
        Err(error) if error.is_instance_of::<PyTypeError>(tensor.py()) => {
            tensor.call_method("__dlpack__", (), Some(&legacy_keywords))
        }
        capsule => capsule,
    };
    let capsule = capsule.map_err(|error| not_lent(tensor.py(), error))?;
    Ok(capsule.cast_into::<PyCapsule>()?)
}

/// The error of a tensor's own library that does not export it, in a sentence that says whose text it is.
pub(crate) fn not_lent(py: Python<'_>, error: PyErr) -> PyErr {
    if !is_of_tensor(py, &error) {
        return error;
    }
    let message = format!("its library does not give access to its memory ({error})");
    let raised = PyBufferError::new_err(message);
    raised.set_cause(py, Some(error));
    raised
}

/// Refuses a capsule whose tensor lies on another device than `__dlpack_device__` has reported, where its address would
/// mean other memory. The number of a host device is ignored: some libraries count several, but all are the same
/// memory.
fn check_device(actual: dlpack::Device, gpu: Option<usize>) -> PyResult<()> {
    let is_as_reported = match actual.kind {
        dlpack::DEVICE_CPU | dlpack::DEVICE_CUDA_HOST => gpu.is_none(),
        dlpack::DEVICE_CUDA | dlpack::DEVICE_CUDA_MANAGED => {
            gpu.is_some() && usize::try_from(actual.id).ok() == gpu
        }
        _ => false,
    };
    let reported = || gpu.map_or_else(|| "the host".to_owned(), |ordinal| format!("cuda:{ordinal}"));
    match is_as_reported {
        true => Ok(()),
        false => Err(PyBufferError::new_err(format!(
            "its library reported that it lies on {}, but exported memory of DLPack's device {}:{}, which is an error of the \
             library",
            reported(),
            actual.kind,
            actual.id
        ))),
    }
}

fn unknown(dtype: DataType) -> PyErr {
    let DataType { code, bits, lanes } = dtype;
    PyBufferError::new_err(format!(
        "no dtype stands for its elements (DLPack's code {code}, {bits} bits, {lanes} lanes)"
    ))
}

/// The shape in elements of our dtype, `per_element` of which make one element of DLPack's.
fn in_our_elements(mut shape: Vec<u64>, per_element: u64) -> PyResult<Vec<u64>> {
    match shape.last_mut() {
        Some(last) => *last *= per_element,
        None if per_element == 1 => {}
        None => {
            return Err(PyBufferError::new_err(
                "its dtype packs two elements into one, and such a tensor needs at least one dimension",
            ));
        }
    }
    Ok(shape)
}

fn length(shape: &[u64], item_bytes: usize) -> PyResult<usize> {
    let items = shape.iter().try_fold(1, |items: u64, len| items.checked_mul(*len));
    let bytes = items.and_then(|items| usize::try_from(items).ok()?.checked_mul(item_bytes));
    bytes.ok_or_else(|| PyBufferError::new_err("its shape is larger than memory"))
}

/// The dtype of a format character, native or little-endian.
fn dtype_of_format(buffer: &PyUntypedBuffer) -> Option<Dtype> {
    let format = buffer.format();
    if matches!(format.to_bytes(), [b'>' | b'!', _, ..]) {
        return None;
    }
    Some(match ElementType::from_format(format) {
        ElementType::Bool => Dtype::Bool,
        ElementType::SignedInteger { bytes: 1 } => Dtype::I8,
        ElementType::SignedInteger { bytes: 2 } => Dtype::I16,
        ElementType::SignedInteger { bytes: 4 } => Dtype::I32,
        ElementType::SignedInteger { bytes: 8 } => Dtype::I64,
        ElementType::UnsignedInteger { bytes: 1 } => Dtype::U8,
        ElementType::UnsignedInteger { bytes: 2 } => Dtype::U16,
        ElementType::UnsignedInteger { bytes: 4 } => Dtype::U32,
        ElementType::UnsignedInteger { bytes: 8 } => Dtype::U64,
        ElementType::Float { bytes: 2 } => Dtype::F16,
        ElementType::Float { bytes: 4 } => Dtype::F32,
        ElementType::Float { bytes: 8 } => Dtype::F64,
        _ => return None,
    })
}

/// The shape and strides of `tensor`; no strides if it is contiguous.
///
/// # Safety
/// `tensor` was exported by its library, and is kept: its pointers lead to `ndim` numbers each, or are null.
unsafe fn dimensions(tensor: &dlpack::Tensor) -> PyResult<(Vec<u64>, Option<Vec<i64>>)> {
    let invalid = || PyBufferError::new_err("its library exported it with an invalid shape");
    let ndim = usize::try_from(tensor.ndim).map_err(|_| invalid())?;
    if ndim == 0 {
        return Ok((vec![], None));
    }
    let shape = NonNull::new(tensor.shape).ok_or_else(invalid)?;
    // SAFETY: the caller vouches for `ndim` numbers.
    let shape = unsafe { NonNull::slice_from_raw_parts(shape, ndim).as_ref() };
    let shape = shape
        .iter()
        .map(|len| u64::try_from(*len).map_err(|_| invalid()))
        .collect::<PyResult<_>>()?;
    let strides = NonNull::new(tensor.strides).map(|strides| {
        // SAFETY: the caller vouches for `ndim` numbers.
        unsafe { NonNull::slice_from_raw_parts(strides, ndim).as_ref() }.to_vec()
    });
    Ok((shape, strides))
}

/// The contents of a capsule. Dropping them calls their library's deleter, which may need the GIL.
#[derive(Debug)]
pub(super) enum Capsule {
    Versioned(NonNull<VersionedTensor>),
    Legacy(NonNull<LegacyTensor>),
}

// SAFETY: DLPack lets any thread use the tensor and call the deleter.
unsafe impl Send for Capsule {}

impl Capsule {
    /// Takes the contents of `capsule`, as its only consumer.
    fn take(capsule: &Bound<'_, PyCapsule>) -> PyResult<Self> {
        match capsule.is_valid_checked(Some(VERSIONED.unused)) {
            true => Ok(Self::Versioned(take(capsule, &VERSIONED)?.cast())),
            false => Ok(Self::Legacy(take(capsule, &LEGACY)?.cast())),
        }
    }

    fn tensor(&self) -> PyResult<&dlpack::Tensor> {
        match self {
            Self::Versioned(managed) => {
                // SAFETY: a capsule of this name contains such a structure, which its library keeps valid until its
                // deleter is called.
                let managed = unsafe { managed.as_ref() };
                match managed.version.major == dlpack::VERSION.major {
                    true => Ok(&managed.tensor),
                    false => Err(PyBufferError::new_err(format!(
                        "its library exports it by DLPack {}, and Tensor Relay supports DLPack {}",
                        managed.version.major,
                        dlpack::VERSION.major
                    ))),
                }
            }
            // SAFETY: as above.
            Self::Legacy(managed) => Ok(&unsafe { managed.as_ref() }.tensor),
        }
    }

    fn is_read_only(&self) -> bool {
        match self {
            // SAFETY: as in `tensor`.
            Self::Versioned(managed) => unsafe { managed.as_ref() }.flags & dlpack::READ_ONLY != 0,
            Self::Legacy(_) => false,
        }
    }
}

/// Takes the pointer out of a capsule, and marks the capsule as used.
fn take(capsule: &Bound<'_, PyCapsule>, names: &Names) -> PyResult<NonNull<c_void>> {
    let pointer = capsule.pointer_checked(Some(names.unused))?;
    // SAFETY: `capsule` is a capsule, the GIL is held, and the name is static.
    match unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), names.used.as_ptr()) } {
        0 => Ok(pointer),
        _ => Err(PyErr::fetch(capsule.py())),
    }
}

impl Drop for Capsule {
    fn drop(&mut self) {
        match self {
            Self::Versioned(managed) => {
                // SAFETY: as in `tensor`: the deleter was not called before, since only this calls it.
                if let Some(delete) = unsafe { managed.as_ref() }.deleter {
                    // SAFETY: DLPack requires that the consumer calls the deleter, once, with the structure.
                    unsafe { delete(managed.as_ptr()) }
                }
            }
            Self::Legacy(managed) => {
                // SAFETY: as above.
                if let Some(delete) = unsafe { managed.as_ref() }.deleter {
                    // SAFETY: as above.
                    unsafe { delete(managed.as_ptr()) }
                }
            }
        }
    }
}
