//! The layout of tensors in the payload (PROTOCOL.md §5.2).

use super::{Cuts, CutsError, Laid, Manifest, Tensor, cuts::PIECES_MAX, wire};
use crate::{Chunking, Dtype, Limits, ManifestDigest, Shape, ShapeError, Shard, TensorName, chunk::Extent};
use std::collections::{HashMap, HashSet};

/// The alignment of tensors in the payload, in bytes: enough for any framework and any GPU to use a tensor without a
/// copy.
pub const PAYLOAD_ALIGNMENT: u64 = 256;

/// A tensor to be laid out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// The tensor's name, unique within the manifest.
    pub name: TensorName,
    /// The type of the elements.
    pub dtype: Dtype,
    /// The dimensions.
    pub shape: Shape,
    /// The tensor's position in a larger tensor.
    pub shard: Option<Shard>,
    /// The index of an earlier spec whose bytes this tensor shares: tied weights are stored and sent once.
    pub alias_of: Option<usize>,
    /// Where it is cut into pieces. An alias has the cuts of the tensor whose bytes it shares, and its own do not count.
    pub cuts: Cuts,
}

impl TensorSpec {
    /// A tensor that is neither a shard nor an alias, in one piece.
    pub fn new(name: TensorName, dtype: Dtype, shape: Shape) -> Self {
        Self { name, dtype, shape, shard: None, alias_of: None, cuts: Cuts::NONE }
    }
}

/// Why tensors cannot be laid out together. The fault is the publisher's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// Two tensors with one name.
    #[error("the name {0:?} occurs twice in one snapshot: rename one of the two tensors")]
    DuplicateName(TensorName),
    /// An alias whose target is not an earlier tensor of the same dtype and size, or is itself an alias.
    #[error("tensor {0:?} is declared an alias, but not of an earlier tensor of the same dtype and size")]
    BadAlias(TensorName),
    /// An alias of a tensor in pieces that has another shape.
    #[error(
        "tensor {0:?} shares the bytes of one that is cut into pieces, but has another shape: cut neither"
    )]
    AliasInPieces(TensorName),
    /// A tensor that cannot be cut as it should.
    #[error("tensor {name:?} cannot be cut into pieces: {source}")]
    Cuts {
        /// The tensor.
        name: TensorName,
        /// The reason.
        source: CutsError,
    },
    /// A chunk size that is not allowed.
    #[error("a chunk size of {chunk_bytes} bytes is not allowed: choose a multiple of 256 up to {max}")]
    BadChunkSize {
        /// The requested size.
        chunk_bytes: u32,
        /// The largest chunk size that receivers accept.
        max: u32,
    },
    /// A tensor whose size overflows.
    #[error("tensor {name:?} is too large")]
    Shape {
        /// The tensor.
        name: TensorName,
        /// The reason.
        source: ShapeError,
    },
    /// More tensors, bytes or chunks than receivers accept.
    #[error("the snapshot has {found} {what}, and receivers accept at most {max}: publish it in parts")]
    TooMuch {
        /// The counted items or bytes.
        what: &'static str,
        /// The number of them, or a lower bound of that number.
        found: u64,
        /// The limit.
        max: u64,
    },
}

pub(super) fn layout(
    specs: Vec<TensorSpec>,
    metadata: Vec<(String, String)>,
    chunk_bytes: u32,
    limits: &Limits,
) -> Result<Manifest, LayoutError> {
    check_chunk_size(chunk_bytes, limits)?;
    check_at_most("tensors", specs.len() as u64, limits.tensors as u64)?;
    check_at_most("entries of metadata", metadata.len() as u64, limits.tensors as u64)?;
    let tensors = place(specs, u64::from(chunk_bytes))?;
    let (extents, payload_bytes) = stored_extents(&tensors);
    check_at_most("bytes", payload_bytes, limits.payload_bytes)?;
    let chunks = || payload_bytes.div_ceil(u64::from(chunk_bytes)).max(limits.chunks as u64 + 1);
    let chunking = Chunking::new(extents.into_iter(), chunk_bytes, payload_bytes, limits.chunks)
        .ok_or_else(|| LayoutError::TooMuch { what: "chunks", found: chunks(), max: limits.chunks as u64 })?;
    let in_pieces = tensors.iter().any(Tensor::is_in_pieces);
    let encoded = wire::encode(&tensors, &metadata, payload_bytes, chunk_bytes, in_pieces);
    check_at_most("bytes of manifest", encoded.len() as u64, limits.manifest_bytes.into())?;
    let by_name = tensors.iter().enumerate().map(|(i, t)| (t.name.clone(), i)).collect();
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

fn check_chunk_size(chunk_bytes: u32, limits: &Limits) -> Result<(), LayoutError> {
    let aligned = chunk_bytes != 0 && u64::from(chunk_bytes).is_multiple_of(PAYLOAD_ALIGNMENT);
    match aligned && chunk_bytes <= limits.chunk_bytes {
        true => Ok(()),
        false => Err(LayoutError::BadChunkSize { chunk_bytes, max: limits.chunk_bytes }),
    }
}

fn check_at_most(what: &'static str, found: u64, max: u64) -> Result<(), LayoutError> {
    if found > max { Err(LayoutError::TooMuch { what, found, max }) } else { Ok(()) }
}

/// Computes every tensor's place, and returns the tensors in the order of `specs`. In the payload they are ordered by
/// dtype, within a dtype by [`Position`], then as in `specs`. So small tensors of a dtype are adjacent and can share
/// chunks, and so are small pieces that one reader wants of several tensors.
fn place(specs: Vec<TensorSpec>, chunk_bytes: u64) -> Result<Vec<Tensor>, LayoutError> {
    let sizes = sizes_of(&specs)?;
    check_names(&specs)?;
    let stored = stored_pieces(&specs, &sizes)?;
    let places = lay_end_to_end(&specs, &stored, chunk_bytes)?;
    let mut laid: Vec<Laid> = vec![];
    for (index, spec) in specs.iter().enumerate() {
        laid.push(match spec.alias_of {
            Some(target) => check_alias(&specs, &sizes, index, target).map(|()| laid[target].clone())?,
            None => {
                let first = stored.partition_point(|piece| piece.spec < index);
                let pieces = first..stored.partition_point(|piece| piece.spec <= index);
                Laid::new(spec.cuts.clone(), &places[pieces])
            }
        });
    }
    let placed = specs.into_iter().zip(sizes).zip(laid);
    Ok(placed
        .map(|((spec, bytes), laid)| {
            let TensorSpec { name, dtype, shape, shard, .. } = spec;
            Tensor { name, dtype, shape, shard, bytes, laid }
        })
        .collect())
}

/// A piece to be laid out.
struct Stored {
    spec: usize,
    number: u64,
    bytes: u64,
}

/// The pieces of all tensors but aliases, in the order of `specs`.
fn stored_pieces(specs: &[TensorSpec], sizes: &[u64]) -> Result<Vec<Stored>, LayoutError> {
    let mut stored = Vec::with_capacity(specs.len());
    for (index, (spec, bytes)) in specs.iter().zip(sizes).enumerate() {
        let cuts = |source| LayoutError::Cuts { name: spec.name.clone(), source };
        match spec.cuts.is_empty() {
            _ if spec.alias_of.is_some() => {}
            true => stored.push(Stored { spec: index, number: 0, bytes: *bytes }),
            false => {
                spec.cuts.check(spec.dtype, &spec.shape).map_err(cuts)?;
                check_at_most(
                    "pieces",
                    (stored.len() as u64).saturating_add(spec.cuts.pieces()),
                    PIECES_MAX,
                )?;
                let bytes = |number| spec.cuts.piece_bytes(number, spec.dtype, &spec.shape);
                let pieces = 0..spec.cuts.pieces();
                stored.extend(pieces.map(|number| Stored { spec: index, number, bytes: bytes(number) }));
            }
        }
    }
    Ok(stored)
}

/// The offset of each piece.
fn lay_end_to_end(
    specs: &[TensorSpec],
    stored: &[Stored],
    chunk_bytes: u64,
) -> Result<Vec<u64>, LayoutError> {
    let positions = positions(specs, stored, chunk_bytes);
    let mut order: Vec<usize> = (0..stored.len()).collect();
    order.sort_by_key(|at| positions[*at]);
    let mut offsets = vec![0; stored.len()];
    let mut end = 0u64;
    for at in order {
        offsets[at] = end;
        end = end.checked_add(aligned(stored[at].bytes)).ok_or(LayoutError::TooMuch {
            what: "bytes",
            found: u64::MAX,
            max: i64::MAX as u64,
        })?;
    }
    Ok(offsets)
}

/// The position of a piece in the payload, relative to others of its dtype.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Position {
    /// A piece of a tensor with pieces of a chunk or more. Those of one tensor lie together.
    Large { spec: usize, piece: u64 },
    /// A smaller tensor in one piece.
    Small,
    /// A piece of a tensor in smaller pieces. Of the tensors of a group, the pieces with one number, which one reader
    /// wants, lie together and fill about a chunk; and no tensor is spread further than over its group.
    InGroup { group: usize, piece: u64 },
}

/// The position of each piece, after its dtype.
fn positions(specs: &[TensorSpec], stored: &[Stored], chunk_bytes: u64) -> Vec<(u32, Position)> {
    let mut positions = Vec::with_capacity(stored.len());
    let mut groups: HashMap<Dtype, (usize, u64)> = HashMap::new();
    for pieces in stored.chunk_by(|one, next| one.spec == next.spec) {
        let (spec, dtype) = (pieces[0].spec, specs[pieces[0].spec].dtype);
        let largest = pieces.iter().map(|piece| piece.bytes).max().unwrap_or(0);
        let is_in_group = largest < chunk_bytes && pieces.len() > 1;
        let group = match is_in_group {
            true => next_group(groups.entry(dtype).or_default(), aligned(largest), chunk_bytes),
            false => 0,
        };
        let position = |piece: u64| match is_in_group {
            true => Position::InGroup { group, piece },
            false if largest < chunk_bytes => Position::Small,
            false => Position::Large { spec, piece },
        };
        positions.extend(pieces.iter().map(|piece| (dtype.code(), position(piece.number))));
    }
    positions
}

/// The group of a tensor whose largest piece has this size: the last one, while its pieces with one number fit a chunk.
fn next_group((group, filled_bytes): &mut (usize, u64), piece_bytes: u64, chunk_bytes: u64) -> usize {
    *filled_bytes += piece_bytes;
    if *filled_bytes > chunk_bytes {
        (*group, *filled_bytes) = (*group + 1, piece_bytes);
    }
    *group
}

fn sizes_of(specs: &[TensorSpec]) -> Result<Vec<u64>, LayoutError> {
    let size = |spec: &TensorSpec| {
        let bytes = spec.shape.byte_len(spec.dtype);
        bytes.map_err(|source| LayoutError::Shape { name: spec.name.clone(), source })
    };
    specs.iter().map(size).collect()
}

fn check_names(specs: &[TensorSpec]) -> Result<(), LayoutError> {
    let mut names = HashSet::with_capacity(specs.len());
    match specs.iter().find(|spec| !names.insert(&spec.name)) {
        Some(duplicate) => Err(LayoutError::DuplicateName(duplicate.name.clone())),
        None => Ok(()),
    }
}

/// The target of an alias must be an earlier tensor that is not an alias, of the same dtype and size; if it is in pieces,
/// of the same shape.
fn check_alias(specs: &[TensorSpec], sizes: &[u64], index: usize, target: usize) -> Result<(), LayoutError> {
    let fits = target < index
        && specs[target].alias_of.is_none()
        && specs[target].dtype == specs[index].dtype
        && sizes[target] == sizes[index];
    match fits {
        true if specs[target].cuts.is_empty() || specs[target].shape == specs[index].shape => Ok(()),
        true => Err(LayoutError::AliasInPieces(specs[index].name.clone())),
        false => Err(LayoutError::BadAlias(specs[index].name.clone())),
    }
}

/// The distinct extents of all pieces with bytes, in order of offset, and the payload's size. Tied tensors share their
/// extents.
pub(super) fn stored_extents(tensors: &[Tensor]) -> (Vec<Extent>, u64) {
    let mut extents: Vec<Extent> = tensors
        .iter()
        .flat_map(Tensor::extents)
        .filter(|extent| extent.bytes > 0)
        .collect();
    extents.sort_by_key(|e| e.offset);
    extents.dedup();
    let payload_bytes = extents.last().map_or(0, |e| e.offset + aligned(e.bytes));
    (extents, payload_bytes)
}

/// `bytes` rounded up to the payload's alignment. Sizes fit 63 bits, so this cannot overflow.
pub(super) fn aligned(bytes: u64) -> u64 {
    bytes.next_multiple_of(PAYLOAD_ALIGNMENT)
}

/// The index of each tensor by name, or the first name that occurs twice.
pub(super) fn index_by_name(tensors: &[Tensor]) -> Result<HashMap<TensorName, usize>, TensorName> {
    let mut by_name = HashMap::with_capacity(tensors.len());
    for (index, tensor) in tensors.iter().enumerate() {
        if by_name.insert(tensor.name.clone(), index).is_some() {
            return Err(tensor.name.clone());
        }
    }
    Ok(by_name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ChunkIndex, manifest::any_cuts};
    use proptest::prelude::*;

    fn spec(name: &str, dtype: Dtype, elements: u64) -> TensorSpec {
        TensorSpec::new(TensorName::new(name).unwrap(), dtype, Shape::new(&[elements]).unwrap())
    }

    fn manifest_of(specs: Vec<TensorSpec>, chunk_bytes: u32) -> Manifest {
        Manifest::layout(specs, vec![], chunk_bytes, &Limits::default()).unwrap()
    }

    #[test]
    fn small_tensors_share_chunks_and_large_ones_do_not() {
        let specs = vec![spec("a", Dtype::F32, 10), spec("big", Dtype::F32, 700), spec("b", Dtype::F32, 3)];
        let manifest = manifest_of(specs, 1024);
        let chunks: Vec<_> = manifest.chunking().iter().map(|(_, range)| range).collect();
        assert_eq!(manifest.tensor("big").unwrap().range(), Some(0..2800));
        assert_eq!(chunks, [0..1024, 1024..2048, 2048..2816, 2816..3328]);
        assert_eq!(manifest.tensors()[0].name.as_str(), "a", "the publisher's order is kept");
    }

    #[test]
    fn tied_weights_are_stored_once() {
        let mut tied = spec("lm_head", Dtype::Bf16, 64);
        tied.alias_of = Some(0);
        let manifest = manifest_of(vec![spec("embed", Dtype::Bf16, 64), tied.clone()], 1024);
        assert_eq!(manifest.payload_bytes(), 256);
        assert_eq!(manifest.tensors()[0].range(), manifest.tensors()[1].range());
        let other_dtype = vec![spec("x", Dtype::F32, 64), tied];
        let refused = Manifest::layout(other_dtype, vec![], 1024, &Limits::default());
        assert!(matches!(refused, Err(LayoutError::BadAlias(_))));
    }

    #[test]
    fn what_receivers_would_refuse_is_refused() {
        let limits = Limits { tensors: 2, ..Limits::default() };
        let metadata = |entries: usize| (0..entries).map(|i| (i.to_string(), String::new())).collect();
        let layout = |tensors: usize, entries| {
            let specs = (0..tensors).map(|i| spec(&i.to_string(), Dtype::U8, 1)).collect();
            Manifest::layout(specs, metadata(entries), 1024, &limits)
        };
        let decoded = Manifest::decode(layout(2, 2).unwrap().encoded().clone(), &limits);
        assert_eq!(decoded.unwrap().metadata().len(), 2);
        assert!(matches!(layout(3, 0), Err(LayoutError::TooMuch { what: "tensors", found: 3, max: 2 })));
        assert!(matches!(
            layout(0, 3),
            Err(LayoutError::TooMuch { what: "entries of metadata", found: 3, max: 2 })
        ));
    }

    #[test]
    fn an_empty_snapshot_is_valid() {
        assert_eq!(manifest_of(vec![], 1024).chunking().count(), 0);
        assert_eq!(manifest_of(vec![spec("empty", Dtype::F32, 0)], 1024).payload_bytes(), 0);
    }

    #[test]
    fn invalid_layouts_are_refused() {
        let layout = |specs, chunk| Manifest::layout(specs, vec![], chunk, &Limits::default());
        let twice = vec![spec("a", Dtype::U8, 1), spec("a", Dtype::U8, 1)];
        assert!(matches!(layout(twice, 1024), Err(LayoutError::DuplicateName(_))));
        assert!(matches!(layout(vec![], 0), Err(LayoutError::BadChunkSize { .. })));
        assert!(matches!(layout(vec![], 1000), Err(LayoutError::BadChunkSize { .. })));
        let huge =
            vec![spec("a", Dtype::U8, 1 << 62), spec("b", Dtype::U8, 1 << 62), spec("c", Dtype::U8, 1 << 62)];
        assert!(matches!(layout(huge, 1024), Err(LayoutError::TooMuch { .. })));
    }

    fn any_tensor() -> impl Strategy<Value = (Dtype, Shape, Cuts)> {
        let lengths = prop_oneof![
            4 => prop::collection::vec(prop_oneof![0u64..50, 0u64..5000], 1),
            1 => prop::collection::vec(0u64..24, 2..4),
        ];
        (prop::sample::select(Dtype::ALL), lengths).prop_flat_map(|(dtype, lengths)| {
            let shape = Shape::new(&lengths).unwrap();
            any_cuts(&shape).prop_map(move |cuts| match cuts.check(dtype, &shape) {
                Ok(()) => (dtype, shape.clone(), cuts),
                Err(_) => (dtype, shape.clone(), Cuts::NONE),
            })
        })
    }

    fn any_specs() -> impl Strategy<Value = Vec<TensorSpec>> {
        prop::collection::vec(any_tensor(), 0..40).prop_map(|tensors| {
            let numbered = tensors.into_iter().enumerate();
            let spec = |(i, (dtype, shape, cuts))| {
                let name = TensorName::new(&format!("t{i}")).unwrap();
                TensorSpec { cuts, ..TensorSpec::new(name, dtype, shape) }
            };
            numbered.map(spec).collect()
        })
    }

    /// A tensor of `[2, 4]` bytes, cut between its columns.
    fn in_columns(name: &str) -> TensorSpec {
        let (name, shape) = (TensorName::new(name).unwrap(), Shape::new(&[2, 4]).unwrap());
        TensorSpec { cuts: Cuts::equal(1, 4, 2), ..TensorSpec::new(name, Dtype::U8, shape) }
    }

    /// PROTOCOL.md §5.6: what one of several readers wants of several tensors shares chunks, and no more tensors are laid
    /// out between each other than that needs.
    #[test]
    fn small_pieces_with_one_number_lie_together() {
        let many = (0..6).map(|index| in_columns(&index.to_string())).collect();
        let manifest = manifest_of(many, 512);
        let chunks_of = |tensor: &Tensor| tensor.ranges().map(|range| range.start / 512).collect::<Vec<_>>();
        let chunks: Vec<_> = manifest.tensors().iter().map(chunks_of).collect();
        assert_eq!(chunks, [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5]]);

        let manifest = manifest_of(vec![in_columns("a"), spec("b", Dtype::U8, 9), in_columns("c")], 512);
        let ranges = |name: &str| manifest.tensor(name).unwrap().ranges().collect::<Vec<_>>();
        assert_eq!(ranges("b"), std::slice::from_ref(&(0..9)));
        assert_eq!(ranges("a"), [256..260, 768..772]);
        assert_eq!(ranges("c"), [512..516, 1024..1028]);
        assert_eq!(manifest.feature(), Some(crate::Feature::Layout2));
    }

    #[test]
    fn tied_tensors_share_their_pieces() {
        let tied = TensorSpec { alias_of: Some(0), cuts: Cuts::NONE, ..in_columns("tied") };
        let manifest = manifest_of(vec![in_columns("a"), tied.clone()], 512);
        assert_eq!(manifest.payload_bytes(), 512);
        let [a, tied_to_a] = manifest.tensors() else { panic!("two tensors") };
        assert!(a.ranges().eq(tied_to_a.ranges()) && a.cuts() == tied_to_a.cuts());
        let other_shape = TensorSpec { shape: Shape::new(&[8]).unwrap(), ..tied };
        let refused = Manifest::layout(vec![in_columns("a"), other_shape], vec![], 512, &Limits::default());
        assert!(matches!(refused, Err(LayoutError::AliasInPieces(name)) if name.as_str() == "tied"));
    }

    #[test]
    fn cuts_that_do_not_fit_are_refused_by_name() {
        let layout = |cuts| {
            let spec = TensorSpec { cuts, ..in_columns("a") };
            Manifest::layout(vec![spec], vec![], 512, &Limits::default())
        };
        let outside = layout(Cuts::new([(1, vec![4])])).unwrap_err();
        assert!(matches!(&outside, LayoutError::Cuts { name, .. } if name.as_str() == "a"), "{outside}");
        let name = TensorName::new("long").unwrap();
        let long = TensorSpec::new(name, Dtype::U8, Shape::new(&[1 << 21]).unwrap());
        let many = TensorSpec { cuts: Cuts::equal(0, 1 << 21, 1 << 21), ..long };
        let many = Manifest::layout(vec![many], vec![], 512, &Limits::default());
        assert!(matches!(many, Err(LayoutError::TooMuch { what: "pieces", max: PIECES_MAX, .. })));
    }

    proptest! {
        /// PROTOCOL.md §5.2, §5.3 and §5.6, for any tensors and cuts: chunks lie end to end and cover the payload, none
        /// is larger than `chunk_bytes`, none mixes dtypes, large pieces begin a chunk, and every piece is aligned.
        #[test]
        fn layout_keeps_every_rule(specs in any_specs(), chunk_bytes in (1u32..16).prop_map(|n| n * 256)) {
            let manifest = manifest_of(specs, chunk_bytes);
            let mut end = 0;
            for (index, range) in manifest.chunking().iter() {
                prop_assert_eq!(range.start, end);
                prop_assert!(range.start < range.end && range.end - range.start <= u64::from(chunk_bytes));
                end = range.end;
                prop_assert!(manifest.chunking().dtype(index).is_some());
            }
            prop_assert_eq!(end, manifest.payload_bytes());
            prop_assert_eq!(manifest.chunking().range(ChunkIndex(manifest.chunking().count())), None);
            let pieces = manifest.tensors().iter().flat_map(|t| t.ranges().map(move |range| (t, range)));
            for (tensor, range) in pieces.filter(|(_, range)| !range.is_empty()) {
                prop_assert!(range.start % PAYLOAD_ALIGNMENT == 0 && range.end <= manifest.payload_bytes());
                let chunks: Vec<_> = manifest.chunking().iter()
                    .filter(|(_, c)| c.start < range.end && range.start < c.end).collect();
                for (index, _) in &chunks {
                    prop_assert_eq!(manifest.chunking().dtype(*index), Some(tensor.dtype));
                }
                if range.end - range.start >= u64::from(chunk_bytes) {
                    prop_assert_eq!(chunks[0].1.start, range.start);
                } else {
                    prop_assert_eq!(chunks.len(), 1, "a small piece is never cut");
                }
            }
        }

        /// With default limits, a receiver decodes each layout to the same tensors.
        #[test]
        fn every_layout_can_be_decoded(specs in any_specs(), chunk_bytes in (1u32..16).prop_map(|n| n * 256)) {
            let sent = Manifest::layout(specs, vec![("k".into(), "v".into())], chunk_bytes, &Limits::default()).unwrap();
            let read = Manifest::decode(sent.encoded().clone(), &Limits::default()).unwrap();
            prop_assert_eq!(sent.tensors(), read.tensors());
            prop_assert_eq!(sent.feature(), read.feature());
            prop_assert_eq!(sent.chunking(), read.chunking());
            prop_assert_eq!(sent.metadata(), read.metadata());
            prop_assert_eq!(sent.digest(), read.digest());
        }
    }
}
