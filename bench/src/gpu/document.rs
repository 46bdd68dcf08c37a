//! The result files of the suite: JSON for machines, Markdown for people.

use super::{
    line::{Cells, Check, Line, Sample},
    parts::{Facts, Part},
};
use crate::{
    origin::Origin,
    size,
    stats::format_number,
    table::{Row, Table},
};
use serde::Serialize;
use std::fmt::Write;

/// All results, for one device of one machine.
#[derive(Debug, Serialize)]
pub(super) struct Document {
    pub(super) title: String,
    /// True only for a GPU, and not for a quick run. Other numbers only show that the suite runs.
    pub(super) is_result: bool,
    #[serde(flatten)]
    pub(super) origin: Origin,
    pub(super) version: &'static str,
    pub(super) settings: Cells<String>,
    pub(super) device: Cells<String>,
    pub(super) machine: Cells<String>,
    pub(super) parts: Vec<Findings>,
}

/// The results of one part.
#[derive(Debug, Serialize)]
pub(super) struct Findings {
    pub(super) part: &'static str,
    pub(super) seconds: f64,
    /// The largest payload that the part moved.
    pub(super) payload_bytes: u64,
    /// The reason of a failure. Results before it are kept.
    pub(super) failure: Option<String>,
    pub(super) checks: Vec<Check>,
    pub(super) notes: Vec<String>,
    pub(super) tables: Vec<Table>,
    #[serde(skip)]
    about: Facts,
}

impl Findings {
    /// The results in the output lines of `part`.
    pub(super) fn new(
        part: Part,
        seconds: f64,
        payload_bytes: u64,
        lines: &[Line],
        failure: Option<String>,
    ) -> Self {
        let (mut checks, mut notes, mut tables) = (vec![], vec![], Vec::<Table>::new());
        for line in lines {
            match line {
                Line::Check(check) => checks.push(check.clone()),
                Line::Note(note) => notes.push(note.clone()),
                Line::Fact(..) => {}
                Line::Sample(Sample { table, setting, measured }) => {
                    match tables.iter_mut().find(|other| other.name == *table) {
                        Some(table) => table.add(setting, measured),
                        None => tables.push(Table::new(table, [Row::of(setting.clone(), [measured])])),
                    }
                }
            }
        }
        Self {
            part: part.name(),
            seconds,
            payload_bytes,
            failure,
            checks,
            notes,
            tables,
            about: part.facts(),
        }
    }

    /// The failure of the part, and its failed checks.
    pub(super) fn failures(&self) -> Vec<String> {
        let failed = self.checks.iter().filter(|check| !check.passed);
        let failed = failed.map(|check| format!("{}: {}: {}", self.part, check.name, check.detail));
        let failure = self.failure.iter().map(|failure| format!("{}: {failure}", self.part));
        failure.chain(failed).collect()
    }

    fn markdown(&self) -> String {
        let mut text = format!("\n## {}\n\n{}\n", self.about.title, self.about.about);
        if let Some(failure) = &self.failure {
            let _ = writeln!(text, "\n**This part failed.** Its results until then are below. {failure}");
        }
        for table in &self.tables {
            let _ = write!(text, "\n{}:\n\n{table}", table.name);
        }
        if !self.checks.is_empty() {
            let passed = self.checks.iter().filter(|check| check.passed).count();
            let _ = writeln!(text, "\n{passed} of {} passed.\n", self.checks.len());
            for Check { name, passed, detail } in &self.checks {
                let word = if *passed { "passed" } else { "**FAILED**" };
                let _ = writeln!(text, "- {word}: {name}: {detail}");
            }
        }
        for note in &self.notes {
            let _ = writeln!(text, "\n{note}");
        }
        let payload = match self.about.bytes {
            0 => String::new(),
            _ => format!(", payloads of {}", size::text(self.payload_bytes)),
        };
        let _ = writeln!(text, "\n({} s{payload})", format_number(self.seconds));
        text
    }
}

impl Document {
    /// The failures of all parts.
    pub(super) fn failures(&self) -> Vec<String> {
        self.parts.iter().flat_map(Findings::failures).collect()
    }

    /// The Markdown document.
    pub(super) fn markdown(&self) -> String {
        let mut text = format!("# {}, {}\n\n", self.title, self.origin.date);
        if !self.is_result {
            text.push_str("**This is no result.** No GPU was measured, or only in a quick run: it shows that the suite runs to its end, and no number of it means anything.\n\n");
        }
        text.push_str(PREFACE);
        let _ = writeln!(text, "\ntensor-relay {}: {}.\n", self.version, self.origin);
        for (name, value) in [&self.device, &self.machine, &self.settings]
            .into_iter()
            .flat_map(|cells| &cells.0)
        {
            let _ = writeln!(text, "- {name}: {value}");
        }
        text.push_str(&self.summary());
        for part in &self.parts {
            text.push_str(&part.markdown());
        }
        text
    }

    /// The summary: the efficiency beside its goal, and all failures.
    fn summary(&self) -> String {
        let mut text = String::from("\n## In short\n\n");
        let mut tables = self.parts.iter().flat_map(|part| &part.tables);
        let table = tables.find(|table| table.name == "loopback");
        let row = table.and_then(|table| table.rows.first());
        match row.and_then(|row| Some((row, row.measured.get("efficiency")?.median))) {
            None => text.push_str("- Efficiency over loopback: not measured.\n"),
            Some((row, efficiency)) => {
                let word = if efficiency >= EFFICIENCY_GOAL { "reached" } else { "missed" };
                let setting = row.setting.0.iter().map(|(name, value)| format!("{name} {value}"));
                let setting = setting.collect::<Vec<_>>().join(", ");
                let rate = row.measured.get("end_to_end_gb_per_s").map_or(f64::NAN, |rate| rate.median);
                let rate = format_number(rate);
                let _ = writeln!(
                    text,
                    "- Efficiency over loopback ({setting}): {efficiency:.3}, at {rate} GB/s. The goal of {EFFICIENCY_GOAL} is {word}."
                );
            }
        }
        let failures = self.failures();
        if failures.is_empty() {
            text.push_str("- Nothing failed.\n");
        }
        text.extend(failures.iter().map(|failure| format!("- **Failed**: {failure}\n")));
        text
    }
}

/// The goal of the efficiency: a GPU at both ends makes a transfer at most 5 % slower than its slowest stage.
const EFFICIENCY_GOAL: f64 = 0.95;

const PREFACE: &str = "\
Written by `bench/gpu/run`; `bench/gpu/README.md` explains it. Rates are 10^9 bytes per second; a cell has the median, the \
minimum and the maximum of the samples. Each pass of a part adds one or more samples to each row.
";
