//! `bench codecs`: measures the compression ratio and the speed of each codec on a user's own tensors.

mod choice;
mod content;
mod measure;

use crate::{cells::Cells, results::Results, size, table::Table};
use anyhow::{Context, Result, bail};
use choice::Choice;
use content::Content;
use measure::{Job, Subject, measure};
use serde::Serialize;
use std::path::{Path, PathBuf};
use tensor_relay_protocol::Dtype;

/// The options of `codecs`.
#[derive(Debug, clap::Args)]
pub struct CodecsArgs {
    /// The tensors: safetensors files, or with --dtype files of raw elements. Each is read into memory completely.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// The dtype of files that do not record it.
    #[arg(long, value_name = "DTYPE", value_parser = parse_dtype)]
    dtype: Option<Dtype>,
    /// A file with the same tensors of another version, for codecs that make deltas.
    #[arg(long, value_name = "FILE")]
    base: Option<PathBuf>,
    /// The size of a chunk.
    #[arg(long, default_value = "4MiB", value_parser = size::parse, value_name = "SIZE")]
    chunk_size: u64,
    /// The number of passes over each file, in each of which every codec runs once. The fastest time of each chunk
    /// counts, because other work on the machine only makes passes slower.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Also measures `bitplanes` with each set of SIMD instructions that this processor supports.
    #[arg(long)]
    paths: bool,
    /// Also writes everything that was measured to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

pub(crate) const EXAMPLES: &str = "\
Examples:
  codecs model.safetensors
  codecs model.safetensors --base yesterday.safetensors
  codecs cache.bin --dtype bf16 --paths --json codecs.json";

/// The details of the result file, besides its tables.
#[derive(Serialize)]
struct Details {
    chunk_bytes: u32,
    rounds: u32,
    /// The choices of `auto`, by the name of the table.
    auto: Cells<Choice>,
}

const ABOUT: &str = "\
Rates are 10^9 raw bytes a second on one core, by the fastest time of each chunk; `of memcpy` divides them by those of `raw`, a \
plain copy. A chunk that a codec cannot make 3 % smaller is raw.";

/// Measures all codecs on this thread, and prints a table for each file and dtype.
///
/// # Errors
/// When a file cannot be read, does not record its dtype, or has other tensors than its base; when a codec does not
/// restore the bytes that it encoded; when the result file cannot be written.
pub fn run(args: &CodecsArgs) -> Result<()> {
    let chunk_bytes = u32::try_from(args.chunk_size).context("--chunk-size is too large")?;
    let read = |path: &Path| Content::read(path, args.dtype, chunk_bytes);
    // `raw`, the reference, is the first.
    let mut subjects = Subject::codecs();
    subjects.extend(Subject::paths().filter(|_| args.paths));
    let details = Details { chunk_bytes, rounds: args.rounds, auto: Cells::default() };
    let mut results = Results::new("codecs", "Codecs".into(), ABOUT.into(), details);
    for path in &args.files {
        let content = read(path)?;
        let base = args.base.as_deref().map(read).transpose()?;
        if base.as_ref().is_some_and(|base| !base.has_same_layout(&content)) {
            bail!(
                "the base has other tensors than {}: names, dtypes and shapes must be the same",
                path.display()
            );
        }
        // Only the name, because its folder may be private.
        let file = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
        for dtype in content.dtypes() {
            let job = Job::new(&content, base.as_ref(), dtype);
            let name = format!("{file}, {dtype}: {} bytes in {} chunks", job.bytes(), job.chunk_count());
            eprintln!("{name}");
            let rows = measure(&job, &subjects, args.rounds)
                .with_context(|| format!("{dtype} of {}", path.display()))?;
            let choice = Choice::of(&job, args.rounds);
            results.tables.push(Table::new(&name, rows));
            results.notes.push(format!("{file}, {dtype}: {choice}"));
            results.details.auto.0.insert(name, choice);
        }
    }
    print!("{results}");
    results.write(args.json.as_deref())
}

fn parse_dtype(text: &str) -> Result<Dtype, String> {
    let names = || Dtype::ALL.iter().map(|dtype| dtype.name()).collect::<Vec<_>>().join(", ");
    let dtype = Dtype::ALL.iter().copied().find(|dtype| dtype.name() == text);
    dtype.ok_or_else(|| format!("{text:?} is no dtype: write one of {}", names()))
}
