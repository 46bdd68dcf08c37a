//! The result of a command: printed, and written with `--json`.

use crate::{origin::Origin, table::Table};
use anyhow::{Context, Result};
use serde::Serialize;
use std::{fmt, path::Path};

/// The tables of a command with their explanation, and in `details` the data that only this command has, e.g. every
/// round.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Results<Details> {
    /// The command's name.
    kind: &'static str,
    /// [`VERSION`] when the file was written.
    version: u32,
    #[serde(flatten)]
    pub(crate) origin: Origin,
    /// Names the measurement and its network.
    pub(crate) title: String,
    /// Explains the numbers.
    pub(crate) about: String,
    pub(crate) tables: Vec<Table>,
    /// Remarks on the numbers.
    pub(crate) notes: Vec<String>,
    #[serde(flatten)]
    pub(crate) details: Details,
}

/// The version of the file format. Adding fields does not change it.
const VERSION: u32 = 3;

impl<Details: Serialize> Results<Details> {
    /// Results with `details` and without tables yet, of this machine and today's date.
    pub(crate) fn new(kind: &'static str, title: String, about: String, details: Details) -> Self {
        let (tables, notes) = (vec![], vec![]);
        Self { kind, version: VERSION, origin: Origin::here(), title, about, tables, notes, details }
    }

    /// Writes the file to `path`, if given.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(crate) fn write(&self, path: Option<&Path>) -> Result<()> {
        let Some(path) = path else { return Ok(()) };
        let text = serde_json::to_string_pretty(self)?;
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
    }
}

/// Formats a Markdown section.
impl<Details> fmt::Display for Results<Details> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "## {}\n\n{}\n\n{}.", self.title, self.about, self.origin)?;
        for table in self.tables.iter().filter(|table| !table.rows.is_empty()) {
            write!(f, "\n{}:\n\n{table}", table.name)?;
        }
        if !self.notes.is_empty() {
            writeln!(f)?;
        }
        self.notes.iter().try_for_each(|note| {
            // The reason of a failure may have several lines.
            writeln!(f, "- {}", note.split_whitespace().collect::<Vec<_>>().join(" "))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cells::Cells, table::Row};

    #[test]
    fn results_are_formatted_in_markdown() {
        let mut results = Results::new("compare", "a & b".into(), "Medians.".into(), ());
        let setting = Cells::of([("contender", "tcp|tls".to_owned())]);
        let row = Row::of(setting, [&Cells::of([("gb_per_s", 1.0)])]);
        results.tables = vec![Table::new("All runs", [row]), Table::new("Empty", [])];
        results.notes = vec!["tcp failed:\nit ended early".into()];
        let text = results.to_string();
        assert!(text.starts_with("## a & b\n\nMedians.\n\n"), "{text}");
        assert!(
            text.contains("| tcp\\|tls ") && text.ends_with("\n- tcp failed: it ended early\n"),
            "{text}"
        );
        assert!(!text.contains("Empty"), "{text}");
    }
}
