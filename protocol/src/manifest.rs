//! The manifest: the tensors of a snapshot and their places (PROTOCOL.md §5).

mod cuts;
mod error;
mod laid;
mod layout;
mod wire;

use crate::{
    Bounds, ChunkIndex, Chunking, Dtype, Feature, Limits, ManifestDigest, Shape, Shard, TensorName,
    chunk::Extent,
};
use bytes::Bytes;
use std::{collections::HashMap, ops::Range};

use laid::Laid;

pub use cuts::{Cuts, CutsError};
pub use error::ManifestError;
pub use layout::{LayoutError, PAYLOAD_ALIGNMENT, TensorSpec};

#[cfg(test)]
pub(crate) use cuts::tests::any_cuts;

/// The tensors of a snapshot, their places in the payload, and the chunks that the payload is cut into.
///
/// A manifest rarely changes between versions, so it is identified by its digest and sent only when it does. Every
/// `Manifest` is valid: names are unique, every tensor lies inside the payload, and tensors do not overlap except exact
/// aliases. Needs about 200 bytes of memory per tensor, and three copies of its name, and 8 bytes per piece.
#[derive(Debug, Clone)]
pub struct Manifest {
    tensors: Vec<Tensor>,
    by_name: HashMap<TensorName, usize>,
    metadata: Vec<(String, String)>,
    payload_bytes: u64,
    chunk_bytes: u32,
    chunking: Chunking,
    /// Whether it is of layout 2.
    in_pieces: bool,
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
    bytes: u64,
    laid: Laid,
}

impl Tensor {
    /// The offset of its first piece in the payload. Two tensors with bytes and one offset are aliases (tied weights),
    /// and share all bytes.
    pub fn offset(&self) -> u64 {
        self.laid.offset(0)
    }

    /// The range of its bytes in the payload, if it is in one piece.
    pub fn range(&self) -> Option<Range<u64>> {
        let (start, is_whole) = (self.offset(), !self.is_in_pieces());
        is_whole.then(|| start..start + self.bytes)
    }

    /// The size of the tensor in bytes.
    pub fn byte_len(&self) -> u64 {
        self.bytes
    }

    /// A box of the tensor, as a shard of it, or of the tensor that it is a shard of.
    pub(crate) fn cut(&self, bounds: &Bounds) -> Self {
        let shape = bounds.shape().expect("a box of this tensor has at most its elements");
        let offset = |dimension: usize| self.shard.as_ref().map_or(0, |shard| shard.start[dimension]);
        let start = bounds.ranges().iter().enumerate().map(|(at, range)| offset(at) + range.start);
        let global_shape = self.shard.as_ref().map_or(&self.shape, |shard| &shard.global_shape).clone();
        let shard = Some(Shard { global_shape, start: start.collect() });
        let bytes = shape.byte_len(self.dtype).expect("a box has at most the bytes of its tensor");
        let laid = Laid::new(Cuts::NONE, &[self.offset()]);
        Self { name: self.name.clone(), dtype: self.dtype, shape, shard, bytes, laid }
    }

    /// Where it is cut into pieces.
    pub fn cuts(&self) -> &Cuts {
        self.laid.cuts()
    }

    /// Whether it is cut.
    pub fn is_in_pieces(&self) -> bool {
        !self.cuts().is_empty()
    }

    /// The pieces in which the tensor lies in the payload, in row-major order. Without cuts, one: the whole tensor.
    pub fn pieces(&self) -> impl Iterator<Item = Piece> {
        (0..self.cuts().pieces()).map(|number| self.piece(number))
    }

    /// The ranges of its pieces in the payload, likewise.
    pub fn ranges(&self) -> impl Iterator<Item = Range<u64>> {
        self.extents().map(|extent| extent.offset..extent.offset + extent.bytes)
    }

    /// The piece with this number.
    pub(crate) fn piece(&self, number: u64) -> Piece {
        let start = self.laid.offset(number);
        let end = start + self.cuts().piece_bytes(number, self.dtype, &self.shape);
        Piece { bounds: self.cuts().piece(number, &self.shape), range: start..end }
    }

    /// Whether another tensor has the same bytes, in the same pieces.
    fn is_tied_to(&self, other: &Self) -> bool {
        let is_alike = !self.is_in_pieces() || self.shape == other.shape;
        !std::ptr::eq(self, other) && self.laid == other.laid && is_alike
    }

    /// The extents of its pieces.
    fn extents(&self) -> impl Iterator<Item = Extent> {
        let Self { dtype, laid, .. } = self;
        (0..self.cuts().pieces()).map(move |number| Extent {
            offset: laid.offset(number),
            bytes: laid.cuts().piece_bytes(number, *dtype, &self.shape),
            dtype: *dtype,
            owner: laid.owner(number),
        })
    }
}

/// A box of a tensor that lies in the payload as a dense array.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// The box.
    pub bounds: Bounds,
    /// Its bytes in the payload.
    pub range: Range<u64>,
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

    /// The feature that an end must have offered to receive this manifest.
    pub fn feature(&self) -> Option<Feature> {
        self.in_pieces.then_some(Feature::Layout2)
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
