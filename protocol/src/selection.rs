//! Which tensors of a snapshot somebody wants, and which chunks that takes (PROTOCOL.md §5.4).

use crate::{ChunkIndex, Chunking, Glob, Manifest, RangeSet};
use std::{collections::HashSet, ops::Range, sync::Arc};

/// The tensors of one manifest that a list of globs takes, the chunks that carry them, and where a receiver that wants
/// no others keeps those chunks.
///
/// Both ends compute it from the manifest and the globs, so it never travels. A selected chunk goes where the chunks
/// before it end: they all have sizes of multiples of 256 bytes, so alignment is kept, and a tensor stays in one piece
/// because all of its chunks are selected. For a selection of everything each place is the one in the payload.
///
/// Costs memory for each run of selected tensors and of selected chunks; nothing more for a selection of everything.
#[derive(Debug, Clone)]
pub struct Selection {
    manifest: Arc<Manifest>,
    tensors: RangeSet,
    chunks: RangeSet,
    /// For each run of chunks, the bytes of the payload before it that are left out.
    left_out: Box<[u64]>,
    payload_bytes: u64,
}

impl Selection {
    /// The most globs with wildcards in one selection; those without cost a look-up and are not counted. Each is held
    /// against every name, so this bounds the work that one message asks for.
    pub const WILDCARDS_MAX: usize = 64;

    /// Takes every tensor.
    pub fn all(manifest: Arc<Manifest>) -> Self {
        let tensors = RangeSet::from_range(0..manifest.tensors().len() as u32);
        let chunks = RangeSet::from_range(0..manifest.chunking().count());
        Self::placed(manifest, tensors, chunks)
    }

    /// Takes the tensors whose name matches one of `globs`, and those that share their bytes (tied weights are one
    /// tensor with several names). No glob at all takes every tensor, as a `Subscribe` without a selection does.
    ///
    /// Costs one match for every tensor and glob with wildcards.
    pub fn new(manifest: Arc<Manifest>, globs: &[Glob]) -> Self {
        if globs.is_empty() {
            return Self::all(manifest);
        }
        let tensors = with_aliases(&manifest, named(&manifest, globs));
        let chunks = tensors
            .iter()
            .filter_map(|index| chunks_of(&manifest, index as usize))
            .collect();
        Self::placed(manifest, tensors, chunks)
    }

    fn placed(manifest: Arc<Manifest>, tensors: RangeSet, chunks: RangeSet) -> Self {
        let mut payload_bytes = 0;
        let mut left_out = Vec::with_capacity(chunks.ranges().len());
        for run in chunks.ranges() {
            let bytes = run_bytes(manifest.chunking(), run);
            left_out.push(bytes.start - payload_bytes);
            payload_bytes += bytes.end - bytes.start;
        }
        Self { manifest, tensors, chunks, left_out: left_out.into(), payload_bytes }
    }

    /// What is selected from.
    pub fn manifest(&self) -> &Arc<Manifest> {
        &self.manifest
    }

    /// The indexes of the selected tensors in [`Manifest::tensors`].
    pub fn tensors(&self) -> &RangeSet {
        &self.tensors
    }

    /// The chunks that hold a byte of a selected tensor. A small tensor that was not selected may lie among them.
    pub fn chunks(&self) -> &RangeSet {
        &self.chunks
    }

    /// The memory that a receiver of the selected chunks needs.
    pub fn payload_bytes(&self) -> u64 {
        self.payload_bytes
    }

    /// Where the raw bytes of `chunk` go in that memory; `None` when it is not selected.
    pub fn place(&self, chunk: ChunkIndex) -> Option<Range<u64>> {
        let left_out = self.left_out_before(chunk.0)?;
        let bytes = self.manifest.chunking().range(chunk)?;
        Some(bytes.start - left_out..bytes.end - left_out)
    }

    /// Where the bytes of the tensor with this index lie in that memory; `None` when it is not selected.
    pub fn tensor_range(&self, index: usize) -> Option<Range<u64>> {
        let number = u32::try_from(index).ok().filter(|number| self.tensors.contains(*number))?;
        let Some(chunks) = chunks_of(&self.manifest, number as usize) else {
            return Some(0..0);
        };
        let left_out = self.left_out_before(chunks.start)?;
        let bytes = self.manifest.tensors()[index].range();
        Some(bytes.start - left_out..bytes.end - left_out)
    }

    /// The bytes of the payload before `chunk` that are left out; `None` when `chunk` is.
    fn left_out_before(&self, chunk: u32) -> Option<u64> {
        let runs = self.chunks.ranges();
        let at = runs.partition_point(|run| run.end <= chunk);
        runs.get(at).filter(|run| run.contains(&chunk)).map(|_| self.left_out[at])
    }
}

/// The tensors whose own name matches.
fn named(manifest: &Manifest, globs: &[Glob]) -> RangeSet {
    let literals: HashSet<&str> = globs.iter().filter(|glob| glob.is_literal()).map(Glob::as_str).collect();
    let patterns: Vec<&Glob> = globs.iter().filter(|glob| !glob.is_literal()).collect();
    let matches = |name: &str| literals.contains(name) || patterns.iter().any(|glob| glob.matches(name));
    indexes(manifest, |index| matches(manifest.tensors()[index].name.as_str()))
}

/// Adds the tensors that share bytes with one of `tensors`. Tensors with bytes share all of them or none.
fn with_aliases(manifest: &Manifest, tensors: RangeSet) -> RangeSet {
    let range = |index: usize| manifest.tensors()[index].range();
    let taken: HashSet<Range<u64>> = tensors
        .iter()
        .map(|index| range(index as usize))
        .filter(|range| !range.is_empty())
        .collect();
    indexes(manifest, |index| tensors.contains(index as u32) || taken.contains(&range(index)))
}

fn indexes(manifest: &Manifest, mut takes: impl FnMut(usize) -> bool) -> RangeSet {
    let all = 0..manifest.tensors().len();
    all.filter(|index| takes(*index))
        .map(|index| index as u32..index as u32 + 1)
        .collect()
}

/// The chunks that hold the tensor with this index; `None` when it has no bytes.
fn chunks_of(manifest: &Manifest, index: usize) -> Option<Range<u32>> {
    let bytes = manifest.tensors()[index].range();
    let last = bytes.end.checked_sub(1).filter(|last| *last >= bytes.start)?;
    Some(chunk_at(manifest.chunking(), bytes.start)..chunk_at(manifest.chunking(), last) + 1)
}

/// The chunk that holds a byte of the payload.
fn chunk_at(chunking: &Chunking, byte: u64) -> u32 {
    let (mut low, mut high) = (0, chunking.count());
    while low < high {
        let middle = low + (high - low) / 2;
        match chunking.range(ChunkIndex(middle)).is_some_and(|range| range.end <= byte) {
            true => low = middle + 1,
            false => high = middle,
        }
    }
    low
}

/// The payload bytes of a run of chunks, which lie end to end.
fn run_bytes(chunking: &Chunking, run: &Range<u32>) -> Range<u64> {
    let first = chunking.range(ChunkIndex(run.start));
    let last = chunking.range(ChunkIndex(run.end - 1));
    first.zip(last).map_or(0..0, |(first, last)| first.start..last.end)
}
