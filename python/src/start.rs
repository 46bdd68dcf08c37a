//! `start=`: where a subscription begins.

use crate::errors::Kind;
use pyo3::prelude::*;
use tensor_relay_client::{Epoch, Start, Version};

/// The epoch that 16 hexadecimal digits name.
///
/// # Errors
/// `RequestError` for anything else.
pub(crate) fn epoch_called(py: Python<'_>, digits: &str) -> PyResult<Epoch> {
    let is_one = digits.len() == 16 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    let number = u64::from_str_radix(digits, 16).ok().filter(|_| is_one);
    let message =
        || format!("an epoch is 16 hexadecimal digits, as `Snapshot.epoch` has them, and not {digits:?}");
    number.map(Epoch).ok_or_else(|| Kind::Request.raise(py, message()))
}

/// The value given by the user.
///
/// # Errors
/// `RequestError` for what is no beginning.
pub(crate) fn start_called(start: &Bound<'_, PyAny>) -> PyResult<Start> {
    if let Ok((epoch, version)) = start.extract::<(String, u64)>() {
        return Ok(Start::At(Some(epoch_called(start.py(), &epoch)?), Version(version)));
    }
    if let Ok(version) = start.extract::<u64>() {
        return Ok(Start::At(None, Version(version)));
    }
    match start.extract::<String>().as_deref() {
        Ok("newest") => Ok(Start::Newest),
        Ok("next") => Ok(Start::Next),
        Ok("oldest") => Ok(Start::Oldest),
        _ => {
            let message = format!(
                "start is \"newest\", \"next\", \"oldest\", a version's number or its epoch and number, and not {start:?}"
            );
            Err(Kind::Request.raise(start.py(), message))
        }
    }
}
