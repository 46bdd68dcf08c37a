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
/// A manifest rarely changes between versions, so it is identified by its digest and sent only when it does. Every
/// `Manifest` is valid: names are unique, every tensor lies inside the payload, and tensors do not overlap except exact
/// aliases. Needs about 200 bytes of memory per tensor, and three copies of its name.
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
    /// The tensor's name, unique within the manifest.
    pub name: TensorName,
    /// The type of the elements.
    pub dtype: Dtype,
    /// The dimensions.
    pub shape: Shape,
    /// The tensor's position in a larger tensor that several ranks hold together.
    pub shard: Option<Shard>,
    offset: u64,
    bytes: u64,
}

impl Tensor {
    /// The range of the tensor's bytes in the payload. Two tensors with the same range, if it is not empty, are aliases
    /// (tied weights).
    pub fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.bytes
    }

    /// The size of the tensor in bytes.
    pub fn byte_len(&self) -> u64 {
        self.bytes
    }
}

impl Manifest {
    /// Lays `specs` out in a payload and cuts the payload into chunks of at most `chunk_bytes`.
    ///
    /// # Errors
    /// [`LayoutError`] when a name occurs twice, an alias is invalid, `chunk_bytes` is not a multiple of 256, or the
    /// snapshot exceeds `limits`, because receivers would refuse it.
    pub fn layout(
        specs: Vec<TensorSpec>,
        metadata: Vec<(String, String)>,
        chunk_bytes: u32,
        limits: &Limits,
    ) -> Result<Self, LayoutError> {
        layout::layout(specs, metadata, chunk_bytes, limits)
    }

    /// Parses a manifest that a peer sent.
    ///
    /// # Errors
    /// [`ManifestError`] when the bytes are not a manifest, break a rule of PROTOCOL.md §5, or exceed `limits`. At most
    /// a small multiple of `encoded.len()` is allocated before that is known.
    pub fn decode(encoded: Bytes, limits: &Limits) -> Result<Self, ManifestError> {
        wire::decode(encoded, limits)
    }

    /// The manifest's bytes on the wire.
    pub fn encoded(&self) -> &Bytes {
        &self.encoded
    }

    /// The manifest's identity: the digest of [`encoded`](Self::encoded).
    pub fn digest(&self) -> ManifestDigest {
        self.digest
    }

    /// The tensors, in the publisher's order, which may differ from that of the payload.
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

    /// The publisher's metadata, e.g. that of a safetensors file.
    pub fn metadata(&self) -> &[(String, String)] {
        &self.metadata
    }

    /// The size of the payload in bytes, alignment padding included.
    pub fn payload_bytes(&self) -> u64 {
        self.payload_bytes
    }

    /// The maximum size of a chunk in bytes; large tensors are cut into chunks of this size.
    pub fn chunk_bytes(&self) -> u32 {
        self.chunk_bytes
    }

    /// The payload's division into chunks.
    pub fn chunking(&self) -> &Chunking {
        &self.chunking
    }

    /// The payload range and dtype of `chunk`, which must exist in [`chunking`](Self::chunking).
    ///
    /// # Panics
    /// When there is no such chunk.
    pub fn chunk(&self, chunk: ChunkIndex) -> (Range<u64>, Dtype) {
        let range_and_dtype = self.chunking.range(chunk).zip(self.chunking.dtype(chunk));
        range_and_dtype.unwrap_or_else(|| panic!("chunk {chunk} of {}", self.chunking.count()))
    }
}

impl PartialEq for Manifest {
    fn eq(&self, other: &Self) -> bool {
        self.digest == other.digest
    }
}

impl Eq for Manifest {}
