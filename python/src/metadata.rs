//! A version's metadata: text on the wire, Python types at its ends.
//!
//! Text travels as it is, and any other value as JSON, so the command line and Rust read `1` for 1. One more line,
//! [`JSON_KEYS`], names the values that are JSON, so that Python gives them back as they were.

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

/// The prefix of this package's own keys, forbidden to users.
const RESERVED: &str = "tensor_relay.";

/// Encodes a user's metadata.
///
/// # Errors
/// `TypeError` names the first value that cannot travel; `RequestError` for a reserved key.
pub(crate) fn of_user(given: &Bound<'_, PyAny>) -> PyResult<Metadata> {
    let py = given.py();
    let given = given.cast::<PyMapping>().map_err(|_| {
        PyTypeError::new_err(format!(
            "metadata is a mapping of names to values, and not a {}",
            type_name(given)
        ))
    })?;
    let (mut metadata, mut json_keys) = (vec![], vec![]);
    for item in given.items()?.iter() {
        let (key, value): (Bound<'_, PyAny>, Bound<'_, PyAny>) = item.extract()?;
        let key: String = key.extract().map_err(|_| {
            PyTypeError::new_err(format!("the keys of metadata are text, and {key:?} is not"))
        })?;
        if key.starts_with(RESERVED) || is_reserved(&key) {
            let message = format!(
                "metadata {key:?} begins as tensor-relay's own does ({RESERVED} or {RESERVED_PREFIX}): call it something else"
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

/// The part of a version's metadata that users see: all but the entries of its tensors.
///
/// # Errors
/// `DamagedError` for what is said to be JSON and is none: the publisher is to blame.
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
            "metadata {key:?} ({}) cannot travel: {}. It takes text, numbers, truth values, None, and lists and \
             dictionaries of these",
            type_name(value),
            error.value(value.py())
        ))
    })?;
    check_keys(key, value)?;
    Ok(json)
}

/// Refuses dictionaries with keys that are not text: JSON would make text of them, and one of two that look the same. The
/// value has no end in itself, or there would be no JSON of it.
fn check_keys(key: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
    let mut rest = vec![value.clone()];
    while let Some(value) = rest.pop() {
        if let Ok(dictionary) = value.cast::<PyDict>() {
            for (nested, value) in dictionary.iter() {
                if !nested.is_instance_of::<PyString>() {
                    return Err(PyTypeError::new_err(format!(
                        "metadata {key:?} has a dictionary with the key {nested:?}, which would come back as text: make it text"
                    )));
                }
                rest.push(value);
            }
        } else if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
            rest.extend(value.try_iter()?.collect::<PyResult<Vec<_>>>()?);
        }
    }
    Ok(())
}

/// The value as JSON; scalars of NumPy and the others as the numbers that they are.
fn dumped(value: &Bound<'_, PyAny>) -> PyResult<String> {
    let py = value.py();
    let options = PyDict::new(py);
    options.set_item("ensure_ascii", false)?;
    options.set_item("default", frameworks(py)?.getattr("number")?)?;
    py.import("json")?.call_method("dumps", (value,), Some(&options))?.extract()
}

fn loaded<'py>(py: Python<'py>, key: &str, text: &str) -> PyResult<Bound<'py, PyAny>> {
    let value = py.import("json")?.call_method1("loads", (text,));
    value.map_err(|error| damaged(py, key, &error))
}

fn damaged(py: Python<'_>, key: &str, error: &PyErr) -> PyErr {
    Kind::Damaged.raise(py, format!("the metadata {key:?} of this version cannot be read: {error}"))
}
