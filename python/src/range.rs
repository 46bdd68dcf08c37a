//! Options whose values must lie in a range, or be one of several words.

use crate::{errors::Kind, wait::finite_seconds};
use pyo3::prelude::*;
use std::{fmt::Display, ops::RangeInclusive, time::Duration};

/// The value, if it lies in `range`.
///
/// # Errors
/// `RequestError` names the option and the range.
pub(crate) fn within<T: PartialOrd + Display>(
    py: Python<'_>,
    name: &str,
    value: T,
    range: RangeInclusive<T>,
) -> PyResult<T> {
    match range.contains(&value) {
        true => Ok(value),
        false => {
            let (least, most) = range.into_inner();
            Err(Kind::Request.raise(py, format!("{name} is {value}, but must be from {least} to {most}")))
        }
    }
}

/// The value, if it is `least` or more.
///
/// # Errors
/// As [`within`].
pub(crate) fn at_least<T: PartialOrd + Display>(
    py: Python<'_>,
    name: &str,
    value: T,
    least: T,
) -> PyResult<T> {
    match value >= least {
        true => Ok(value),
        false => Err(Kind::Request.raise(py, format!("{name} is {value}, but must be {least} or more"))),
    }
}

/// The meaning of `word`, if it is one of `choices`.
///
/// # Errors
/// `RequestError` names the option and the choices.
pub(crate) fn one_of<T: Copy>(py: Python<'_>, name: &str, word: &str, choices: &[(&str, T)]) -> PyResult<T> {
    match choices.iter().find(|(choice, _)| *choice == word) {
        Some((_, meaning)) => Ok(*meaning),
        None => {
            let choices: Vec<_> = choices.iter().map(|(choice, _)| format!("{choice:?}")).collect();
            let choices = choices.join(" or ");
            Err(Kind::Request.raise(py, format!("{name} is {word:?}, but must be {choices}")))
        }
    }
}

/// A duration in seconds, more than 0.
///
/// # Errors
/// `RequestError` for 0; `ValueError` for a negative number or NaN.
pub(crate) fn positive_seconds(py: Python<'_>, name: &str, value: f64) -> PyResult<Duration> {
    match finite_seconds(name, value)? {
        Duration::ZERO => {
            Err(Kind::Request.raise(py, format!("{name} is {value} s, but must be more than 0")))
        }
        duration => Ok(duration),
    }
}
