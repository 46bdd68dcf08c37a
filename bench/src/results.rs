//! The result file of a command: printed, written with `--json`, and read by `report`.

use crate::{origin::Origin, table::Table};
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::{fmt, path::Path};

/// The tables of a command with their explanation, and in `details` the data that only this command has, e.g. every
/// round.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Results<Details> {
    /// The command's name.
    pub(crate) kind: String,
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
pub(crate) const VERSION: u32 = 3;

impl<Details: Serialize> Results<Details> {
    /// Results with `details` and without tables yet, of this machine and today's date.
    pub(crate) fn new(kind: &str, title: String, about: String, details: Details) -> Self {
        let (tables, notes) = (vec![], vec![]);
        Self {
            kind: kind.into(),
            version: VERSION,
            origin: Origin::here(),
            title,
            about,
            tables,
            notes,
            details,
        }
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
