//! Chunking: the division of a manifest's payload into numbered chunks (PROTOCOL.md §5.3).

use crate::Dtype;
use std::{fmt, ops::Range};

/// The number of a chunk within its version, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkIndex(pub u32);

impl fmt::Display for ChunkIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// The division of a payload into chunks. Both ends compute it from the manifest, so it is never sent.
///
/// A tensor, or a piece of one, of at least `chunk_bytes` starts a chunk of its own and is cut every `chunk_bytes`;
/// smaller ones of one dtype share chunks. So ten thousand small tensors travel in a few chunks, a chunk never mixes
/// dtypes (codecs rely on this), and a selected small tensor shares no chunk with a large one. The chunks lie end to
/// end and cover the payload, padding included; none is longer than `chunk_bytes`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunking {
    starts: Vec<Start>,
    payload_bytes: u64,
}

/// The beginning of a chunk, which ends where the next one begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Start {
    offset: u64,
    dtype: Dtype,
    /// The first chunk of the large tensor that this chunk belongs to; the chunk itself if it consists of small
    /// tensors.
    first: ChunkIndex,
}

/// The bytes that one stored piece of a tensor occupies in the payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    pub(crate) dtype: Dtype,
    /// Which of the version's writers has it.
    pub(crate) owner: u32,
}

impl Chunking {
    /// Cuts a payload whose stored pieces with bytes are `extents`, in order of offset.
    ///
    /// `None` if more than `chunks_max` chunks would result; no memory is allocated for more.
    pub(crate) fn new(
        extents: impl Iterator<Item = Extent>,
        chunk_bytes: u32,
        payload_bytes: u64,
        chunks_max: usize,
    ) -> Option<Self> {
        let chunk_bytes = u64::from(chunk_bytes);
        let mut starts: Vec<Start> = Vec::new();
        let mut shared: Option<Extent> = None;
        for extent in extents {
            let Extent { offset, bytes, dtype, owner } = extent;
            let large = bytes >= chunk_bytes;
            let fits = |open: Extent| {
                (open.dtype, open.owner) == (dtype, owner) && offset + bytes - open.offset <= chunk_bytes
            };
            if !large && shared.is_some_and(fits) {
                continue;
            }
            let cuts = if large { bytes.div_ceil(chunk_bytes) } else { 1 };
            if starts.len() as u64 + cuts > chunks_max as u64 {
                return None;
            }
            let start = Start { offset, dtype, first: ChunkIndex(starts.len() as u32) };
            starts.extend((0..cuts).map(|i| Start { offset: offset + i * chunk_bytes, ..start }));
            shared = (!large).then_some(extent);
        }
        Some(Self { starts, payload_bytes })
    }

    /// The number of chunks: 0 for a payload without bytes.
    pub fn count(&self) -> u32 {
        self.starts.len() as u32
    }

    /// The byte range of `chunk` in the payload, or `None` if there is no such chunk.
    pub fn range(&self, chunk: ChunkIndex) -> Option<Range<u64>> {
        let index = chunk.0 as usize;
        let start = self.starts.get(index)?.offset;
        let end = self.starts.get(index + 1).map_or(self.payload_bytes, |next| next.offset);
        Some(start..end)
    }

    /// The dtype of all tensors in `chunk`, or `None` if there is no such chunk.
    pub fn dtype(&self, chunk: ChunkIndex) -> Option<Dtype> {
        self.starts.get(chunk.0 as usize).map(|s| s.dtype)
    }

    /// The first chunk of the large tensor that `chunk` belongs to, or `chunk` itself if it consists of small tensors.
    /// `None` if there is no such chunk.
    pub fn first_of(&self, chunk: ChunkIndex) -> Option<ChunkIndex> {
        self.starts.get(chunk.0 as usize).map(|s| s.first)
    }

    /// Every chunk in order, with its byte range in the payload.
    pub fn iter(&self) -> impl Iterator<Item = (ChunkIndex, Range<u64>)> + '_ {
        (0..self.count())
            .map(ChunkIndex)
            .filter_map(|chunk| Some((chunk, self.range(chunk)?)))
    }
}
