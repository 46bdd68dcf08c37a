//! What layout 2 adds to a manifest (PROTOCOL.md §5.6): tensors in pieces, and owners.

use super::{Laid, Tensor, WireTensor, check_at_most};
use crate::{
    Dtype, ManifestError, Shape, TensorName,
    manifest::{Cuts, CutsError, cuts::PIECES_MAX},
};
use std::collections::{HashMap, hash_map::Entry};

/// The most owners of a manifest.
const OWNERS_MAX: u32 = 1 << 16;

/// Which tensors of a manifest have the fields of layout 2.
#[derive(Default)]
pub(super) struct Pieces {
    /// The pieces of those that have them.
    count: u64,
    /// A tensor that has them, and one that does not.
    with: Option<TensorName>,
    without: Option<TensorName>,
}

impl Pieces {
    /// Counts the pieces of a tensor before its fields are read; returns their number.
    pub(super) fn count(&mut self, wire: &WireTensor) -> Result<usize, ManifestError> {
        self.count += wire.offsets.len() as u64;
        check_at_most("pieces", self.count, PIECES_MAX)?;
        Ok(wire.offsets.len())
    }

    /// Records a tensor with so many pieces.
    pub(super) fn note(&mut self, tensor: &TensorName, pieces: usize) {
        let example = if pieces > 0 { &mut self.with } else { &mut self.without };
        example.get_or_insert_with(|| tensor.clone());
    }

    /// Whether a manifest of `layout` has pieces, after a check that all tensors have the fields of its layout.
    pub(super) fn are_used(&self, layout: u32) -> Result<bool, ManifestError> {
        let (are_used, other) = match layout {
            0 | 1 => (false, &self.with),
            2 => (true, &self.without),
            other => return Err(ManifestError::UnknownLayout(other)),
        };
        other.clone().map_or(Ok(are_used), |name| Err(ManifestError::Pieces(name)))
    }
}

/// The place of a tensor. The fields of layout 2 have a number for each piece, or are absent.
pub(super) fn laid_from_wire(
    wire: &WireTensor,
    name: &TensorName,
    dtype: Dtype,
    shape: &Shape,
) -> Result<Laid, ManifestError> {
    let WireTensor { offset, offsets, owners, .. } = wire;
    let cuts = cuts_from_wire(wire, dtype, shape);
    let cuts = cuts.map_err(|source| ManifestError::Cuts { name: name.clone(), source })?;
    let pieces = if offsets.is_empty() { 1 } else { offsets.len() };
    let is_whole = cuts.pieces() == pieces as u64
        && (owners.is_empty() || owners.len() == offsets.len())
        && (offsets.is_empty() || *offset == 0)
        && wire.cut_dimensions.len() == wire.cut_points.len();
    if !is_whole {
        return Err(ManifestError::Pieces(name.clone()));
    }
    let offsets = if offsets.is_empty() { std::slice::from_ref(offset) } else { offsets };
    Ok(Laid::of_owners(cuts, offsets, owners))
}

/// The cuts of a tensor. They are grouped by dimension only once these are known to be few.
fn cuts_from_wire(wire: &WireTensor, dtype: Dtype, shape: &Shape) -> Result<Cuts, CutsError> {
    let (dimensions, mut points) = (&wire.cut_dimensions, &wire.cut_points[..]);
    Cuts::check_dimensions(dimensions, shape)?;
    let cuts = dimensions.chunk_by(u32::eq).map(|dimension| {
        let of_dimension;
        (of_dimension, points) = points.split_at(dimension.len().min(points.len()));
        (dimension[0], of_dimension.to_vec())
    });
    let cuts = Cuts::new(cuts);
    cuts.check(dtype, shape).map(|()| cuts)
}

/// Checks that every piece has an owner of the manifest.
pub(super) fn check_owners(tensors: &[Tensor], owners: u32) -> Result<(), ManifestError> {
    check_at_most("owners", owners.into(), OWNERS_MAX.into())?;
    let is_unknown = |tensor: &&Tensor| tensor.extents().any(|extent| extent.owner >= owners.max(1));
    tensors
        .iter()
        .find(is_unknown)
        .map_or(Ok(()), |tensor| Err(ManifestError::Pieces(tensor.name.clone())))
}

/// Checks that tensors which share a piece are tied, i.e. share all of them, and that no tensor has one piece twice.
pub(super) fn check_ties(tensors: &[Tensor]) -> Result<(), ManifestError> {
    if !tensors.iter().any(Tensor::is_in_pieces) {
        return Ok(());
    }
    let mut holders: HashMap<u64, &Tensor> = HashMap::new();
    for tensor in tensors {
        let mut held = tensor.extents().filter(|extent| extent.bytes > 0).map(|extent| {
            match holders.entry(extent.offset) {
                Entry::Occupied(holder) => Some(*holder.get()),
                Entry::Vacant(entry) => {
                    entry.insert(tensor);
                    None
                }
            }
        });
        let Some(first) = held.next() else { continue };
        // All of its pieces are new, or all are those of one other tensor; that is compared once.
        let is_same = |holder: Option<&Tensor>| match (holder, first) {
            (None, None) => true,
            (Some(holder), Some(first)) => std::ptr::eq(holder, first),
            _ => false,
        };
        let is_tied = first.is_none_or(|first| tensor.is_tied_to(first));
        if !held.all(is_same) || !is_tied {
            return Err(ManifestError::Misplaced(tensor.name.clone()));
        }
    }
    Ok(())
}

#[cfg(test)]
pub(super) mod tests {
    use super::{
        super::{
            WireManifest,
            tests::{message, read, tensor},
        },
        *,
    };
    use crate::{Limits, Manifest};
    use prost::Message;

    /// A tensor of `[2, 6]` bytes in three pieces of two columns, in layout 2.
    pub(in super::super) fn in_pieces(name: &str, offsets: [u64; 3], owners: &[u32]) -> WireTensor {
        WireTensor {
            shape: vec![2, 6],
            cut_dimensions: vec![1, 1],
            cut_points: vec![2, 4],
            offsets: offsets.into(),
            owners: owners.into(),
            ..tensor(name, 0, 0)
        }
    }

    fn read_pieces(
        payload_bytes: u64,
        owners: u32,
        tensors: Vec<WireTensor>,
    ) -> Result<Manifest, ManifestError> {
        let message = WireManifest { owners, layout: 2, tensors, ..message(payload_bytes, 256) };
        Manifest::decode(message.encode_to_vec().into(), &Limits::default())
    }

    #[test]
    fn hostile_pieces_are_refused() {
        let cut = |offsets| in_pieces("c", offsets, &[]);
        let read = |tensors: Vec<WireTensor>| read_pieces(768, 0, tensors);
        assert!(read(vec![cut([0, 256, 512])]).is_ok() && read(vec![cut([512, 0, 256])]).is_ok());
        let misplaced = |tensors: Vec<WireTensor>| matches!(read(tensors), Err(ManifestError::Misplaced(_)));
        assert!(misplaced(vec![cut([0, 256, 256])]), "one piece twice");
        assert!(misplaced(vec![cut([0, 256, u64::MAX - 3])]), "outside");
        assert!(misplaced(vec![cut([0, 512, 256 + 128])]), "not aligned");
        let whole = |offset| WireTensor { offsets: vec![offset], ..tensor("w", 0, 4) };
        assert!(misplaced(vec![cut([0, 256, 512]), whole(256)]), "a piece that is another tensor");
        let other = |offsets| WireTensor { name: "d".into(), ..cut(offsets) };
        assert!(read(vec![cut([0, 256, 512]), other([0, 256, 512])]).is_ok(), "tied");
        assert!(misplaced(vec![cut([0, 256, 512]), other([256, 0, 512])]), "tied otherwise");
        let other_shape = WireTensor { shape: vec![1, 12], cut_points: vec![4, 8], ..other([0, 256, 512]) };
        assert!(misplaced(vec![cut([0, 256, 512]), other_shape]), "tied with another shape");
    }

    #[test]
    fn fields_of_the_other_layout_are_refused() {
        let is_refused = |read| matches!(read, Err(ManifestError::Pieces(name)) if name.as_str() == "c");
        let cut = || in_pieces("c", [0, 256, 512], &[]);
        assert!(is_refused(read(768, 256, vec![cut()])), "offsets in layout 1");
        assert!(is_refused(read(256, 256, vec![WireTensor { owners: vec![0], ..tensor("c", 0, 1) }])));
        let refused = [
            tensor("c", 0, 1),
            WireTensor { offset: 256, ..cut() },
            WireTensor { offsets: vec![0, 256], ..cut() },
            WireTensor { owners: vec![0, 0], ..cut() },
            WireTensor { cut_points: vec![2, 4, 5], ..cut() },
        ];
        for tensor in refused {
            assert!(is_refused(read_pieces(768, 0, vec![tensor.clone()])), "{tensor:?}");
        }
        let later = WireManifest { layout: 3, ..message(0, 256) }.encode_to_vec();
        let later = Manifest::decode(later.into(), &Limits::default());
        assert!(matches!(later, Err(ManifestError::UnknownLayout(3))), "{later:?}");
        let cuts = WireTensor { cut_dimensions: vec![2, 2], ..cut() };
        assert!(matches!(read_pieces(768, 0, vec![cuts]), Err(ManifestError::Cuts { .. })));
    }

    #[test]
    fn many_pieces_are_refused() {
        let points: Vec<u64> = (1..=PIECES_MAX).collect();
        let shape = vec![PIECES_MAX + 1];
        let offsets = (0..=PIECES_MAX).map(|piece| piece * 256).collect();
        let cut_dimensions = vec![0; points.len()];
        let many = WireTensor { shape, cut_dimensions, cut_points: points, offsets, ..tensor("c", 0, 0) };
        let refused = read_pieces((PIECES_MAX + 1) * 256, 0, vec![many]);
        assert!(matches!(refused, Err(ManifestError::TooMuch { what: "pieces", .. })), "{refused:?}");
    }

    /// PROTOCOL.md §5.6: owners follow each other in the payload, and share no chunk.
    #[test]
    fn owners_do_not_share_chunks() {
        let read = |owners: &[u32]| read_pieces(768, 2, vec![in_pieces("c", [0, 256, 512], owners)]);
        let chunks = |owners: &[u32]| read(owners).map(|manifest| manifest.chunking().count());
        let message = |owners: &[u32], count| WireManifest {
            chunk_bytes: 1024,
            layout: 2,
            owners: count,
            tensors: vec![in_pieces("c", [0, 256, 512], owners)],
            ..message(768, 1024)
        };
        let large =
            |owners: &[u32]| Manifest::decode(message(owners, 2).encode_to_vec().into(), &Limits::default());
        assert_eq!(large(&[0, 0, 0]).unwrap().chunking().count(), 1);
        assert_eq!(large(&[0, 1, 1]).unwrap().chunking().count(), 2);
        assert_eq!(chunks(&[0, 0, 1]), Ok(3));
        assert!(matches!(chunks(&[0, 1, 0]), Err(ManifestError::Misplaced(_))), "owners fall");
        assert!(matches!(chunks(&[0, 1, 2]), Err(ManifestError::Pieces(_))), "there are two owners");
        let many = Manifest::decode(message(&[], OWNERS_MAX + 1).encode_to_vec().into(), &Limits::default());
        assert!(matches!(many, Err(ManifestError::TooMuch { what: "owners", .. })), "{many:?}");
    }

    /// PROTOCOL.md §5.6, golden bytes: of two owners, and as this build lays them out.
    #[test]
    fn golden_manifests_of_layout_2() {
        let golden: Vec<&str> = include_str!("../../../vectors/layout-2-manifest.hex").lines().collect();
        let bytes = |hex: &str| {
            (0..hex.len())
                .step_by(2)
                .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap())
                .collect()
        };
        for hex in &golden {
            let encoded: Vec<u8> = bytes(hex);
            let manifest = Manifest::decode(encoded.into(), &Limits::default()).unwrap();
            let w = manifest.tensor("w").unwrap();
            assert!(w.ranges().eq([0..48, 256..304]) && w.byte_len() == 96);
            assert_eq!(manifest.chunking().count(), if *hex == golden[0] { 2 } else { 1 });
        }
        let spec =
            crate::TensorSpec::new(TensorName::new("w").unwrap(), Dtype::F32, Shape::new(&[4, 6]).unwrap());
        let spec = crate::TensorSpec { cuts: Cuts::equal(1, 6, 2), ..spec };
        let manifest = Manifest::layout(vec![spec], vec![], 4096, &Limits::default()).unwrap();
        let hex: String = manifest.encoded().iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(hex, golden[1]);
    }
}
