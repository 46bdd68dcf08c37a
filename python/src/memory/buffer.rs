//! Exporting our tensors by Python's buffer protocol.
#![allow(unsafe_code, reason = "fills the structure that Python's buffer protocol is made of")]

use pyo3::{exceptions::PyBufferError, ffi, prelude::*};
use std::{ffi::CStr, ptr};
use tensor_relay_client::Dtype;
use tensor_relay_device::VolatileBytes;

/// The source of a view. All of it lives as long as the viewed object.
pub(crate) struct ViewSource<'a> {
    pub(crate) bytes: &'a VolatileBytes,
    pub(crate) format: &'static CStr,
    pub(crate) item_bytes: usize,
    pub(crate) shape: &'a [ffi::Py_ssize_t],
    /// In bytes.
    pub(crate) strides: &'a [ffi::Py_ssize_t],
}

/// The letter of a dtype in Python's `struct`, and in NumPy where that has none.
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

/// Lets `view` show `viewed`, which `owner` keeps.
///
/// # Errors
/// `BufferError` where there is no structure to fill.
///
/// # Safety
/// `view` is what Python gave to `__getbuffer__` of `owner`, and all of `viewed` lives, and stays in place, as long as `owner` does.
pub(crate) unsafe fn fill_view(
    view: *mut ffi::Py_buffer,
    flags: i32,
    owner: Bound<'_, PyAny>,
    viewed: &ViewSource<'_>,
) -> PyResult<()> {
    let Some(mut view) = ptr::NonNull::new(view) else {
        return Err(PyBufferError::new_err("there is no view to fill"));
    };
    // SAFETY: Python gave it, to be filled, says the caller.
    let view = unsafe { view.as_mut() };
    let asks = |flag| flags & flag == flag;
    view.buf = viewed.bytes.as_ptr().as_ptr().cast();
    view.len = viewed.bytes.len() as ffi::Py_ssize_t;
    view.readonly = 0;
    view.itemsize = viewed.item_bytes as ffi::Py_ssize_t;
    view.ndim = viewed.shape.len() as i32;
    view.format = if asks(ffi::PyBUF_FORMAT) { viewed.format.as_ptr().cast_mut() } else { ptr::null_mut() };
    view.shape = if asks(ffi::PyBUF_ND) { viewed.shape.as_ptr().cast_mut() } else { ptr::null_mut() };
    view.strides =
        if asks(ffi::PyBUF_STRIDES) { viewed.strides.as_ptr().cast_mut() } else { ptr::null_mut() };
    view.suboffsets = ptr::null_mut();
    view.internal = ptr::null_mut();
    view.obj = owner.into_ptr();
    Ok(())
}
