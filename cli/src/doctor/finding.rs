//! Findings: the results of checks.

use serde_json::{Value, json};

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Finding {
    /// What, in a few words that never change: programs look for them.
    pub(super) name: &'static str,
    pub(super) state: State,
    /// The measured value.
    pub(super) measured: String,
    /// The expected value.
    pub(super) wanted: String,
    /// The fix, unless it is good.
    pub(super) fix: Option<Fix>,
}

/// How good it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Ok,
    /// It works, and would be faster or safer otherwise.
    Warn,
    /// Something does not work.
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

    /// Good or not, by `is_good`; what is not good is as bad as `otherwise`.
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
    pub(super) fn ways(&self) -> [(&'static str, &'static str); 3] {
        [("host", self.host), ("Docker", self.docker), ("Kubernetes", self.kubernetes)]
    }
}
