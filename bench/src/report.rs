//! `bench report`: turns result files into an HTML page, or into Markdown tables.
//!
//! The page is one self-contained file, without scripts or external resources; its charts are SVG.

mod html;
mod svg;

use crate::results::{Results, VERSION};
use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// The options of `report`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct ReportArgs {
    /// Files that `compare`, `deltas` and `run` wrote with --json.
    #[arg(value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
    /// The file of the HTML page.
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// The file of the Markdown tables. Without --html and --markdown, the tables are printed.
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  report loopback.json veth.json --html report.html --markdown report.md
  report results/*.json";

/// A result file without its details, which depend on the command.
type ResultFile = Results<NoDetails>;

#[derive(Debug, Deserialize)]
struct NoDetails {}

/// Reads the files, and writes or prints the requested formats.
///
/// # Errors
/// When a file cannot be read or is no result, or when one cannot be written.
pub fn run(args: &ReportArgs) -> Result<()> {
    let results = args.files.iter().map(|path| read(path)).collect::<Result<Vec<_>>>()?;
    if let Some(path) = &args.html {
        write(path, &html::page(&results))?;
    }
    let markdown = || results.iter().map(ResultFile::to_string).collect::<Vec<_>>().join("\n");
    match &args.markdown {
        Some(path) => write(path, &markdown()),
        None if args.html.is_none() => {
            print!("{}", markdown());
            Ok(())
        }
        None => Ok(()),
    }
}

fn read(path: &Path) -> Result<ResultFile> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    parse(&text).with_context(|| format!("{} is no result file of this version", path.display()))
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
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
        assert!(reason(r#"{"kind":"compare","version":1}"#).contains("version is 1"));
        assert!(reason(r#"{"kind":"compare","version":2}"#).contains("missing field"));
    }

    /// Goal: a result file becomes a self-contained page and tables. Method: write a file, convert it, read both.
    #[test]
    fn files_become_a_page_and_tables() {
        let folder = std::env::temp_dir().join(format!("tensor-relay-bench-report-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let [file, html, markdown] =
            ["compare.json", "report.html", "report.md"].map(|name| folder.join(name));
        let details = Cells::of([("size_bytes", 7.0)]);
        let mut results = Results::new("compare", "a & b".into(), "Medians.".into(), details);
        let row = |name: &str, speed| {
            Row::of(Cells::of([("contender", name.to_owned())]), [&Cells::of([("gb_per_s", speed)])])
        };
        results.tables = vec![Table::new("All runs", [row("tcp|tls", 1.0), row("tensor-relay", 2.0)])];
        results.notes = vec!["tcp failed:\nit ended early".into()];
        results.write(Some(&file)).unwrap();
        let args =
            ReportArgs { files: vec![file], html: Some(html.clone()), markdown: Some(markdown.clone()) };
        run(&args).unwrap();
        let [page, tables] = [html, markdown].map(|path| fs::read_to_string(path).unwrap());
        fs::remove_dir_all(&folder).unwrap();
        for word in ["a &amp; b", "<td>tcp|tls</td>", "it ended early", "GB/s: more is better", "</html>"] {
            assert!(page.contains(word), "{word}: {page}");
        }
        let bar = |name: &str| page.find(&format!("\">{name}</text>"));
        assert!(bar("tensor-relay") < bar("tcp|tls"), "the fastest first");
        for outside in ["<script", "http://", "https://", "src="] {
            assert!(!page.replace("http://www.w3.org/2000/svg", "").contains(outside), "{outside}");
        }
        for word in ["## a & b", "| tcp\\|tls ", "\n- tcp failed: it ended early\n"] {
            assert!(tables.contains(word), "{word}: {tables}");
        }
    }
}
