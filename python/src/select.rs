//! `select=`: patterns for the names of the tensors that a subscription receives, with the boxes that it receives of them.

use crate::{boxes::Boxes, errors::Kind};
use pyo3::{exceptions::PyTypeError, prelude::*};
use std::sync::atomic::{AtomicBool, Ordering};
use tensor_relay_client::{Glob, Manifest, VersionId};

/// What a subscription receives: the tensors that match one of its patterns, or without patterns all; whole, or boxes.
pub(crate) struct Select {
    patterns: Vec<Glob>,
    boxes: Boxes,
    /// Whether patterns without a match were looked for, and logged.
    has_warned: AtomicBool,
}

/// The number of tensor names that a message gives as examples.
const EXAMPLES_MAX: usize = 3;

impl Select {
    /// Parses a user's `select=`: one pattern, or several.
    ///
    /// # Errors
    /// `RequestError` for an invalid pattern or an empty list; `TypeError` for anything but text.
    pub(crate) fn parse(py: Python<'_>, select: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let patterns = select.map(texts).transpose()?;
        if patterns.as_ref().is_some_and(Vec::is_empty) {
            let message =
                "select=[] selects no tensor: give patterns, or leave it out to receive all tensors";
            return Err(Kind::Request.raise(py, message));
        }
        let patterns = patterns.unwrap_or_default().into_iter();
        let patterns = patterns.map(|pattern| pattern.parse::<Glob>().map_err(Kind::Request.because(py)));
        let (patterns, boxes) = (patterns.collect::<PyResult<_>>()?, Boxes::default());
        Ok(Self { patterns, boxes, has_warned: AtomicBool::new(false) })
    }

    /// The same tensors, cut to `boxes`.
    pub(crate) fn with_boxes(self, boxes: Boxes) -> Self {
        Self { boxes, ..self }
    }

    pub(crate) fn boxes(&self) -> &Boxes {
        &self.boxes
    }

    /// The patterns, if there are any.
    pub(crate) fn patterns(&self) -> Option<&[Glob]> {
        (!self.patterns.is_empty()).then_some(&self.patterns[..])
    }

    /// Whether a tensor of this name is selected.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.patterns.is_empty() || self.patterns.iter().any(|pattern| pattern.matches(name))
    }

    /// Refuses a version if it has tensors and no pattern matches any of them, or if boxes were computed for other tensors;
    /// the error is the message for the user.
    /// Of the first version that is not refused, logs a warning for each pattern without a match. That is no error:
    /// such a pattern may be meant for later versions.
    pub(crate) fn check(&self, id: &VersionId, manifest: &Manifest) -> Result<(), String> {
        self.boxes.check(id, manifest, self)?;
        let tensors = manifest.tensors();
        let has_match = |pattern: &&Glob| tensors.iter().any(|tensor| pattern.matches(tensor.name.as_str()));
        if tensors.is_empty() || self.patterns.is_empty() {
            return Ok(());
        }
        if !tensors.iter().any(|tensor| self.has(tensor.name.as_str())) {
            let examples: Vec<_> =
                tensors.iter().take(EXAMPLES_MAX).map(|tensor| tensor.name.as_str()).collect();
            return Err(format!(
                "select={:?} matches none of the {} tensors of {id}, which are called e.g. {}: correct the patterns (`*` and `?` \
                 stop at `/`, `**` crosses it)",
                self.patterns.iter().map(Glob::as_str).collect::<Vec<_>>(),
                tensors.len(),
                examples.join(", ")
            ));
        }
        if !self.has_warned.swap(true, Ordering::Relaxed) {
            for pattern in self.patterns.iter().filter(|pattern| !has_match(pattern)) {
                tracing::warn!("The pattern {:?} of select matches no tensor of {id}.", pattern.as_str());
            }
        }
        Ok(())
    }
}

/// The patterns, passed as one text or as several.
fn texts(select: &Bound<'_, PyAny>) -> PyResult<Vec<String>> {
    if let Ok(pattern) = select.extract::<String>() {
        return Ok(vec![pattern]);
    }
    let several = select
        .try_iter()
        .and_then(|each| each.map(|pattern| pattern?.extract()).collect());
    several.map_err(|_| {
        PyTypeError::new_err(format!("select is a pattern or several, each a text, and not {select:?}"))
    })
}
