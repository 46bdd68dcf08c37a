//! `start=`, and `version=` with `epoch=`: where a subscription begins, and which version a call receives.

use crate::errors::Kind;
use pyo3::prelude::*;
use tensor_relay_client::{Epoch, Start, Version};

/// An epoch written as 16 hexadecimal digits.
///
/// # Errors
/// `RequestError` for anything else.
fn parse_epoch(py: Python<'_>, digits: &str) -> PyResult<Epoch> {
    let is_epoch = digits.len() == 16 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    let number = u64::from_str_radix(digits, 16).ok().filter(|_| is_epoch);
    let message = || format!("an epoch is 16 hexadecimal digits, as in `Snapshot.epoch`, and not {digits:?}");
    number.map(Epoch).ok_or_else(|| Kind::Request.raise(py, message()))
}

/// A version's number, with its epoch if it is given.
///
/// # Errors
/// `RequestError` for an invalid epoch, or one without a version.
pub(crate) fn parse_version(
    py: Python<'_>,
    version: Option<u64>,
    epoch: Option<&str>,
) -> PyResult<Option<(Option<Epoch>, Version)>> {
    let epoch = epoch.map(|epoch| parse_epoch(py, epoch)).transpose()?;
    match (version, epoch) {
        (None, Some(_)) => Err(Kind::Request
            .raise(py, "`epoch` says in which epoch `version` is: give the version's number too")),
        (version, epoch) => Ok(version.map(|version| (epoch, Version(version)))),
    }
}

/// Parses a user's `start=`.
///
/// # Errors
/// `RequestError` for any other value.
pub(crate) fn parse_start(start: &Bound<'_, PyAny>) -> PyResult<Start> {
    if let Ok((epoch, version)) = start.extract::<(String, u64)>() {
        return Ok(Start::At(Some(parse_epoch(start.py(), &epoch)?), Version(version)));
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
                "start is {start:?}, but must be \"newest\", \"next\", \"oldest\", a version's number, or its epoch and \
                 number"
            );
            Err(Kind::Request.raise(start.py(), message))
        }
    }
}
