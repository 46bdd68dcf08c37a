//! Exporting our tensors by Python's buffer protocol.
#![allow(unsafe_code, reason = "fills the C structure of Python's buffer protocol")]

use pyo3::{exceptions::PyBufferError, ffi, prelude::*};
use std::{ffi::CStr, ptr};
use tensor_relay_client::Dtype;
use tensor_relay_device::VolatileBytes;

/// The contents of a view, which live as long as the viewed object.
pub(crate) struct ViewSource<'a> {
    pub(crate) bytes: &'a VolatileBytes,
    pub(crate) format: &'static CStr,
    pub(crate) item_bytes: usize,
    pub(crate) shape: &'a [ffi::Py_ssize_t],
    /// In bytes.
    pub(crate) strides: &'a [ffi::Py_ssize_t],
}

/// The format of a dtype in Python's `struct`, or in NumPy if `struct` has none.
pub(crate) fn format_of(dtype: Dtype) -> Option<&'static CStr> {
    Some(match dtype {
        Dtype::Bool => c"?",
        Dtype::I8 => c"b",
        Dtype::U8 => c"B",
        Dtype::I16 => c"h",
        Dtype::U16 => c"H",
        Dtype::I32 => c"i",
        Dtype::U32 => c"I",
        Dtype::I64 => c"q",
        Dtype::U64 => c"Q",
        Dtype::F16 => c"e",
        Dtype::F32 => c"f",
        Dtype::F64 => c"d",
        Dtype::C64 => c"Zf",
        Dtype::C128 => c"Zd",
        _ => return None,
    })
}

/// Fills `view` with `source`, which `owner` keeps alive.
///
/// # Errors
/// `BufferError` if `view` is null.
///
/// # Safety
/// Python passed `view` to `__getbuffer__` of `owner`, and all parts of `source` stay valid and in place as long as
/// `owner` lives.
pub(crate) unsafe fn fill_view(
    view: *mut ffi::Py_buffer,
    flags: i32,
    owner: Bound<'_, PyAny>,
    source: &ViewSource<'_>,
) -> PyResult<()> {
    let Some(mut view) = ptr::NonNull::new(view) else {
        return Err(PyBufferError::new_err("there is no view to fill"));
    };
    // SAFETY: the caller vouches that Python passed it to be filled.
    let view = unsafe { view.as_mut() };
    let is_requested = |flag| flags & flag == flag;
    view.buf = source.bytes.as_ptr().as_ptr().cast();
    view.len = source.bytes.len() as ffi::Py_ssize_t;
    view.readonly = 0;
    view.itemsize = source.item_bytes as ffi::Py_ssize_t;
    view.ndim = source.shape.len() as i32;
    view.format =
        if is_requested(ffi::PyBUF_FORMAT) { source.format.as_ptr().cast_mut() } else { ptr::null_mut() };
    view.shape = if is_requested(ffi::PyBUF_ND) { source.shape.as_ptr().cast_mut() } else { ptr::null_mut() };
    view.strides =
        if is_requested(ffi::PyBUF_STRIDES) { source.strides.as_ptr().cast_mut() } else { ptr::null_mut() };
    view.suboffsets = ptr::null_mut();
    view.internal = ptr::null_mut();
    view.obj = owner.into_ptr();
    Ok(())
}
