//! The option `split`: which tensors are cut into pieces.

use crate::errors::Kind;
use pyo3::{prelude::*, types::PyMapping};
use tensor_relay_server::{Glob, Split, Splits};

/// The rules of a mapping from globs to `(dimension, parts)`, or of a text, e.g. "tensor-parallel=4".
///
/// # Errors
/// `RequestError` for anything else.
pub(crate) fn of(py: Python<'_>, split: Option<&Bound<'_, PyAny>>) -> PyResult<Splits> {
    let Some(split) = split else { return Ok(Splits::default()) };
    if let Ok(text) = split.extract::<&str>() {
        return text.parse().map_err(Kind::Request.because(py));
    }
    let rules = split.cast::<PyMapping>().ok().map(|rules| rules.items()).transpose()?;
    let rules = rules.ok_or_else(|| Kind::Request.raise(py, FORM))?;
    rules
        .iter()
        .map(|rule| rule_of(py, &rule))
        .collect::<PyResult<Vec<_>>>()
        .map(Splits::new)
}

const FORM: &str = "split is a dictionary from globs to (dimension, parts), e.g. {\"**.o_proj.weight\": (1, 8)}, with at \
                    least one part, or \"tensor-parallel\"";

fn rule_of(py: Python<'_>, rule: &Bound<'_, PyAny>) -> PyResult<Split> {
    let form = |_| Kind::Request.raise(py, FORM);
    let (tensors, (dimension, parts)): (String, (u32, u32)) = rule.extract().map_err(form)?;
    let tensors = Glob::new(&tensors).map_err(Kind::Request.because(py))?;
    match parts {
        0 => Err(Kind::Request.raise(py, FORM)),
        _ => Ok(Split { tensors, dimension, parts }),
    }
}
