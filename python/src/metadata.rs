//! A version's metadata: text on the wire, Python values in programs.
//!
//! Text is sent as it is, and any other value as JSON: the number 1 is the text `1` for the command line and for Rust.
//! One more key, [`JSON_KEYS`], lists the keys whose values are JSON, so that Python receives values of the types
//! published.

use crate::{
    entries,
    errors::Kind,
    tensors_in::{frameworks, type_name},
};
use pyo3::{
    exceptions::PyTypeError,
    prelude::*,
    types::{PyDict, PyList, PyMapping, PyString, PyTuple},
};
use tensor_relay_server::{Metadata, RESERVED_PREFIX, is_reserved};

/// The key whose value is a JSON list of the keys whose values are JSON.
const JSON_KEYS: &str = "tensor_relay.json";

/// The prefix of this package's own keys, which users must not use.
const RESERVED: &str = "tensor_relay.";

/// Encodes a user's metadata.
///
/// # Errors
/// `TypeError` names the first value that cannot be sent; `RequestError` for a reserved key.
pub(crate) fn of_user(mapping: &Bound<'_, PyAny>) -> PyResult<Metadata> {
    let py = mapping.py();
    let mapping = mapping.cast::<PyMapping>().map_err(|_| {
        PyTypeError::new_err(format!(
            "metadata is a mapping of names to values, and not a {}",
            type_name(mapping)
        ))
    })?;
    let (mut metadata, mut json_keys) = (vec![], vec![]);
    for item in mapping.items()?.iter() {
        let (key, value): (Bound<'_, PyAny>, Bound<'_, PyAny>) = item.extract()?;
        let key: String = key.extract().map_err(|_| {
            PyTypeError::new_err(format!("the keys of metadata are text, and {key:?} is not"))
        })?;
        if key.starts_with(RESERVED) || is_reserved(&key) {
            let message = format!(
                "metadata {key:?} has a prefix reserved for tensor-relay ({RESERVED} or {RESERVED_PREFIX}): call it \
                 something else"
            );
            return Err(Kind::Request.raise(py, message));
        }
        let text = match value.is_instance_of::<PyString>() {
            true => value.extract()?,
            false => {
                json_keys.push(key.clone());
                to_json(&key, &value)?
            }
        };
        metadata.push((key, text));
    }
    if !json_keys.is_empty() {
        metadata.push((JSON_KEYS.to_owned(), dumped(json_keys.into_pyobject(py)?.as_any())?));
    }
    Ok(metadata)
}

/// The part of a version's metadata that users see: all but the state dict's entries ([`entries`]) and [`JSON_KEYS`].
///
/// # Errors
/// `DamagedError` for a value that should be JSON and is not, which is the publisher's fault.
pub(crate) fn to_user<'py>(py: Python<'py>, metadata: &[(String, String)]) -> PyResult<Bound<'py, PyDict>> {
    let json_keys = metadata.iter().find(|(key, _)| key == JSON_KEYS);
    let json_keys: Vec<String> = match json_keys {
        Some((key, text)) => loaded(py, key, text)?.extract().map_err(|error| damaged(py, key, &error))?,
        None => vec![],
    };
    let by_key = PyDict::new(py);
    for (key, text) in metadata
        .iter()
        .filter(|(key, _)| key != JSON_KEYS && !key.starts_with(entries::PREFIX))
    {
        match json_keys.contains(key) {
            true => by_key.set_item(key, loaded(py, key, text)?)?,
            false => by_key.set_item(key, text)?,
        }
    }
    Ok(by_key)
}

fn to_json(key: &str, value: &Bound<'_, PyAny>) -> PyResult<String> {
    let json = dumped(value).map_err(|error| {
        PyTypeError::new_err(format!(
            "metadata {key:?} ({}) cannot be sent: {}. Supported are text, numbers, truth values, None, and lists and \
             dictionaries of these",
            type_name(value),
            error.value(value.py())
        ))
    })?;
    check_keys(key, value)?;
    Ok(json)
}

/// Refuses dictionaries with keys that are not text: JSON would turn them into text, and merge two keys with the same
/// text. The loop ends: a value that contains itself was refused by the JSON encoder before.
fn check_keys(key: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
    let mut unchecked = vec![value.clone()];
    while let Some(value) = unchecked.pop() {
        if let Ok(dictionary) = value.cast::<PyDict>() {
            for (nested, value) in dictionary.iter() {
                if !nested.is_instance_of::<PyString>() {
                    return Err(PyTypeError::new_err(format!(
                        "metadata {key:?} has a dictionary with the key {nested:?}, which would be received as text: make \
                         it text"
                    )));
                }
                unchecked.push(value);
            }
        } else if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
            unchecked.extend(value.try_iter()?.collect::<PyResult<Vec<_>>>()?);
        }
    }
    Ok(())
}

/// The value as JSON; scalars of NumPy and other frameworks as numbers.
fn dumped(value: &Bound<'_, PyAny>) -> PyResult<String> {
    let py = value.py();
    let options = PyDict::new(py);
    options.set_item("ensure_ascii", false)?;
    options.set_item("default", frameworks(py)?.getattr("to_python_number")?)?;
    py.import("json")?.call_method("dumps", (value,), Some(&options))?.extract()
}

fn loaded<'py>(py: Python<'py>, key: &str, text: &str) -> PyResult<Bound<'py, PyAny>> {
    let value = py.import("json")?.call_method1("loads", (text,));
    value.map_err(|error| damaged(py, key, &error))
}

fn damaged(py: Python<'_>, key: &str, error: &PyErr) -> PyErr {
    Kind::Damaged.raise(py, format!("the metadata {key:?} of this version cannot be read: {error}"))
}
