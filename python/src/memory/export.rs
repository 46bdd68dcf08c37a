//! Exporting our tensors in DLPack capsules.
#![allow(unsafe_code, reason = "makes DLPack's capsules, and the functions that free what is in them")]

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

/// A tensor to hand over.
pub(crate) struct Export {
    /// Its elements.
    pub(crate) bytes: Exported,
    pub(crate) dtype: DataType,
    /// Its dimensions, in elements of `dtype`.
    pub(crate) shape: Vec<i64>,
    /// The strides, likewise.
    pub(crate) strides: Vec<i64>,
    /// Whether the bytes are a copy of their own.
    pub(crate) is_copy: bool,
}

/// Bytes to hand over, and what keeps them.
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

    /// Their device in DLPack's terms.
    pub(crate) fn device(&self) -> (i32, i32) {
        match self {
            Self::Host(_) => (DEVICE_CPU, 0),
            // Devices are counted by the driver, whose numbers are of this type.
            Self::Gpu(bytes) => (DEVICE_CUDA, gpu::engine(bytes.device()).info().ordinal as i32),
        }
    }

    /// Writable memory, as `Tensor` in Python says: frameworks have no word for tensors that are not, or pass it over. On the
    /// host nothing of ours refers to it but by [`VolatileBytes`].
    fn data(&self) -> *mut c_void {
        match self {
            _ if self.len() == 0 => ptr::null_mut(),
            Self::Host(bytes) => bytes.as_ptr().as_ptr().cast(),
            Self::Gpu(bytes) => ptr::without_provenance_mut(bytes.address()),
        }
    }
}

/// A capsule with `export` in it: of DLPack 1, or of the time before. The bytes are held until its consumer is done with
/// them; consumers may do that on any thread, with or without the GIL.
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
    fn deleter(&self) -> Option<unsafe extern "C" fn(*mut Self)>;
}

impl Managed for VersionedTensor {
    const NAMES: Names = VERSIONED;

    fn new(tensor: Tensor, context: *mut c_void, flags: u64) -> Self {
        Self { version: VERSION, context, deleter: Some(delete::<Self>), flags, tensor }
    }

    fn context(&self) -> *mut c_void {
        self.context
    }

    fn deleter(&self) -> Option<unsafe extern "C" fn(*mut Self)> {
        self.deleter
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

    fn deleter(&self) -> Option<unsafe extern "C" fn(*mut Self)> {
        self.deleter
    }
}

fn wrap<M: Managed>(py: Python<'_>, export: Export) -> PyResult<Py<PyAny>> {
    let Export { bytes, dtype, shape, strides, is_copy } = export;
    let ndim = shape.len() as i32; // 16 at most (`Shape`).
    let kept = Box::leak(Box::new(CapsuleContext { bytes, shape, strides }));
    let (data, (kind, id)) = (kept.bytes.data(), kept.bytes.device());
    let (shape, strides) = (kept.shape.as_mut_ptr(), kept.strides.as_mut_ptr());
    let device = Device { kind, id };
    let tensor = Tensor { data, device, ndim, dtype, shape, strides, byte_offset: 0 };
    let managed = M::new(tensor, ptr::from_mut(kept).cast(), if is_copy { IS_COPIED } else { 0 });
    let managed = Box::into_raw(Box::new(managed));
    // SAFETY: the pointer is not null, the name lives for ever, and the GIL is held.
    let capsule = unsafe { ffi::PyCapsule_New(managed.cast(), M::NAMES.fresh.as_ptr(), Some(destroy::<M>)) };
    // SAFETY: a new reference, or null with an exception set.
    let capsule = unsafe { Bound::from_owned_ptr_or_err(py, capsule) };
    if capsule.is_err() {
        // SAFETY: nobody else has it: there is no capsule.
        unsafe { delete(managed) };
    }
    capsule.map(Bound::unbind)
}

/// Frees what `wrap` made. Consumers call it, or `destroy` where there was none.
///
/// # Safety
/// `managed` is of `wrap::<M>`, and this is called once.
unsafe extern "C" fn delete<M: Managed>(managed: *mut M) {
    // SAFETY: `wrap` boxed it, and the caller gives it up.
    let managed = unsafe { Box::from_raw(managed) };
    // SAFETY: `wrap` boxed that too, for this to free.
    drop(unsafe { Box::from_raw(managed.context().cast::<CapsuleContext>()) });
}

/// Frees what is in a capsule that goes without a consumer.
///
/// # Safety
/// Python calls it with a capsule of `wrap::<M>` that is going, and the GIL held.
unsafe extern "C" fn destroy<M: Managed>(capsule: *mut ffi::PyObject) {
    let name = M::NAMES.fresh.as_ptr();
    // SAFETY: it is a capsule, says the caller.
    if unsafe { ffi::PyCapsule_IsValid(capsule, name) } == 0 {
        return; // A consumer took it, and calls the deleter.
    }
    // SAFETY: it is valid by this name.
    let managed = unsafe { ffi::PyCapsule_GetPointer(capsule, name) }.cast::<M>();
    // SAFETY: `wrap` put it there.
    if let Some(deleter) = unsafe { &*managed }.deleter() {
        // SAFETY: nobody took it, so nobody has freed it.
        unsafe { deleter(managed) };
    }
}
