//! The result file of `codecs`; `bench/README.md` explains each number.

use super::{
    choice::Choice,
    measure::{CodecResult, Job},
};
use crate::origin::Origin;
use serde::Serialize;
use std::path::Path;

/// The content of the result file.
#[derive(Debug, Serialize)]
pub(super) struct Document {
    kind: &'static str,
    version: u32,
    #[serde(flatten)]
    origin: Origin,
    chunk_bytes: u32,
    rounds: u32,
    pub(super) results: Vec<DtypeResult>,
}

/// The results for the tensors of one dtype in one file.
#[derive(Debug, Serialize)]
pub(super) struct DtypeResult {
    pub(super) file: String,
    pub(super) dtype: &'static str,
    pub(super) raw_bytes: u64,
    pub(super) chunks: usize,
    pub(super) codecs: Vec<CodecResult>,
    pub(super) auto: Choice,
}

impl Document {
    pub(super) fn new(chunk_bytes: u32, rounds: u32) -> Self {
        let origin = Origin::here();
        Self { kind: "codecs", version: 1, origin, chunk_bytes, rounds, results: vec![] }
    }
}

impl DtypeResult {
    /// The results for the file at `path`, of which only the name is recorded, because its folder may be private.
    pub(super) fn new(path: &Path, job: &Job<'_>, codecs: Vec<CodecResult>, auto: Choice) -> Self {
        Self {
            file: path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned(),
            dtype: job.dtype.name(),
            raw_bytes: job.bytes(),
            chunks: job.chunk_count(),
            codecs,
            auto,
        }
    }
}
