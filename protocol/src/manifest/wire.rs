//! Manifests as bytes (PROTOCOL.md §5.1): the protobuf message `Manifest`, read one tensor at a time.

mod pieces;

use super::{Laid, Manifest, ManifestError, Tensor, layout};
use crate::{
    Chunking, Dtype, Limits, ManifestDigest, Shape, Shard, TensorName, chunk::Extent, message::wire,
    protobuf::messages,
};
use bytes::{Buf, Bytes};
use pieces::Pieces;
use prost::{
    Message,
    encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field},
};

const TAG_PAYLOAD_BYTES: u32 = 1;
const TAG_CHUNK_BYTES: u32 = 2;
const TAG_TENSOR: u32 = 3;
const TAG_METADATA: u32 = 4;
const TAG_LAYOUT: u32 = 5;
const TAG_OWNERS: u32 = 6;

messages! {
    WireManifest {
        1 [uint64] payload_bytes: u64,
        2 [uint32] chunk_bytes: u32,
        3 [message, repeated] tensors: Vec<WireTensor>,
        4 [message, repeated] metadata: Vec<wire::Entry>,
        5 [uint32] layout: u32,
        6 [uint32] owners: u32,
    }

    WireTensor {
        1 [string] name: String,
        2 [uint32] dtype: u32,
        3 [uint64, repeated] shape: Vec<u64>,
        4 [uint64] offset: u64,
        5 [message, optional] shard: Option<WireShard>,
        6 [uint32, repeated] cut_dimensions: Vec<u32>,
        7 [uint64, repeated] offsets: Vec<u64>,
        8 [uint32, repeated] owners: Vec<u32>,
        9 [uint64, repeated] cut_points: Vec<u64>,
    }

    WireShard {
        1 [uint64, repeated] global_shape: Vec<u64>,
        2 [uint64, repeated] start: Vec<u64>,
    }
}

/// Encodes a manifest of one owner: in layout 2 if some tensor is in pieces, else in layout 1.
pub(super) fn encode(
    tensors: &[Tensor],
    metadata: &[(String, String)],
    payload_bytes: u64,
    chunk_bytes: u32,
    in_pieces: bool,
) -> Bytes {
    let message = WireManifest {
        payload_bytes,
        chunk_bytes,
        tensors: tensors.iter().map(|tensor| to_wire(tensor, in_pieces)).collect(),
        metadata: metadata.iter().map(Into::into).collect(),
        layout: if in_pieces { 2 } else { 0 },
        owners: 0,
    };
    message.encode_to_vec().into()
}

fn to_wire(tensor: &Tensor, in_pieces: bool) -> WireTensor {
    let wire = WireTensor {
        name: tensor.name.as_str().into(),
        dtype: tensor.dtype.code(),
        shape: tensor.shape.dimensions().into(),
        shard: tensor.shard.as_ref().map(|shard| WireShard {
            global_shape: shard.global_shape.dimensions().into(),
            start: shard.start.to_vec(),
        }),
        ..WireTensor::default()
    };
    let (cut_dimensions, cut_points) = tensor.cuts().points().unzip();
    let offsets = || tensor.extents().map(|extent| extent.offset).collect();
    match in_pieces {
        true => WireTensor { cut_dimensions, cut_points, offsets: offsets(), ..wire },
        false => WireTensor { offset: tensor.offset(), ..wire },
    }
}

pub(super) fn decode(encoded: Bytes, limits: &Limits) -> Result<Manifest, ManifestError> {
    check_at_most("bytes", encoded.len() as u64, limits.manifest_bytes.into())?;
    let fields = read_fields(encoded.clone(), limits)?;
    let in_pieces = fields.pieces.are_used(fields.layout)?;
    let Fields { payload_bytes, chunk_bytes, tensors, metadata, owners, .. } = fields;
    pieces::check_owners(&tensors, owners)?;
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
    Ok(Manifest {
        tensors,
        by_name,
        metadata,
        payload_bytes,
        chunk_bytes,
        chunking,
        in_pieces,
        encoded,
        digest,
    })
}

fn check_at_most(what: &'static str, found: u64, max: u64) -> Result<(), ManifestError> {
    if found > max { Err(ManifestError::TooMuch { what, found, max }) } else { Ok(()) }
}

fn too_many_chunks(payload_bytes: u64, chunk_bytes: u32, limits: &Limits) -> ManifestError {
    let found = payload_bytes.div_ceil(chunk_bytes.into()).max(limits.chunks as u64 + 1);
    ManifestError::TooMuch { what: "chunks", found, max: limits.chunks as u64 }
}

/// The distinct extents of all pieces, after a check that they lie end to end with only alignment between them, those of
/// each owner together, and fill the payload. So a hostile manifest cannot hide bytes or make two pieces overlap in part.
fn check_places(tensors: &[Tensor], payload_bytes: u64) -> Result<Vec<Extent>, ManifestError> {
    let misplaced = |tensor: &Tensor| ManifestError::Misplaced(tensor.name.clone());
    let is_outside = |e: Extent| e.offset.checked_add(e.bytes).is_none_or(|end| end > payload_bytes);
    if let Some(tensor) = tensors.iter().find(|tensor| tensor.extents().any(is_outside)) {
        return Err(misplaced(tensor));
    }
    pieces::check_ties(tensors)?;
    let (extents, computed) = layout::stored_extents(tensors);
    let (mut end, mut owner) = (0, 0);
    for extent in &extents {
        if extent.offset != end || extent.owner < owner {
            let has_it = |tensor: &&Tensor| tensor.extents().any(|other| other == *extent);
            return Err(misplaced(tensors.iter().find(has_it).unwrap_or(&tensors[0])));
        }
        (end, owner) = (end + layout::aligned(extent.bytes), extent.owner);
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
    layout: u32,
    owners: u32,
    pieces: Pieces,
}

impl Fields {
    fn add_tensor(&mut self, wire: WireTensor) -> Result<(), ManifestError> {
        let offsets = self.pieces.count(&wire)?;
        let tensor = from_wire(wire)?;
        self.pieces.note(&tensor.name, offsets);
        self.tensors.push(tensor);
        Ok(())
    }
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
            (TAG_CHUNK_BYTES, WireType::Varint) => fields.chunk_bytes = read_u32(&mut buf)?,
            (TAG_LAYOUT, WireType::Varint) => fields.layout = read_u32(&mut buf)?,
            (TAG_OWNERS, WireType::Varint) => fields.owners = read_u32(&mut buf)?,
            (TAG_TENSOR, WireType::LengthDelimited) => {
                check_at_most("tensors", fields.tensors.len() as u64 + 1, limits.tensors as u64)?;
                fields.add_tensor(WireTensor::decode(take_field(&mut buf)?).map_err(malformed)?)?;
            }
            (TAG_METADATA, WireType::LengthDelimited) => {
                check_at_most(
                    "entries of metadata",
                    fields.metadata.len() as u64 + 1,
                    limits.tensors as u64,
                )?;
                let entry = wire::Entry::decode(take_field(&mut buf)?).map_err(malformed)?;
                fields.metadata.push((entry.key, entry.value));
            }
            _ => skip_field(wire_type, tag, &mut buf, DecodeContext::default()).map_err(malformed)?,
        }
    }
    Ok(fields)
}

/// A number, or the largest one instead of larger ones, which no field permits.
fn read_u32(buf: &mut Bytes) -> Result<u32, ManifestError> {
    let value = decode_varint(buf).map_err(malformed)?;
    Ok(u32::try_from(value).unwrap_or(u32::MAX))
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
    let shard = match &wire.shard {
        Some(shard) => {
            let global = Shape::new(&shard.global_shape).map_err(bad_shape)?;
            Some(Shard::new(&shape, global, &shard.start).map_err(bad_shape)?)
        }
        None => None,
    };
    let laid = pieces::laid_from_wire(&wire, &name, dtype, &shape)?;
    Ok(Tensor { name, dtype, shape, shard, bytes, laid })
}

fn malformed(error: prost::DecodeError) -> ManifestError {
    ManifestError::Malformed(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::{pieces::tests::in_pieces, *};
    use crate::NameError;
    use proptest::prelude::*;

    pub(super) fn tensor(name: &str, offset: u64, elements: u64) -> WireTensor {
        let (dtype, shape) = (Dtype::U8.code(), vec![elements]);
        WireTensor { name: name.into(), dtype, shape, offset, ..WireTensor::default() }
    }

    pub(super) fn message(payload_bytes: u64, chunk_bytes: u32) -> WireManifest {
        WireManifest { payload_bytes, chunk_bytes, ..WireManifest::default() }
    }

    pub(super) fn read(
        payload_bytes: u64,
        chunk_bytes: u32,
        tensors: Vec<WireTensor>,
    ) -> Result<Manifest, ManifestError> {
        let message = WireManifest { tensors, ..message(payload_bytes, chunk_bytes) };
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

        /// A valid manifest of either layout with one byte changed: an error, or a manifest that keeps the rules.
        #[test]
        fn a_changed_byte_is_survived(at: prop::sample::Index, value: u8, is_cut: bool) {
            let cut = in_pieces("c", [0, 256, 512], &[0, 0, 1]);
            let tensors = if is_cut { vec![cut] } else { vec![tensor("a", 0, 300), tensor("bb", 512, 1)] };
            let (layout, owners) = if is_cut { (2, 2) } else { (0, 0) };
            let message = WireManifest { tensors, layout, owners, ..message(768, 256) };
            let mut bytes = message.encode_to_vec();
            let at = at.index(bytes.len());
            bytes[at] = value;
            if let Ok(manifest) = Manifest::decode(bytes.into(), &Limits::default()) {
                let mut ranges = manifest.tensors().iter().flat_map(Tensor::ranges);
                prop_assert!(ranges.all(|range| range.end <= manifest.payload_bytes()));
            }
        }
    }
}
