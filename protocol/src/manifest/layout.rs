//! The layout of tensors in the payload (PROTOCOL.md §5.2).

use super::{Manifest, Tensor, wire};
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
}

impl TensorSpec {
    /// A tensor that is neither a shard nor an alias.
    pub fn new(name: TensorName, dtype: Dtype, shape: Shape) -> Self {
        Self { name, dtype, shape, shard: None, alias_of: None }
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
    let encoded = wire::encode(&tensors, &metadata, payload_bytes, chunk_bytes);
    check_at_most("bytes of manifest", encoded.len() as u64, limits.manifest_bytes.into())?;
    let by_name = tensors.iter().enumerate().map(|(i, t)| (t.name.clone(), i)).collect();
    let digest = ManifestDigest::of(&encoded);
    Ok(Manifest { tensors, by_name, metadata, payload_bytes, chunk_bytes, chunking, encoded, digest })
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

/// Computes every tensor's offset, and returns the tensors in the order of `specs`. In the payload they are ordered by
/// dtype, within a dtype large ones first, then as in `specs`. So small tensors of a dtype are adjacent and can share
/// chunks.
fn place(specs: Vec<TensorSpec>, chunk_bytes: u64) -> Result<Vec<Tensor>, LayoutError> {
    let sizes = sizes_of(&specs)?;
    check_names(&specs)?;
    let mut order: Vec<usize> = (0..specs.len()).filter(|i| specs[*i].alias_of.is_none()).collect();
    order.sort_by_key(|i| (specs[*i].dtype.code(), sizes[*i] < chunk_bytes));
    let mut offsets = vec![0; specs.len()];
    let mut end = 0u64;
    for index in order {
        offsets[index] = end;
        end = end.checked_add(aligned(sizes[index])).ok_or(LayoutError::TooMuch {
            what: "bytes",
            found: u64::MAX,
            max: i64::MAX as u64,
        })?;
    }
    for (index, spec) in specs.iter().enumerate() {
        if let Some(target) = spec.alias_of {
            check_alias(&specs, &sizes, index, target)?;
            offsets[index] = offsets[target];
        }
    }
    let placed = specs.into_iter().zip(sizes).zip(offsets);
    Ok(placed
        .map(|((spec, bytes), offset)| Tensor {
            name: spec.name,
            dtype: spec.dtype,
            shape: spec.shape,
            shard: spec.shard,
            offset,
            bytes,
        })
        .collect())
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

/// The target of an alias must be an earlier tensor that is not an alias, of the same dtype and size.
fn check_alias(specs: &[TensorSpec], sizes: &[u64], index: usize, target: usize) -> Result<(), LayoutError> {
    let fits = target < index
        && specs[target].alias_of.is_none()
        && specs[target].dtype == specs[index].dtype
        && sizes[target] == sizes[index];
    if fits { Ok(()) } else { Err(LayoutError::BadAlias(specs[index].name.clone())) }
}

/// The distinct extents of all non-empty tensors, in order of offset, and the payload's size. Aliases share one extent.
pub(super) fn stored_extents(tensors: &[Tensor]) -> (Vec<Extent>, u64) {
    let mut extents: Vec<Extent> = tensors
        .iter()
        .filter(|t| t.bytes > 0)
        .map(|t| Extent { offset: t.offset, bytes: t.bytes, dtype: t.dtype })
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
    use crate::ChunkIndex;
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
        assert_eq!(manifest.tensor("big").unwrap().range(), 0..2800);
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

    fn any_specs() -> impl Strategy<Value = Vec<TensorSpec>> {
        let tensor = (0..Dtype::ALL.len(), prop_oneof![0u64..50, 0u64..5000]);
        prop::collection::vec(tensor, 0..40).prop_map(|tensors| {
            let numbered = tensors.into_iter().enumerate();
            numbered
                .map(|(i, (dtype, n))| spec(&format!("t{i}"), Dtype::ALL[dtype], n))
                .collect()
        })
    }

    proptest! {
        /// PROTOCOL.md §5.2 and §5.3, for any tensors: chunks lie end to end and cover the payload, none is larger than
        /// `chunk_bytes`, none mixes dtypes, large tensors begin a chunk, and every tensor is aligned.
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
            for tensor in manifest.tensors().iter().filter(|t| t.byte_len() > 0) {
                let range = tensor.range();
                prop_assert!(range.start % PAYLOAD_ALIGNMENT == 0 && range.end <= manifest.payload_bytes());
                let chunks: Vec<_> = manifest.chunking().iter()
                    .filter(|(_, c)| c.start < range.end && range.start < c.end).collect();
                for (index, _) in &chunks {
                    prop_assert_eq!(manifest.chunking().dtype(*index), Some(tensor.dtype));
                }
                if tensor.byte_len() >= u64::from(chunk_bytes) {
                    prop_assert_eq!(chunks[0].1.start, range.start);
                } else {
                    prop_assert_eq!(chunks.len(), 1, "a small tensor is never cut");
                }
            }
        }

        /// With default limits, a receiver decodes each layout to the same tensors.
        #[test]
        fn every_layout_can_be_decoded(specs in any_specs(), chunk_bytes in (1u32..16).prop_map(|n| n * 256)) {
            let sent = Manifest::layout(specs, vec![("k".into(), "v".into())], chunk_bytes, &Limits::default()).unwrap();
            let read = Manifest::decode(sent.encoded().clone(), &Limits::default()).unwrap();
            prop_assert_eq!(sent.tensors(), read.tensors());
            prop_assert_eq!(sent.chunking(), read.chunking());
            prop_assert_eq!(sent.metadata(), read.metadata());
            prop_assert_eq!(sent.digest(), read.digest());
        }
    }
}
