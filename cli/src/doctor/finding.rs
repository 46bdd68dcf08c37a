//! Findings: the results of checks.

use serde::Serialize;

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    /// The name of the check. It is stable, because programs search for it.
    pub(super) name: &'static str,
    pub(super) state: State,
    /// The measured value.
    pub(super) measured: String,
    /// The expected value.
    pub(super) wanted: String,
    /// The fix, unless the state is `Ok`.
    pub(super) fix: Option<Fix>,
}

/// The severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum State {
    Ok,
    /// The checked feature works, but could be faster or safer.
    Warn,
    /// The checked feature does not work.
    Fail,
}

/// A fix, by environment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Fix {
    pub(super) host: &'static str,
    pub(super) docker: &'static str,
    pub(super) kubernetes: &'static str,
}

impl Finding {
    pub(super) fn ok(name: &'static str, measured: impl Into<String>, wanted: impl Into<String>) -> Self {
        Self { name, state: State::Ok, measured: measured.into(), wanted: wanted.into(), fix: None }
    }

    /// A finding with `state`, and with `fix` if that is not `Ok`.
    pub(super) fn new(
        name: &'static str,
        state: State,
        measured: impl Into<String>,
        wanted: impl Into<String>,
        fix: Fix,
    ) -> Self {
        Self { state, fix: (state != State::Ok).then_some(fix), ..Self::ok(name, measured, wanted) }
    }
}

impl State {
    /// `Ok` if `is_good`, else `self`.
    pub(super) fn unless(self, is_good: bool) -> Self {
        if is_good { Self::Ok } else { self }
    }
}
