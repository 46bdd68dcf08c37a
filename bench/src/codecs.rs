//! `bench codecs`: measures the compression ratio and the speed of each codec on a user's own tensors.

mod choice;
mod content;
mod document;
mod measure;
mod table;

use crate::size;
use anyhow::{Context, Result, bail};
use choice::Choice;
use content::Content;
use document::{Document, DtypeResult};
use measure::{Job, Subject, measure};
use std::path::{Path, PathBuf};
use tensor_relay_protocol::Dtype;

/// The options of `codecs`.
#[derive(Debug, clap::Args)]
pub struct CodecsArgs {
    /// The tensors: safetensors files, NumPy arrays (`.npy`), or with --dtype files of raw elements. Each is read into
    /// memory completely.
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

/// Measures all codecs on this thread, and prints a table for each file and dtype.
///
/// # Errors
/// When a file cannot be read, does not record its dtype, or has other tensors than its base; when a codec does not
/// restore the bytes that it encoded; when the result file cannot be written.
pub fn run(args: &CodecsArgs) -> Result<()> {
    let chunk_bytes = u32::try_from(args.chunk_size).context("--chunk-size is too large")?;
    let read = |path: &Path| Content::read(path, args.dtype, chunk_bytes);
    let subjects = codecs_to_measure(args.paths);
    let mut document = Document::new(chunk_bytes, args.rounds);
    for path in &args.files {
        let content = read(path)?;
        let base = args.base.as_deref().map(read).transpose()?;
        if base.as_ref().is_some_and(|base| !base.has_same_layout(&content)) {
            bail!(
                "the base has other tensors than {}: names, dtypes and shapes must be the same",
                path.display()
            );
        }
        for dtype in content.dtypes() {
            let job = Job::new(&content, base.as_ref(), dtype);
            let codecs = measure(&job, &subjects, args.rounds)
                .with_context(|| format!("{dtype} of {}", path.display()))?;
            let result = DtypeResult::new(path, &job, codecs, Choice::of(&job, args.rounds));
            print!("{result}");
            document.results.push(result);
        }
    }
    match &args.json {
        Some(path) => std::fs::write(path, serde_json::to_string_pretty(&document)?)
            .with_context(|| format!("cannot write {}", path.display())),
        None => Ok(()),
    }
}

/// The codecs to measure. `raw`, the reference, is the first.
fn codecs_to_measure(with_paths: bool) -> Vec<Subject> {
    let mut subjects = Subject::codecs();
    if with_paths {
        subjects.extend(Subject::paths());
    }
    subjects
}

fn parse_dtype(text: &str) -> Result<Dtype, String> {
    let names = || Dtype::ALL.iter().map(|dtype| dtype.name()).collect::<Vec<_>>().join(", ");
    let dtype = Dtype::ALL.iter().copied().find(|dtype| dtype.name() == text);
    dtype.ok_or_else(|| format!("{text:?} is no dtype: write one of {}", names()))
}
