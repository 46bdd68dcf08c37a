//! `hold=`: whether published tensors are copied, or lent until their readers are done.

use crate::range::one_of;
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
        one_of(py, "hold", name, &[("stage", Self::Stage), ("borrow", Self::Borrow)])
    }
}
