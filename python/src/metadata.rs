//! A version's metadata, of which `_metadata.py` says how Python values are text on the wire.

use pyo3::{
    prelude::*,
    types::{IntoPyDict, PyBool, PyDict, PyFloat, PyInt, PyString},
};
use tensor_relay_server::Metadata;

fn module(py: Python<'_>) -> PyResult<Bound<'_, PyModule>> {
    py.import("tensor_relay._metadata")
}

/// Encodes a user's metadata.
///
/// # Errors
/// `TypeError` names the first value that cannot be sent; `RequestError` for a reserved key.
pub(crate) fn of_user(metadata: &Bound<'_, PyAny>) -> PyResult<Metadata> {
    module(metadata.py())?.call_method1("encoded", (metadata,))?.extract()
}

/// The part of a version's metadata that users see.
///
/// # Errors
/// `DamagedError` for a value that should be JSON and is not, which is the publisher's fault.
pub(crate) fn to_user<'py>(py: Python<'py>, metadata: &[(String, String)]) -> PyResult<Bound<'py, PyDict>> {
    Ok(module(py)?.call_method1("decoded", (metadata,))?.cast_into()?)
}

/// Text by text, as in a manifest's metadata.
pub(crate) fn of_pairs<'py>(py: Python<'py>, pairs: &[(String, String)]) -> PyResult<Bound<'py, PyDict>> {
    pairs.iter().map(|(key, value)| (key, value)).into_py_dict(py)
}

/// Whether a value of a `state_dict` is sent as an entry of the metadata: text, a number, a truth value or None.
/// Subclasses of these types do not count: NumPy's `float64` is a subclass of `float`, and is sent as a tensor, like
/// NumPy's `float32`.
pub(crate) fn is_entry(value: &Bound<'_, PyAny>) -> bool {
    value.is_none()
        || value.is_exact_instance_of::<PyString>()
        || value.is_exact_instance_of::<PyBool>()
        || value.is_exact_instance_of::<PyInt>()
        || value.is_exact_instance_of::<PyFloat>()
}

/// An entry as a key and a value of metadata.
pub(crate) fn of_entry(name: &str, value: &Bound<'_, PyAny>) -> PyResult<(String, String)> {
    module(value.py())?.call_method1("encoded_entry", (name, value))?.extract()
}

/// The entries in a version's metadata, by name.
///
/// # Errors
/// `DamagedError` for a value that is not JSON, which is the publisher's fault.
pub(crate) fn entries<'py>(py: Python<'py>, metadata: &[(String, String)]) -> PyResult<Bound<'py, PyDict>> {
    Ok(module(py)?.call_method1("entries", (metadata,))?.cast_into()?)
}

/// Whether an entry of this name is the result of a PyTorch module's `get_extra_state`, which `load_state_dict`
/// requires.
pub(crate) fn is_extra_state(name: &str) -> bool {
    name.rsplit('.').next() == Some("_extra_state")
}
