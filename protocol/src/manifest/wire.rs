//! Manifests as bytes (PROTOCOL.md §5.1): the protobuf message `Manifest`, read one tensor at a time.

use super::{Manifest, Tensor, layout};
use crate::{
    Chunking, Dtype, Limits, ManifestDigest, NameError, Shape, ShapeError, Shard, TensorName,
    message::wire::Entry, protobuf::messages,
};
use bytes::{Buf, Bytes};
use prost::{
    Message,
    encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field},
};

/// Why bytes from a peer are not a valid manifest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ManifestError {
    /// The bytes are not this protobuf message.
    #[error("the manifest is malformed: {0}")]
    Malformed(String),
    /// A tensor name that breaks a rule.
    #[error("the manifest contains an invalid tensor name: {0}")]
    Name(#[from] NameError),
    /// A shape that breaks a rule.
    #[error("tensor {name:?} of the manifest has no valid shape: {source}")]
    Shape {
        /// The tensor.
        name: TensorName,
        /// The reason.
        source: ShapeError,
    },
    /// A dtype of a later revision.
    #[error(
        "tensor {name:?} has a dtype with code {code} that this build does not know: update tensor-relay here"
    )]
    UnknownDtype {
        /// The tensor.
        name: TensorName,
        /// The received code.
        code: u32,
    },
    /// Two tensors with one name.
    #[error("the manifest names {0:?} twice")]
    DuplicateName(TensorName),
    /// A tensor whose offset breaks the rules of layout.
    #[error("tensor {0:?} of the manifest overlaps another, lies outside of the payload or is not aligned")]
    Misplaced(TensorName),
    /// A payload size that contradicts the tensors, or a chunk size that is not a multiple of 256.
    #[error("the manifest states a {what} size of {stated} bytes where {computed} would be valid")]
    WrongSize {
        /// The size in question: `payload` or `chunk`.
        what: &'static str,
        /// The stated value.
        stated: u64,
        /// A valid value.
        computed: u64,
    },
    /// More tensors, bytes or chunks than this end accepts.
    #[error("the manifest has {found} {what}, and this end accepts at most {max}")]
    TooMuch {
        /// The counted items or bytes.
        what: &'static str,
        /// The number of them, or a lower bound of that number.
        found: u64,
        /// The limit.
        max: u64,
    },
}

const TAG_PAYLOAD_BYTES: u32 = 1;
const TAG_CHUNK_BYTES: u32 = 2;
const TAG_TENSOR: u32 = 3;
const TAG_METADATA: u32 = 4;

messages! {
    WireManifest {
        1 [uint64] payload_bytes: u64,
        2 [uint32] chunk_bytes: u32,
        3 [message, repeated] tensors: Vec<WireTensor>,
        4 [message, repeated] metadata: Vec<Entry>,
    }

    WireTensor {
        1 [string] name: String,
        2 [uint32] dtype: u32,
        3 [uint64, repeated] shape: Vec<u64>,
        4 [uint64] offset: u64,
        5 [message, optional] shard: Option<WireShard>,
    }

    WireShard {
        1 [uint64, repeated] global_shape: Vec<u64>,
        2 [uint64, repeated] start: Vec<u64>,
    }
}

pub(super) fn encode(
    tensors: &[Tensor],
    metadata: &[(String, String)],
    payload_bytes: u64,
    chunk_bytes: u32,
) -> Bytes {
    let message = WireManifest {
        payload_bytes,
        chunk_bytes,
        tensors: tensors.iter().map(to_wire).collect(),
        metadata: metadata.iter().map(Into::into).collect(),
    };
    message.encode_to_vec().into()
}

fn to_wire(tensor: &Tensor) -> WireTensor {
    WireTensor {
        name: tensor.name.as_str().into(),
        dtype: tensor.dtype.code(),
        shape: tensor.shape.dimensions().into(),
        offset: tensor.offset,
        shard: tensor.shard.as_ref().map(|shard| WireShard {
            global_shape: shard.global_shape.dimensions().into(),
            start: shard.start.to_vec(),
        }),
    }
}

pub(super) fn decode(encoded: Bytes, limits: &Limits) -> Result<Manifest, ManifestError> {
    check_at_most("bytes", encoded.len() as u64, limits.manifest_bytes.into())?;
    let Fields { payload_bytes, chunk_bytes, tensors, metadata } = read_fields(encoded.clone(), limits)?;
    check_at_most("bytes of payload", payload_bytes, limits.payload_bytes)?;
    check_at_most("bytes in a chunk", chunk_bytes.into(), limits.chunk_bytes.into())?;
    if chunk_bytes == 0 || u64::from(chunk_bytes) != layout::aligned(chunk_bytes.into()) {
        let computed = layout::aligned(u64::from(chunk_bytes).max(1));
        return Err(ManifestError::WrongSize { what: "chunk", stated: chunk_bytes.into(), computed });
    }
    let extents = check_places(&tensors, payload_bytes)?;
    let chunking = Chunking::new(extents.into_iter(), chunk_bytes, payload_bytes, limits.chunks)
        .ok_or_else(|| too_many_chunks(payload_bytes, chunk_bytes, limits))?;
    let by_name = layout::index_by_name(&tensors).map_err(ManifestError::DuplicateName)?;
    let digest = ManifestDigest::of(&encoded);
    Ok(Manifest { tensors, by_name, metadata, payload_bytes, chunk_bytes, chunking, encoded, digest })
}

fn check_at_most(what: &'static str, found: u64, max: u64) -> Result<(), ManifestError> {
    if found > max { Err(ManifestError::TooMuch { what, found, max }) } else { Ok(()) }
}

fn too_many_chunks(payload_bytes: u64, chunk_bytes: u32, limits: &Limits) -> ManifestError {
    let found = payload_bytes.div_ceil(chunk_bytes.into()).max(limits.chunks as u64 + 1);
    ManifestError::TooMuch { what: "chunks", found, max: limits.chunks as u64 }
}

/// The distinct extents of all tensors, after a check that they lie end to end with only alignment between them, and
/// fill the payload. So a hostile manifest cannot hide bytes or make two tensors overlap in part.
fn check_places(tensors: &[Tensor], payload_bytes: u64) -> Result<Vec<crate::chunk::Extent>, ManifestError> {
    let outside = |t: &&Tensor| t.offset.checked_add(t.bytes).is_none_or(|end| end > payload_bytes);
    if let Some(tensor) = tensors.iter().find(outside) {
        return Err(ManifestError::Misplaced(tensor.name.clone()));
    }
    let (extents, computed) = layout::stored_extents(tensors);
    let mut end = 0;
    for extent in &extents {
        if extent.offset != end {
            let misplaced = tensors.iter().find(|t| t.offset == extent.offset && t.bytes == extent.bytes);
            return Err(ManifestError::Misplaced(misplaced.unwrap_or(&tensors[0]).name.clone()));
        }
        end += layout::aligned(extent.bytes);
    }
    if computed != payload_bytes {
        return Err(ManifestError::WrongSize { what: "payload", stated: payload_bytes, computed });
    }
    Ok(extents)
}

#[derive(Default)]
struct Fields {
    payload_bytes: u64,
    chunk_bytes: u32,
    tensors: Vec<Tensor>,
    metadata: Vec<(String, String)>,
}

/// Reads the message field by field and checks each tensor before the next. Decoding the whole message first would
/// allocate a hundred bytes for each empty tensor message, for which a hostile peer sends two bytes.
fn read_fields(mut buf: Bytes, limits: &Limits) -> Result<Fields, ManifestError> {
    let mut fields = Fields::default();
    while buf.has_remaining() {
        let (tag, wire_type) = decode_key(&mut buf).map_err(malformed)?;
        match (tag, wire_type) {
            (TAG_PAYLOAD_BYTES, WireType::Varint) => {
                fields.payload_bytes = decode_varint(&mut buf).map_err(malformed)?;
            }
            (TAG_CHUNK_BYTES, WireType::Varint) => {
                let value = decode_varint(&mut buf).map_err(malformed)?;
                fields.chunk_bytes = u32::try_from(value).unwrap_or(u32::MAX);
            }
            (TAG_TENSOR, WireType::LengthDelimited) => {
                check_at_most("tensors", fields.tensors.len() as u64 + 1, limits.tensors as u64)?;
                let wire = WireTensor::decode(take_field(&mut buf)?).map_err(malformed)?;
                fields.tensors.push(from_wire(wire)?);
            }
            (TAG_METADATA, WireType::LengthDelimited) => {
                check_at_most(
                    "entries of metadata",
                    fields.metadata.len() as u64 + 1,
                    limits.tensors as u64,
                )?;
                let entry = Entry::decode(take_field(&mut buf)?).map_err(malformed)?;
                fields.metadata.push((entry.key, entry.value));
            }
            _ => skip_field(wire_type, tag, &mut buf, DecodeContext::default()).map_err(malformed)?,
        }
    }
    Ok(fields)
}

fn take_field(buf: &mut Bytes) -> Result<Bytes, ManifestError> {
    let bytes = decode_varint(buf).map_err(malformed)?;
    match usize::try_from(bytes).ok().filter(|n| *n <= buf.remaining()) {
        Some(bytes) => Ok(buf.split_to(bytes)),
        None => Err(ManifestError::Malformed("a field is longer than the message".into())),
    }
}

fn from_wire(wire: WireTensor) -> Result<Tensor, ManifestError> {
    let name = TensorName::new(&wire.name)?;
    let bad_shape = |source| ManifestError::Shape { name: name.clone(), source };
    let dtype = Dtype::from_code(wire.dtype)
        .ok_or_else(|| ManifestError::UnknownDtype { name: name.clone(), code: wire.dtype })?;
    let shape = Shape::new(&wire.shape).map_err(bad_shape)?;
    let bytes = shape.byte_len(dtype).map_err(bad_shape)?;
    let shard = match wire.shard {
        Some(shard) => {
            let global = Shape::new(&shard.global_shape).map_err(bad_shape)?;
            Some(Shard::new(&shape, global, &shard.start).map_err(bad_shape)?)
        }
        None => None,
    };
    Ok(Tensor { name, dtype, shape, shard, offset: wire.offset, bytes })
}

fn malformed(error: prost::DecodeError) -> ManifestError {
    ManifestError::Malformed(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn tensor(name: &str, offset: u64, elements: u64) -> WireTensor {
        WireTensor { name: name.into(), dtype: Dtype::U8.code(), shape: vec![elements], offset, shard: None }
    }

    fn read(
        payload_bytes: u64,
        chunk_bytes: u32,
        tensors: Vec<WireTensor>,
    ) -> Result<Manifest, ManifestError> {
        let message = WireManifest { payload_bytes, chunk_bytes, tensors, metadata: vec![] };
        Manifest::decode(message.encode_to_vec().into(), &Limits::default())
    }

    #[test]
    fn hostile_offsets_are_refused() {
        assert!(read(512, 256, vec![tensor("a", 0, 200), tensor("b", 256, 1)]).is_ok());
        let overlap = read(512, 256, vec![tensor("a", 0, 300), tensor("b", 256, 1)]);
        assert!(matches!(overlap, Err(ManifestError::Misplaced(_))), "{overlap:?}");
        let gap = read(768, 256, vec![tensor("a", 0, 1), tensor("b", 512, 1)]);
        assert!(matches!(gap, Err(ManifestError::Misplaced(_))), "{gap:?}");
        let outside = read(256, 256, vec![tensor("a", u64::MAX - 3, 10)]);
        assert!(matches!(outside, Err(ManifestError::Misplaced(_))), "{outside:?}");
        let hidden = read(1024, 256, vec![tensor("a", 0, 1)]);
        assert!(matches!(hidden, Err(ManifestError::WrongSize { .. })), "{hidden:?}");
        let same_place_other_size = read(256, 256, vec![tensor("a", 0, 5), tensor("b", 0, 6)]);
        assert!(same_place_other_size.is_err());
    }

    #[test]
    fn hostile_sizes_are_refused() {
        let huge = read(1 << 62, 256, vec![tensor("a", 0, 1 << 62)]);
        assert!(matches!(huge, Err(ManifestError::TooMuch { .. })), "{huge:?}");
        let many_chunks = read(1 << 39, 256, vec![tensor("a", 0, 1 << 39)]);
        assert!(matches!(many_chunks, Err(ManifestError::TooMuch { what: "chunks", .. })), "{many_chunks:?}");
        assert!(matches!(read(0, 0, vec![]), Err(ManifestError::WrongSize { .. })));
        assert!(matches!(read(0, 100, vec![]), Err(ManifestError::WrongSize { .. })));
        let twice = read(512, 256, vec![tensor("a", 0, 1), tensor("a", 256, 1)]);
        assert!(matches!(twice, Err(ManifestError::DuplicateName(_))), "{twice:?}");
    }

    /// An empty tensor message has no name, so decoding ends at the first of a million such messages.
    #[test]
    fn the_first_empty_tensor_message_ends_decoding() {
        let bytes = [TAG_TENSOR as u8 * 8 + 2, 0].repeat(1_000_000);
        let limits = Limits::default();
        assert!(matches!(
            Manifest::decode(bytes.into(), &limits),
            Err(ManifestError::Name(NameError::Empty))
        ));
    }

    /// PROTOCOL.md §5.1, golden bytes of revision 1.
    #[test]
    fn golden_manifest() {
        let shape = Shape::new(&[2, 3]).unwrap();
        let spec = crate::TensorSpec::new(TensorName::new("w").unwrap(), Dtype::Bf16, shape);
        let manifest =
            Manifest::layout(vec![spec], vec![("k".into(), "v".into())], 4096, &Limits::default()).unwrap();
        let hex: String = manifest.encoded().iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(hex, "08800210 80201a09 0a017710 1a1a0202 0322060a 016b1201 76".replace(' ', ""));
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let _ = Manifest::decode(bytes.into(), &Limits::default());
        }

        /// A valid manifest with one byte changed: an error, or a manifest that keeps the rules.
        #[test]
        fn a_changed_byte_is_survived(at: prop::sample::Index, value: u8) {
            let tensors = vec![tensor("a", 0, 300), tensor("bb", 512, 1)];
            let message = WireManifest { payload_bytes: 768, chunk_bytes: 256, tensors, metadata: vec![] };
            let mut bytes = message.encode_to_vec();
            let at = at.index(bytes.len());
            bytes[at] = value;
            if let Ok(manifest) = Manifest::decode(bytes.into(), &Limits::default()) {
                for tensor in manifest.tensors() {
                    prop_assert!(tensor.range().end <= manifest.payload_bytes());
                }
            }
        }
    }
}
