//! The output of a part of the suite: lines of JSON.

pub(super) use crate::cells::Cells;
use crate::contender;
use serde::{Deserialize, Serialize};

/// A line of output. Each line is complete by itself, because the lines before a failure are kept.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Line {
    /// One measurement. Measurements with the same table and setting are summarised together.
    Sample(Sample),
    /// A check and its result.
    Check(Check),
    /// A remark on the numbers.
    Note(String),
    /// The name and the value of a property of the device.
    Fact(String, String),
}

/// One measurement under one setting.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Sample {
    /// The name of its table.
    pub(super) table: String,
    /// The settings; text, so that `8` and `host` have one type.
    pub(super) setting: Cells<String>,
    /// The measured values. Their names end with the unit, except those of ratios.
    pub(super) measured: Cells<f64>,
}

/// A check and its result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Check {
    pub(super) name: String,
    pub(super) passed: bool,
    /// The reason of a failure, or details.
    pub(super) detail: String,
}

/// Prints a measurement.
pub(super) fn sample(table: &str, setting: Cells<String>, measured: Cells<f64>) {
    print(&Line::Sample(Sample { table: table.to_owned(), setting, measured }));
}

/// Prints the result of a check. `Ok` and `Err` both carry details.
pub(super) fn check(name: impl Into<String>, outcome: Result<String, String>) {
    let passed = outcome.is_ok();
    let detail = outcome.unwrap_or_else(|reason| reason);
    print(&Line::Check(Check { name: name.into(), passed, detail }));
}

/// Prints a remark.
pub(super) fn note(text: impl Into<String>) {
    print(&Line::Note(text.into()));
}

/// Prints a property of the device.
pub(super) fn fact(name: &str, value: impl Into<String>) {
    print(&Line::Fact(name.to_owned(), value.into()));
}

/// Prints `line`, for the suite that started this process or for a person; drops it if standard output is closed.
pub(super) fn print(line: &Line) {
    let _ = contender::print(line);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_keep_their_order() {
        let sample = Sample {
            table: "t".into(),
            setting: Cells::of([("slots", "8".into()), ("chunk", "4 MiB".into())]),
            measured: Cells::of([("z", 1.5)]).and("a", Some(2.0)).and("none", None),
        };
        let line = Line::Sample(sample);
        let text = serde_json::to_string(&line).unwrap();
        let expected = r#"{"sample":{"table":"t","setting":{"slots":"8","chunk":"4 MiB"},"measured":{"z":1.5,"a":2.0}}}"#;
        assert_eq!(text, expected);
        assert_eq!(serde_json::from_str::<Line>(&text).unwrap(), line);
    }
}
