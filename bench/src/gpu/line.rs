//! What a part of the suite prints, one JSON object a line, and the suite reads.

pub(super) use crate::cells::Cells;
use serde::{Deserialize, Serialize};

/// A line of a part. What was printed before a part fails is kept, so each says something by itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Line {
    /// One measurement. Those of one table and setting are summarised together.
    Sample(Sample),
    /// Something that must be so, and whether it is.
    Check(Check),
    /// What a reader of the numbers should know.
    Note(String),
    /// Something about the device.
    Fact(Fact),
}

/// Something about the device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Fact {
    pub(super) name: String,
    pub(super) value: String,
}

/// What was measured once, under one setting.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Sample {
    /// Of which table of the part.
    pub(super) table: String,
    /// What was chosen; text, so that `8` and `host` are alike.
    pub(super) setting: Cells<String>,
    /// What came out. Names end with their unit.
    pub(super) measured: Cells<f64>,
}

/// Something that must be so.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Check {
    pub(super) name: String,
    pub(super) passed: bool,
    /// Why not, or how.
    pub(super) detail: String,
}

/// Prints measurements, checks and notes for the suite that started this process, or for a person.
#[derive(Debug, Clone, Copy)]
pub(super) struct Printer;

impl Printer {
    /// One measurement.
    pub(super) fn sample(self, table: &str, setting: Cells<String>, measured: Cells<f64>) {
        self.line(&Line::Sample(Sample { table: table.to_owned(), setting, measured }));
    }

    /// Whether something that must be so is so. `Ok` and `Err` both say how.
    pub(super) fn check(self, name: impl Into<String>, outcome: Result<String, String>) {
        let passed = outcome.is_ok();
        let detail = outcome.unwrap_or_else(|reason| reason);
        self.line(&Line::Check(Check { name: name.into(), passed, detail }));
    }

    /// What a reader should know.
    pub(super) fn note(self, text: impl Into<String>) {
        self.line(&Line::Note(text.into()));
    }

    /// Something about the device.
    pub(super) fn fact(self, name: &str, value: impl Into<String>) {
        self.line(&Line::Fact(Fact { name: name.to_owned(), value: value.into() }));
    }

    /// Where nobody reads any more, there is nobody to tell.
    fn line(self, line: &Line) {
        use std::io::Write;
        let text = serde_json::to_string(line).expect("names and numbers have a JSON form");
        let _ = writeln!(std::io::stdout(), "{text}");
    }
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
