//! `hold=`: whether published tensors are copied, or lent until their readers are done.

use crate::errors::Kind;
use pyo3::prelude::*;

/// When a publisher may write to its tensors again.
#[derive(Debug, Clone, Copy)]
pub(crate) enum HoldUntil {
    /// At once: the tensors are copied.
    Stage,
    /// Once the server no longer reads the tensors.
    Borrow,
}

impl HoldUntil {
    pub(crate) fn parse(py: Python<'_>, name: &str) -> PyResult<Self> {
        match name {
            "stage" => Ok(Self::Stage),
            "borrow" => Ok(Self::Borrow),
            other => {
                let message = format!("hold is {other:?}, but must be \"stage\" or \"borrow\"");
                Err(Kind::Request.raise(py, message))
            }
        }
    }
}
