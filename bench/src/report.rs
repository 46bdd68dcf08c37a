//! `bench report`: prints the tables of result files.

use crate::results::{Results, VERSION};
use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// The options of `report`.
#[derive(Debug, Clone, clap::Args)]
pub struct ReportArgs {
    /// Files that `compare`, `deltas` and `run` wrote with --json.
    #[arg(value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
}

/// A result file without its details, which depend on the command.
type ResultFile = Results<NoDetails>;

#[derive(Debug, Deserialize)]
struct NoDetails {}

/// Prints the tables of all files in Markdown.
///
/// # Errors
/// When a file cannot be read or is no result of this version.
pub fn run(args: &ReportArgs) -> Result<()> {
    let results = args.files.iter().map(|path| read(path)).collect::<Result<Vec<_>>>()?;
    print!("{}", results.iter().map(ResultFile::to_string).collect::<Vec<_>>().join("\n"));
    Ok(())
}

fn read(path: &Path) -> Result<ResultFile> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    parse(&text).with_context(|| format!("{} is no result file of this version", path.display()))
}

/// The field that every version of result files has.
#[derive(Deserialize)]
struct Head {
    version: u32,
}

fn parse(text: &str) -> Result<ResultFile> {
    let Head { version } = serde_json::from_str(text).context("it has no version")?;
    ensure!(
        version == VERSION,
        "its version is {version}, and this program reads version {VERSION}: use the program that wrote it"
    );
    Ok(serde_json::from_str(text)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cells::Cells,
        table::{Row, Table},
    };

    #[test]
    fn invalid_files_are_refused() {
        let reason = |text: &str| format!("{:#}", parse(text).unwrap_err());
        assert!(reason("{").contains("no version"));
        assert!(reason(r#"{"kind":"compare","version":2}"#).contains("version is 2"));
        assert!(reason(r#"{"kind":"compare","version":3}"#).contains("missing field"));
    }

    #[test]
    fn a_written_file_has_the_printed_tables() {
        let details = Cells::of([("size_bytes", 7.0)]);
        let mut results = Results::new("compare", "a & b".into(), "Medians.".into(), details);
        let row =
            Row::of(Cells::of([("contender", "tcp|tls".to_owned())]), [&Cells::of([("gb_per_s", 1.0)])]);
        results.tables = vec![Table::new("All runs", [row])];
        results.notes = vec!["tcp failed:\nit ended early".into()];
        let read = parse(&serde_json::to_string(&results).unwrap()).unwrap().to_string();
        assert_eq!(read, results.to_string());
        for part in ["## a & b", "| tcp\\|tls ", "\n- tcp failed: it ended early\n"] {
            assert!(read.contains(part), "{part}: {read}");
        }
    }
}
