//! Chunks: the numbered byte ranges in which a payload is copied, encoded, checked, sent and resumed.

mod chunking;
mod header;

pub(crate) use chunking::Extent;
pub use chunking::{ChunkIndex, Chunking};
pub use header::{ChunkHeader, HEADER_BYTES, ManifestHeader, ProbeHeader, StreamHeader};
