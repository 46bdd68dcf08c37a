//! Entries of a `state_dict` other than tensors: small values, sent in a version's metadata.

use crate::errors::Kind;
use pyo3::{
    prelude::*,
    types::{PyBool, PyDict, PyFloat, PyInt, PyString},
};

/// The prefix of metadata keys for entries; the entry's name follows, and its value is JSON.
pub(crate) const PREFIX: &str = "tensor_relay.entry:";

/// Whether `value` is sent as an entry: text, a number, a truth value or None. Subclasses of these types do not count:
/// NumPy's `float64` is a subclass of `float`, and is sent as a tensor, like NumPy's `float32`.
pub(crate) fn is_entry(value: &Bound<'_, PyAny>) -> bool {
    value.is_none()
        || value.is_exact_instance_of::<PyString>()
        || value.is_exact_instance_of::<PyBool>()
        || value.is_exact_instance_of::<PyInt>()
        || value.is_exact_instance_of::<PyFloat>()
}

/// An entry as a key and a value of metadata.
pub(crate) fn to_metadata(name: &str, value: &Bound<'_, PyAny>) -> PyResult<(String, String)> {
    let json = value.py().import("json")?.call_method1("dumps", (value,))?;
    Ok((format!("{PREFIX}{name}"), json.extract()?))
}

/// Whether an entry of this name is the result of a PyTorch module's `get_extra_state`, which `load_state_dict`
/// requires.
pub(crate) fn is_extra_state(name: &str) -> bool {
    name.rsplit('.').next() == Some("_extra_state")
}

/// The entries in a version's metadata, by name.
///
/// # Errors
/// `DamagedError` for a value that is not JSON, which is the publisher's fault.
pub(crate) fn of_metadata<'py>(
    py: Python<'py>,
    metadata: &[(String, String)],
) -> PyResult<Bound<'py, PyDict>> {
    let (json, entries) = (py.import("json")?, PyDict::new(py));
    for (key, text) in metadata {
        let Some(name) = key.strip_prefix(PREFIX) else { continue };
        let value = json.call_method1("loads", (text,)).map_err(|error| {
            Kind::Damaged.raise(py, format!("the entry {name:?} of this version cannot be read: {error}"))
        })?;
        entries.set_item(name, value)?;
    }
    Ok(entries)
}
