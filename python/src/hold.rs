//! `hold=`: who owns the memory of what is published.

use crate::errors::Kind;
use pyo3::prelude::*;

/// When a producer may write its tensors again.
#[derive(Debug, Clone, Copy)]
pub(crate) enum HoldUntil {
    /// At once: they are copied.
    Stage,
    /// Completes when they are no longer read.
    Borrow,
}

impl HoldUntil {
    pub(crate) fn called(py: Python<'_>, name: &str) -> PyResult<Self> {
        match name {
            "stage" => Ok(Self::Stage),
            "borrow" => Ok(Self::Borrow),
            other => {
                let message = format!("hold is \"stage\" or \"borrow\", and not {other:?}");
                Err(Kind::Request.raise(py, message))
            }
        }
    }
}
