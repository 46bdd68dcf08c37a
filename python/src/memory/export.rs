//! Exporting our tensors in DLPack capsules.
#![allow(unsafe_code, reason = "makes DLPack's capsules, and the functions that free their contents")]

use super::{
    dlpack::{
        DEVICE_CPU, DEVICE_CUDA, DataType, Device, IS_COPIED, LEGACY, LegacyTensor, Names, Tensor, VERSION,
        VERSIONED, VersionedTensor,
    },
    readable::Readable,
};
use crate::gpu;
use pyo3::{ffi, prelude::*};
use std::{ffi::c_void, ptr};
use tensor_relay_device::VolatileBytes;

/// A tensor to export.
pub(crate) struct Export {
    /// The elements.
    pub(crate) bytes: Exported,
    pub(crate) dtype: DataType,
    /// The dimensions, in elements of `dtype`.
    pub(crate) shape: Vec<i64>,
    /// The strides, in elements of `dtype`.
    pub(crate) strides: Vec<i64>,
    /// Whether the bytes were copied for this export.
    pub(crate) is_copy: bool,
}

/// Bytes to export, which this keeps alive.
#[derive(Debug, Clone)]
pub(crate) enum Exported {
    Host(VolatileBytes),
    Gpu(Readable),
}

impl Exported {
    /// The number of bytes.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Host(bytes) => bytes.len(),
            Self::Gpu(bytes) => bytes.len(),
        }
    }

    /// The device in DLPack's terms.
    pub(crate) fn device(&self) -> (i32, i32) {
        match self {
            Self::Host(_) => (DEVICE_CPU, 0),
            // The driver's device numbers are `i32`, too.
            Self::Gpu(bytes) => (DEVICE_CUDA, gpu::engine(bytes.device()).info().ordinal as i32),
        }
    }

    /// The address for the consumer, who may write there (`Tensor.__dlpack__`): frameworks have no read-only tensors,
    /// or ignore the flag. On the host, this library refers to the memory only by [`VolatileBytes`].
    fn data(&self) -> *mut c_void {
        match self {
            _ if self.len() == 0 => ptr::null_mut(),
            Self::Host(bytes) => bytes.as_ptr().as_ptr().cast(),
            Self::Gpu(bytes) => ptr::without_provenance_mut(bytes.address()),
        }
    }
}

/// A DLPack capsule with `export`, versioned or legacy. The bytes are kept until the consumer calls the deleter, which
/// it may do on any thread, with or without the GIL.
pub(crate) fn capsule(py: Python<'_>, export: Export, is_versioned: bool) -> PyResult<Py<PyAny>> {
    match is_versioned {
        true => wrap::<VersionedTensor>(py, export),
        false => wrap::<LegacyTensor>(py, export),
    }
}

/// The context that a capsule owns.
struct CapsuleContext {
    bytes: Exported,
    shape: Vec<i64>,
    strides: Vec<i64>,
}

/// One of the two structures that a capsule may hold.
trait Managed: Sized {
    const NAMES: Names;
    fn new(tensor: Tensor, context: *mut c_void, flags: u64) -> Self;
    fn context(&self) -> *mut c_void;
}

impl Managed for VersionedTensor {
    const NAMES: Names = VERSIONED;

    fn new(tensor: Tensor, context: *mut c_void, flags: u64) -> Self {
        Self { version: VERSION, context, deleter: Some(delete::<Self>), flags, tensor }
    }

    fn context(&self) -> *mut c_void {
        self.context
    }
}

impl Managed for LegacyTensor {
    const NAMES: Names = LEGACY;

    fn new(tensor: Tensor, context: *mut c_void, _flags: u64) -> Self {
        Self { tensor, context, deleter: Some(delete::<Self>) }
    }

    fn context(&self) -> *mut c_void {
        self.context
    }
}

fn wrap<M: Managed>(py: Python<'_>, export: Export) -> PyResult<Py<PyAny>> {
    let Export { bytes, dtype, shape, strides, is_copy } = export;
    let ndim = shape.len() as i32; // 16 at most (`Shape`).
    let context = Box::leak(Box::new(CapsuleContext { bytes, shape, strides }));
    let (data, (kind, id)) = (context.bytes.data(), context.bytes.device());
    let (shape, strides) = (context.shape.as_mut_ptr(), context.strides.as_mut_ptr());
    let device = Device { kind, id };
    let tensor = Tensor { data, device, ndim, dtype, shape, strides, byte_offset: 0 };
    let managed = M::new(tensor, ptr::from_mut(context).cast(), if is_copy { IS_COPIED } else { 0 });
    let managed = Box::into_raw(Box::new(managed));
    // SAFETY: the pointer is not null, the name is static, and the GIL is held.
    let capsule = unsafe { ffi::PyCapsule_New(managed.cast(), M::NAMES.unused.as_ptr(), Some(destroy::<M>)) };
    // SAFETY: `PyCapsule_New` returns a new reference, or null with an exception set.
    let capsule = unsafe { Bound::from_owned_ptr_or_err(py, capsule) };
    if capsule.is_err() {
        // SAFETY: `managed` was boxed above, and no capsule refers to it.
        unsafe { delete(managed) };
    }
    capsule.map(Bound::unbind)
}

/// The deleter: frees the structure and the context that `wrap` made. The consumer calls it, or `destroy` if there is
/// none.
///
/// # Safety
/// `managed` is of `wrap::<M>`, and this is called once.
unsafe extern "C" fn delete<M: Managed>(managed: *mut M) {
    // SAFETY: `wrap` boxed `managed`, and the caller never uses it again.
    let managed = unsafe { Box::from_raw(managed) };
    // SAFETY: `wrap` boxed the context, too, and only this frees it.
    drop(unsafe { Box::from_raw(managed.context().cast::<CapsuleContext>()) });
}

/// The capsule's destructor: frees the contents of a capsule that no consumer has taken.
///
/// # Safety
/// Called by Python, with a capsule of `wrap::<M>` that is being destroyed, and the GIL held.
unsafe extern "C" fn destroy<M: Managed>(capsule: *mut ffi::PyObject) {
    let name = M::NAMES.unused.as_ptr();
    // SAFETY: the caller passes a capsule.
    if unsafe { ffi::PyCapsule_IsValid(capsule, name) } == 0 {
        return; // A consumer took the contents, and calls the deleter.
    }
    // SAFETY: the capsule is valid under this name, as just checked.
    let managed = unsafe { ffi::PyCapsule_GetPointer(capsule, name) }.cast::<M>();
    // SAFETY: `wrap` stored this pointer. No consumer took the contents, so the deleter was not called.
    unsafe { delete(managed) };
}
