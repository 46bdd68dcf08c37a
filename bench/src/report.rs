//! The report: result files as a page to look at, and as tables for a README.
//!
//! The page is one file of HTML without scripts, fonts or pictures from elsewhere; its bars are SVG.

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
    /// The file of the Markdown tables. Without either, tables are printed.
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  report loopback.json veth.json --html report.html --markdown report.md
  report results/*.json";

/// A file, without what only its command knows.
type Read = Results<Nothing>;

#[derive(Debug, Deserialize)]
struct Nothing {}

/// Reads the files and writes what was asked for.
///
/// # Errors
/// When a file cannot be read or is no result, or when one cannot be written.
pub fn run(args: &ReportArgs) -> Result<()> {
    let results = args.files.iter().map(|path| read(path)).collect::<Result<Vec<_>>>()?;
    if let Some(path) = &args.html {
        write(path, &html::page(&results))?;
    }
    let markdown = || results.iter().map(Read::to_string).collect::<Vec<_>>().join("\n");
    match &args.markdown {
        Some(path) => write(path, &markdown()),
        None if args.html.is_none() => {
            print!("{}", markdown());
            Ok(())
        }
        None => Ok(()),
    }
}

fn read(path: &Path) -> Result<Read> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    parse(&text).with_context(|| format!("{} is no result that can be shown", path.display()))
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// The fields of every result file.
#[derive(Deserialize)]
struct Head {
    version: u32,
}

fn parse(text: &str) -> Result<Read> {
    let Head { version } = serde_json::from_str(text).context("it has no version")?;
    ensure!(
        version == VERSION,
        "its version is {version}, of which nothing is known: use the program that wrote it"
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
    fn what_is_no_result_is_told() {
        let reason = |text: &str| format!("{:#}", parse(text).unwrap_err());
        assert!(reason("{").contains("no version"));
        assert!(reason(r#"{"kind":"compare","version":1}"#).contains("version is 1"));
        assert!(reason(r#"{"kind":"compare","version":2}"#).contains("missing field"));
    }

    /// Goal: files become a page and tables that stand for themselves. Method: one through the whole way.
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
