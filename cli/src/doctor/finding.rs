//! Findings: the results of checks.

use serde_json::{Value, json};

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Eq)]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Ok,
    /// The checked feature works, but could be faster or safer.
    Warn,
    /// The checked feature does not work.
    Fail,
}

/// A fix, by environment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fix {
    pub(super) host: &'static str,
    pub(super) docker: &'static str,
    pub(super) kubernetes: &'static str,
}

impl Finding {
    pub(super) fn ok(name: &'static str, measured: impl Into<String>, wanted: impl Into<String>) -> Self {
        Self { name, state: State::Ok, measured: measured.into(), wanted: wanted.into(), fix: None }
    }

    pub(super) fn warn(
        name: &'static str,
        measured: impl Into<String>,
        wanted: impl Into<String>,
        fix: Fix,
    ) -> Self {
        Self { state: State::Warn, fix: Some(fix), ..Self::ok(name, measured, wanted) }
    }

    pub(super) fn fail(
        name: &'static str,
        measured: impl Into<String>,
        wanted: impl Into<String>,
        fix: Fix,
    ) -> Self {
        Self { state: State::Fail, fix: Some(fix), ..Self::ok(name, measured, wanted) }
    }

    /// A finding with state `Ok` if `is_good`, and with state `otherwise` if not.
    pub(super) fn judge(
        name: &'static str,
        (is_good, otherwise): (bool, State),
        measured: impl Into<String>,
        wanted: impl Into<String>,
        fix: Fix,
    ) -> Self {
        match is_good {
            true => Self::ok(name, measured, wanted),
            false => Self { state: otherwise, ..Self::warn(name, measured, wanted, fix) },
        }
    }

    pub(super) fn as_json(&self) -> Value {
        let fix = self
            .fix
            .map(|fix| json!({ "host": fix.host, "docker": fix.docker, "kubernetes": fix.kubernetes }));
        json!({
            "name": self.name,
            "state": self.state.name(),
            "measured": self.measured,
            "wanted": self.wanted,
            "fix": fix,
        })
    }
}

impl State {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "fail",
        }
    }
}

impl Fix {
    /// The fixes with the names of their environments.
    pub(super) fn by_environment(&self) -> [(&'static str, &'static str); 3] {
        [("host", self.host), ("Docker", self.docker), ("Kubernetes", self.kubernetes)]
    }
}
