//! Entries of a `state_dict` other than tensors: small values, sent in a version's metadata.

use crate::errors::Kind;
use pyo3::{
    prelude::*,
    types::{PyBool, PyDict, PyFloat, PyInt, PyString},
};

/// The prefix of metadata keys for entries; the entry's name follows, and its value is JSON.
pub(crate) const PREFIX: &str = "tensor_relay.entry:";

/// Whether `value` travels so: text, a number, a truth value or None. Of Python's own types and not of their subclasses:
/// NumPy's `float64` is one of `float`, and a tensor here, as its `float32` is.
pub(crate) fn is_entry(value: &Bound<'_, PyAny>) -> bool {
    value.is_none()
        || value.is_exact_instance_of::<PyString>()
        || value.is_exact_instance_of::<PyBool>()
        || value.is_exact_instance_of::<PyInt>()
        || value.is_exact_instance_of::<PyFloat>()
}

/// An entry as a line of metadata.
pub(crate) fn to_metadata(name: &str, value: &Bound<'_, PyAny>) -> PyResult<(String, String)> {
    let json = value.py().import("json")?.call_method1("dumps", (value,))?;
    Ok((format!("{PREFIX}{name}"), json.extract()?))
}

/// Whether an entry of this name is what a module of PyTorch gave by `get_extra_state`: `load_state_dict` wants it back.
pub(crate) fn is_extra_state(name: &str) -> bool {
    name.rsplit('.').next() == Some("_extra_state")
}

/// The entries in a version's metadata, by name.
///
/// # Errors
/// `DamagedError` for what is no JSON: the publisher is to blame.
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
