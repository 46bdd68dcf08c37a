//! The report: result files as a page to look at, and as tables for a README.
//!
//! The page is one file of HTML without scripts, fonts or pictures from elsewhere; its bars are SVG. What a file says is
//! made into a `Sheet` first, whatever kind of file it is, so that page and tables say the same.

mod compare;
mod html;
mod markdown;
mod run;
mod sheet;
mod svg;

use crate::compare::Comparison;
use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use sheet::Sheet;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// What is reported, and where to.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct ReportArgs {
    /// Files that `compare --json` and `run --json` wrote.
    #[arg(value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
    /// Where to write the page.
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Where to write the tables in Markdown. Without either they are printed.
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  report loopback.json veth.json --html report.html --markdown report.md
  report bench/results/*.json";

/// Reads the files and writes what was asked for.
///
/// # Errors
/// When a file cannot be read or is no result, or when one cannot be written.
pub fn run(args: &ReportArgs) -> Result<()> {
    let sheets = args.files.iter().map(|path| read(path)).collect::<Result<Vec<_>>>()?;
    if let Some(path) = &args.html {
        write(path, &html::page(&sheets))?;
    }
    match &args.markdown {
        Some(path) => write(path, &markdown::tables(&sheets)),
        None if args.html.is_none() => {
            print!("{}", markdown::tables(&sheets));
            Ok(())
        }
        None => Ok(()),
    }
}

fn read(path: &Path) -> Result<Sheet> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    sheet(&text).with_context(|| format!("{} is no result of a benchmark", path.display()))
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// What every result file begins with.
#[derive(Deserialize)]
struct Head {
    kind: String,
    version: u32,
}

fn sheet(text: &str) -> Result<Sheet> {
    let Head { kind, version } = serde_json::from_str(text).context("it has no kind and version")?;
    let known = match kind.as_str() {
        Comparison::KIND => Comparison::VERSION,
        run::KIND => run::VERSION,
        other => bail!("nothing is known of its kind, {other:?}"),
    };
    ensure!(
        version == known,
        "its version is {version}, of which nothing is known: use the program that wrote it"
    );
    match kind.as_str() {
        Comparison::KIND => Ok(compare::sheet(&serde_json::from_str(text)?)),
        _ => Ok(run::sheet(&serde_json::from_str(text)?)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_result_is_told() {
        let reason = |text: &str| format!("{:#}", sheet(text).unwrap_err());
        assert!(reason("{").contains("no kind"));
        assert!(reason(r#"{"kind":"soup","version":1}"#).contains("\"soup\""));
        assert!(reason(r#"{"kind":"compare","version":9}"#).contains("version is 9"));
        assert!(reason(r#"{"kind":"compare","version":1}"#).contains("missing field"));
    }

    /// Goal: files become a page and tables that stand for themselves. Method: one of each kind through the whole way.
    #[test]
    fn files_become_a_page_and_tables() {
        let folder = std::env::temp_dir().join(format!("tensor-relay-bench-report-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let [compared, ran, html, markdown] =
            ["compare.json", "run.json", "report.html", "report.md"].map(|name| folder.join(name));
        let example = crate::compare::tests::example();
        fs::write(&compared, serde_json::to_string(&example).unwrap()).unwrap();
        fs::write(&ran, run::tests::EXAMPLE).unwrap();
        let args = ReportArgs {
            files: vec![compared, ran],
            html: Some(html.clone()),
            markdown: Some(markdown.clone()),
        };
        run(&args).unwrap();
        let [page, tables] = [html, markdown].map(|path| fs::read_to_string(path).unwrap());
        fs::remove_dir_all(&folder).unwrap();
        for word in ["tcp-tls", "it ended early", "fan-out 4", "<svg", "</html>"] {
            assert!(page.contains(word), "{word}");
        }
        for outside in ["<script", "http://", "https://", "src="] {
            assert!(!page.replace("http://www.w3.org/2000/svg", "").contains(outside), "{outside}");
        }
        for word in ["| **tensor-relay** | yes |", "| fan-out 4 |", "it ended early"] {
            assert!(tables.contains(word), "{word}: {tables}");
        }
    }
}
