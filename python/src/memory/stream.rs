//! GPU streams of other libraries that read our tensors.
#![allow(unsafe_code, reason = "converts numbers from other libraries to stream handles")]

use crate::{interpreter, tensors_in::frameworks};
use pyo3::{
    exceptions::{PyBufferError, PyValueError},
    prelude::*,
    types::{PyAnyMethods, PyInt},
};
use std::{ptr, sync::Arc};
use tensor_relay_device::cuda::StreamHandle;

/// A stream that reads a tensor, and the Python object that keeps the stream alive, if one is known.
#[derive(Debug)]
pub(crate) struct Stream {
    /// Never `PER_THREAD`, which means another stream on each thread. It is replaced by `LEGACY`, whose work begins
    /// after that of the per-thread streams.
    number: usize,
    keeper: Option<Arc<KeptStream>>,
}

/// `CU_STREAM_LEGACY` and `CU_STREAM_PER_THREAD`, in DLPack and in CUDA.
const LEGACY: usize = 1;
const PER_THREAD: usize = 2;

impl Stream {
    /// The stream with this number in DLPack; without a number, the legacy default stream. `None` for -1, with which
    /// the consumer asks for no synchronisation.
    ///
    /// # Errors
    /// `BufferError` for 0, which DLPack forbids because it may mean two streams, and for other negative numbers.
    pub(crate) fn numbered(number: Option<i64>) -> PyResult<Option<Self>> {
        let number = match number {
            None => LEGACY,
            Some(-1) => return Ok(None),
            Some(0) => {
                return Err(PyBufferError::new_err(
                    "stream 0 may mean two streams, so DLPack forbids it: 1 is the legacy default stream, 2 the per-thread \
                     one",
                ));
            }
            Some(number) => usize::try_from(number)
                .map_err(|_| PyBufferError::new_err(format!("{number} is no stream")))?,
        };
        Ok(Some(Self::new(number, None)))
    }

    /// The stream of a Python object: a number in DLPack, a stream of PyTorch, CuPy or Numba, or an object with
    /// `__cuda_stream__`. `None` is the legacy default stream.
    ///
    /// # Errors
    /// `TypeError` for other objects; those of [`numbered`](Self::numbered).
    pub(crate) fn of(object: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Self>> {
        let Some(object) = object else { return Self::numbered(None) };
        if object.is_instance_of::<PyInt>() {
            return Self::numbered(Some(object.extract()?));
        }
        let number = frameworks(object.py())?.call_method1("stream_number", (object,))?;
        let number: usize = match number.extract()? {
            0 => LEGACY, // The handle of frameworks' default stream.
            number => number,
        };
        Ok(Some(Self::new(number, Some(object.clone().unbind()))))
    }

    /// The stream that a DLPack consumer passes, with the object that keeps it, if its framework can find that.
    ///
    /// # Errors
    /// Those of [`numbered`](Self::numbered).
    pub(crate) fn of_consumer(py: Python<'_>, number: Option<i64>) -> PyResult<Option<Self>> {
        let stream = Self::numbered(number)?;
        let keeper = match number {
            Some(number) if stream.is_some() => {
                Some(frameworks(py)?.call_method1("stream_object", (number,))?.unbind())
            }
            _ => None,
        };
        Ok(stream.map(|stream| Self::new(stream.number, keeper.filter(|keeper| !keeper.is_none(py)))))
    }

    fn new(number: usize, keeper: Option<Py<PyAny>>) -> Self {
        let number = if number == PER_THREAD { LEGACY } else { number };
        Self { number, keeper: keeper.map(|object| Arc::new(KeptStream(Some(object)))) }
    }

    /// The handle for the GPU's engine, which keeps the object, too.
    pub(super) fn handle(&self) -> StreamHandle {
        if self.number == LEGACY {
            return StreamHandle::LEGACY;
        }
        let (raw, keeper) = (ptr::with_exposed_provenance_mut(self.number), self.keeper.clone());
        // SAFETY: the program vouches, by DLPack's `stream` or by an object of its framework, that the number is a
        // stream of the device's primary context, which all libraries on CUDA's runtime use. The object keeps the
        // stream alive. A program that passes a bare number keeps the stream until the tensors that it reads are
        // dropped, as the documentation of `Tensor.__dlpack__` requires.
        let stream = unsafe { StreamHandle::from_raw(raw, keeper) };
        stream.unwrap_or(StreamHandle::LEGACY)
    }

    /// Whether the stream lives as long as this value: because its object is kept, or because it cannot be destroyed.
    pub(super) fn is_kept(&self) -> bool {
        self.keeper.is_some() || self.is_default()
    }

    /// Whether this is the legacy default stream, which every GPU has.
    pub(super) fn is_default(&self) -> bool {
        self.number == LEGACY
    }

    /// Checks that the stream is not one of another GPU, if its object names its GPU.
    ///
    /// # Errors
    /// `ValueError` for a stream of another GPU.
    pub(super) fn check_device(&self, py: Python<'_>, ordinal: usize) -> PyResult<()> {
        let Some(object) = self.keeper.as_ref().and_then(|keeper| keeper.0.as_ref()) else { return Ok(()) };
        let device: Option<usize> = frameworks(py)?.call_method1("stream_device", (object,))?.extract()?;
        match device.filter(|device| *device != ordinal) {
            None => Ok(()),
            Some(device) => Err(PyValueError::new_err(format!(
                "it is a stream of cuda:{device}, and the tensors lie on cuda:{ordinal}: name the stream of cuda:{ordinal} \
                 that reads them"
            ))),
        }
    }

    /// Adds the stream to `streams`. If it is there already, only its keeper is added.
    pub(super) fn add_to(self, streams: &mut Vec<Self>) {
        match streams.iter_mut().find(|stream| stream.number == self.number) {
            Some(stream) => stream.keeper = stream.keeper.take().or(self.keeper),
            None => streams.push(self),
        }
    }
}

/// A Python object that keeps a stream alive. It is dropped on the interpreter thread.
#[derive(Debug)]
struct KeptStream(Option<Py<PyAny>>);

impl Drop for KeptStream {
    fn drop(&mut self) {
        if let Some(keeper) = self.0.take() {
            interpreter::enqueue(move |_| drop(keeper));
        }
    }
}
