//! The manifest: the tensors of a snapshot and their places (PROTOCOL.md §5).

mod layout;
mod wire;

use crate::{ChunkIndex, Chunking, Dtype, Limits, ManifestDigest, Shape, Shard, TensorName};
use bytes::Bytes;
use std::{collections::HashMap, ops::Range};

pub use layout::{LayoutError, PAYLOAD_ALIGNMENT, TensorSpec};
pub use wire::ManifestError;

/// The tensors of a snapshot, their places in the payload, and the chunks that the payload is cut into.
///
/// It rarely changes between versions, so it is identified by digest and sent once. A manifest that exists is valid:
/// names are unique, every tensor lies inside the payload, none overlap except exact aliases, and the chunks are known.
/// Costs about 150 bytes a tensor.
#[derive(Debug, Clone)]
pub struct Manifest {
    tensors: Vec<Tensor>,
    by_name: HashMap<TensorName, usize>,
    metadata: Vec<(String, String)>,
    payload_bytes: u64,
    chunk_bytes: u32,
    chunking: Chunking,
    encoded: Bytes,
    digest: ManifestDigest,
}

/// One tensor of a manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// Its name, unique within the manifest.
    pub name: TensorName,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its dimensions.
    pub shape: Shape,
    /// Its place in a larger tensor that several ranks hold together.
    pub shard: Option<Shard>,
    offset: u64,
    bytes: u64,
}

impl Tensor {
    /// The tensor's bytes in the payload. Two tensors with the same range are aliases (tied weights).
    pub fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.bytes
    }

    /// The size of the tensor in bytes.
    pub fn byte_len(&self) -> u64 {
        self.bytes
    }
}

impl Manifest {
    /// Lays `specs` out in a payload and cuts it into chunks of at most `chunk_bytes`.
    ///
    /// # Errors
    /// [`LayoutError`] when a name occurs twice, an alias points nowhere, `chunk_bytes` is not a multiple of 256, or a
    /// bound of `limits` would be broken: what no receiver would accept is refused before it is published.
    pub fn layout(
        specs: Vec<TensorSpec>,
        metadata: Vec<(String, String)>,
        chunk_bytes: u32,
        limits: &Limits,
    ) -> Result<Self, LayoutError> {
        layout::layout(specs, metadata, chunk_bytes, limits)
    }

    /// Reads a manifest that a peer sent.
    ///
    /// # Errors
    /// [`ManifestError`] when the bytes are no manifest, break a rule of PROTOCOL.md §5, or exceed `limits`. Memory
    /// spent before the refusal is bounded by a small multiple of `encoded.len()`.
    pub fn decode(encoded: Bytes, limits: &Limits) -> Result<Self, ManifestError> {
        wire::decode(encoded, limits)
    }

    /// The manifest as it goes on the wire.
    pub fn encoded(&self) -> &Bytes {
        &self.encoded
    }

    /// Its identity: the digest of [`encoded`](Self::encoded).
    pub fn digest(&self) -> ManifestDigest {
        self.digest
    }

    /// The tensors, in the order in which they were published.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The tensor called `name`.
    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        self.tensor_index(name).map(|index| &self.tensors[index])
    }

    /// The index in [`tensors`](Self::tensors) of the tensor called `name`.
    pub fn tensor_index(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    /// The publisher's metadata beyond the tensors, e.g. that of a safetensors file.
    pub fn metadata(&self) -> &[(String, String)] {
        &self.metadata
    }

    /// The size of the payload, alignment padding included.
    pub fn payload_bytes(&self) -> u64 {
        self.payload_bytes
    }

    /// The size at which large tensors are cut.
    pub fn chunk_bytes(&self) -> u32 {
        self.chunk_bytes
    }

    /// The chunks.
    pub fn chunking(&self) -> &Chunking {
        &self.chunking
    }

    /// The bytes and dtype of `chunk`, for indices that came from [`chunking`](Self::chunking) itself.
    ///
    /// # Panics
    /// When there is no such chunk.
    pub fn chunk(&self, chunk: ChunkIndex) -> (Range<u64>, Dtype) {
        let found = self.chunking.range(chunk).zip(self.chunking.dtype(chunk));
        found.unwrap_or_else(|| panic!("chunk {chunk} of {}", self.chunking.count()))
    }
}

impl PartialEq for Manifest {
    fn eq(&self, other: &Self) -> bool {
        self.digest == other.digest
    }
}

impl Eq for Manifest {}
