//! GPU streams of other libraries, on which our tensors are read.
#![allow(unsafe_code, reason = "takes the numbers of other libraries' streams for streams")]

use crate::{interpreter, tensors_in::frameworks};
use pyo3::{
    exceptions::{PyBufferError, PyTypeError, PyValueError},
    prelude::*,
    types::{PyAnyMethods, PyInt},
};
use std::{ptr, sync::Arc};
use tensor_relay_device::cuda::StreamHandle;

/// A stream on which a tensor is read, and the object that keeps it, where one is known.
#[derive(Debug)]
pub(crate) struct Stream {
    /// Never that of the per-thread default stream, which means another one on each thread: work of the legacy default stream
    /// comes after it, so that one stands for it.
    number: usize,
    keeper: Option<Arc<KeptStream>>,
}

/// `CU_STREAM_LEGACY` and `CU_STREAM_PER_THREAD`, in DLPack and in CUDA.
const LEGACY: usize = 1;
const PER_THREAD: usize = 2;

/// The attributes that hold a stream's handle: PyTorch, CuPy, Numba.
const ATTRIBUTES: [&str; 3] = ["cuda_stream", "ptr", "handle"];

/// The attributes that hold the number of a stream's GPU: PyTorch, CuPy.
const DEVICES: [&str; 2] = ["device_index", "device_id"];

impl Stream {
    /// The stream that DLPack means by this number, or None. None where the consumer says that it needs no order.
    ///
    /// # Errors
    /// `BufferError` for 0, which means two streams and which DLPack forbids, and for what is no stream.
    pub(crate) fn numbered(number: Option<i64>) -> PyResult<Option<Self>> {
        let number = match number {
            None => LEGACY,
            Some(-1) => return Ok(None),
            Some(0) => {
                return Err(PyBufferError::new_err(
                    "stream 0 may mean two streams, so DLPack forbids it: 1 is the legacy default stream, 2 the per-thread one",
                ));
            }
            Some(number) => usize::try_from(number)
                .map_err(|_| PyBufferError::new_err(format!("{number} is no stream")))?,
        };
        Ok(Some(Self::new(number, None)))
    }

    /// The stream that an object stands for: a number as above, a stream of PyTorch, CuPy or Numba, or anything with
    /// `__cuda_stream__`. None is the legacy default stream.
    ///
    /// # Errors
    /// `TypeError` for what is none, and those of [`numbered`](Self::numbered).
    pub(crate) fn of(object: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Self>> {
        let Some(object) = object else { return Self::numbered(None) };
        if object.is_instance_of::<PyInt>() {
            return Self::numbered(Some(object.extract()?));
        }
        let number: usize = match number_of(object)? {
            0 => LEGACY, // What frameworks call their default stream.
            number => number,
        };
        Ok(Some(Self::new(number, Some(object.clone().unbind()))))
    }

    /// The same for the stream that a consumer names by DLPack, with what keeps it, where its framework can tell.
    ///
    /// # Errors
    /// As [`numbered`](Self::numbered).
    pub(crate) fn of_consumer(py: Python<'_>, number: Option<i64>) -> PyResult<Option<Self>> {
        let stream = Self::numbered(number)?;
        let keeper = match number {
            Some(number) if stream.is_some() => {
                Some(frameworks(py)?.call_method1("stream_called", (number,))?.unbind())
            }
            _ => None,
        };
        Ok(stream.map(|stream| Self::new(stream.number, keeper.filter(|keeper| !keeper.is_none(py)))))
    }

    fn new(number: usize, keeper: Option<Py<PyAny>>) -> Self {
        let number = if number == PER_THREAD { LEGACY } else { number };
        Self { number, keeper: keeper.map(|object| Arc::new(KeptStream(Some(object)))) }
    }

    /// As the engine of the GPU takes it: it keeps the object.
    pub(super) fn handle(&self) -> StreamHandle {
        if self.number == LEGACY {
            return StreamHandle::LEGACY;
        }
        let (raw, keeper) = (ptr::with_exposed_provenance_mut(self.number), self.keeper.clone());
        // SAFETY: a stream of the device's primary context, in which all of CUDA's runtime works: the program says so, by
        // DLPack's `stream` or by an object of its framework. The object keeps the stream. Who gives a bare number keeps the
        // stream itself until the tensors that are read on it are gone, as our documentation asks (`Tensor.__dlpack__`).
        let stream = unsafe { StreamHandle::from_raw(raw, keeper) };
        stream.unwrap_or(StreamHandle::LEGACY)
    }

    /// Whether it lives for as long as we have this: an object of it is here, or nobody can destroy it.
    pub(super) fn is_kept(&self) -> bool {
        self.keeper.is_some() || self.is_default()
    }

    /// Whether it is the default stream, which every GPU has.
    pub(super) fn is_default(&self) -> bool {
        self.number == LEGACY
    }

    /// Refuses it where its object says that it is a stream of another GPU than this.
    ///
    /// # Errors
    /// `ValueError`.
    pub(super) fn check_device(&self, py: Python<'_>, ordinal: usize) -> PyResult<()> {
        let Some(object) = self.keeper.as_ref().and_then(|keeper| keeper.0.as_ref()) else { return Ok(()) };
        for attribute in DEVICES {
            let device: Option<i64> = match object.bind(py).getattr_opt(attribute)? {
                Some(device) => device.extract().ok(),
                None => None,
            };
            // CuPy has -1 where a stream does not know.
            if let Some(device) = device.filter(|device| *device >= 0 && *device != ordinal as i64) {
                return Err(PyValueError::new_err(format!(
                    "it is a stream of cuda:{device}, and the tensors lie on cuda:{ordinal}: name the stream of cuda:{ordinal} \
                     that reads them"
                )));
            }
        }
        Ok(())
    }

    /// Adds it to `streams`, which has each once, and kept if it is.
    pub(super) fn join(self, streams: &mut Vec<Self>) {
        match streams.iter_mut().find(|known| known.number == self.number) {
            Some(known) => known.keeper = known.keeper.take().or(self.keeper),
            None => streams.push(self),
        }
    }
}

fn number_of(object: &Bound<'_, PyAny>) -> PyResult<usize> {
    if object.hasattr("__cuda_stream__")? {
        let (_version, handle): (i64, usize) = object.call_method0("__cuda_stream__")?.extract()?;
        return Ok(handle);
    }
    for attribute in ATTRIBUTES {
        if let Some(handle) = object.getattr_opt(attribute)? {
            // Numba's is a number in a ctypes object.
            let handle = handle.getattr_opt("value")?.unwrap_or(handle);
            return Ok(handle.extract::<Option<usize>>()?.unwrap_or(0));
        }
    }
    Err(PyTypeError::new_err(format!(
        "{} is no stream: give the number of one, or a stream of PyTorch, CuPy or Numba",
        object.get_type().fully_qualified_name()?
    )))
}

/// An object that keeps a stream. It goes where the interpreter is at hand.
#[derive(Debug)]
struct KeptStream(Option<Py<PyAny>>);

impl Drop for KeptStream {
    fn drop(&mut self) {
        if let Some(keeper) = self.0.take() {
            interpreter::later(move |_| drop(keeper));
        }
    }
}
