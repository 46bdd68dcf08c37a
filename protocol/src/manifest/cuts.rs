//! [`Cuts`]: where a tensor is cut into pieces (PROTOCOL.md §5.6).

use crate::{Bounds, Dtype, Shape};
use std::ops::Range;

/// The most pieces of all tensors of a manifest together. Limits the memory for a small hostile manifest.
pub(super) const PIECES_MAX: u64 = 1 << 20;

/// Where a tensor is cut: before some indices of some of its dimensions. Its pieces are the cells of this grid, in
/// row-major order. Without cuts the tensor is one piece.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Cuts(Vec<Cut>);

/// The cuts of one dimension.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Cut {
    dimension: u32,
    /// The first index of each piece but the first.
    points: Box<[u64]>,
}

/// Why a tensor cannot be cut like this.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CutsError {
    /// Dimensions that the tensor does not have, or that do not ascend.
    #[error(
        "dimension {dimension} is cut, but there are {dimensions}, and each may be cut once, in ascending order"
    )]
    Dimension {
        /// The dimension.
        dimension: u32,
        /// The number of dimensions that the tensor has.
        dimensions: usize,
    },
    /// Points that do not ascend, or that would leave a piece empty.
    #[error(
        "dimension {dimension} of length {length} is cut at indices that are not between 0 and its length, or do not \
         ascend"
    )]
    Points {
        /// The dimension.
        dimension: u32,
        /// Its length.
        length: u64,
    },
    /// A piece that begins or ends within a byte.
    #[error("elements of {dtype} are cut within a byte in dimension {dimension}: cut at whole bytes")]
    WithinByte {
        /// The dimension.
        dimension: u32,
        /// The dtype of the elements.
        dtype: Dtype,
    },
}

impl Cuts {
    /// One piece.
    pub const NONE: Self = Self(Vec::new());

    /// Cuts in these dimensions, ascending, each before these indices, ascending. Whether a tensor can be cut so is checked
    /// when it is laid out.
    pub fn new(cuts: impl IntoIterator<Item = (u32, Vec<u64>)>) -> Self {
        Self(
            cuts.into_iter()
                .map(|(dimension, points)| Cut { dimension, points: points.into() })
                .collect(),
        )
    }

    /// Cuts one dimension, of this length, into `parts` of equal length, of which the last ones may be shorter or missing:
    /// as PyTorch's `chunk`.
    pub fn equal(dimension: u32, length: u64, parts: u32) -> Self {
        let each = length.div_ceil(parts.max(1).into()).max(1);
        let points: Vec<u64> = (1..u64::from(parts))
            .map_while(|part| Some(part * each).filter(|at| *at < length))
            .collect();
        match points.is_empty() {
            true => Self::NONE,
            false => Self::new([(dimension, points)]),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The cuts, in ascending order: the dimension of each, and the index before which it is cut.
    pub(super) fn points(&self) -> impl Iterator<Item = (u32, u64)> {
        self.0
            .iter()
            .flat_map(|cut| cut.points.iter().map(|point| (cut.dimension, *point)))
    }

    /// The number of pieces.
    pub(super) fn pieces(&self) -> u64 {
        let lengths = self.0.iter().map(|cut| cut.points.len() as u64 + 1);
        lengths.fold(1, u64::saturating_mul)
    }

    /// Checks that a tensor can be cut so.
    pub(super) fn check(&self, dtype: Dtype, shape: &Shape) -> Result<(), CutsError> {
        let dimensions: Vec<u32> = self.0.iter().map(|cut| cut.dimension).collect();
        Self::check_dimensions(&dimensions, shape)?;
        if let Some(twice) = dimensions.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(CutsError::Dimension { dimension: twice[0], dimensions: shape.dimensions().len() });
        }
        self.0
            .iter()
            .try_for_each(|cut| cut.check(shape.dimensions()[cut.dimension as usize]))?;
        self.0
            .last()
            .map_or(Ok(()), |innermost| innermost.check_bytes(dtype, shape.dimensions()))
    }

    /// Checks that dimensions to be cut do not descend, and that a tensor of this shape has them.
    pub(super) fn check_dimensions(cut: &[u32], shape: &Shape) -> Result<(), CutsError> {
        let dimensions = shape.dimensions().len();
        let descent = cut.windows(2).find(|pair| pair[0] > pair[1]).map(|pair| pair[1]);
        let missing = cut.iter().copied().find(|dimension| *dimension as usize >= dimensions);
        match descent.or(missing) {
            Some(dimension) => Err(CutsError::Dimension { dimension, dimensions }),
            None => Ok(()),
        }
    }

    /// The piece with this number, which exists. The tensor can be cut so.
    pub(super) fn piece(&self, mut number: u64, shape: &Shape) -> Bounds {
        let mut ranges: Vec<Range<u64>> = shape.dimensions().iter().map(|length| 0..*length).collect();
        for cut in self.0.iter().rev() {
            let (range, pieces) = (&mut ranges[cut.dimension as usize], cut.points.len() as u64 + 1);
            *range = cut.range((number % pieces) as usize, range.end);
            number /= pieces;
        }
        Bounds::new(ranges)
    }

    /// The size in bytes of the piece with this number, likewise. Allocates nothing: a manifest may have a million pieces.
    pub(super) fn piece_bytes(&self, mut number: u64, dtype: Dtype, shape: &Shape) -> u64 {
        let mut elements = shape.elements();
        for cut in self.0.iter().rev() {
            let (length, pieces) = (shape.dimensions()[cut.dimension as usize], cut.points.len() as u64 + 1);
            let range = cut.range((number % pieces) as usize, length);
            elements = elements / length * (range.end - range.start);
            number /= pieces;
        }
        (u128::from(elements) * u128::from(dtype.bits())).div_ceil(8) as u64
    }
}

impl Cut {
    fn check(&self, length: u64) -> Result<(), CutsError> {
        let ascend = self.points.is_sorted_by(|one, next| one < next);
        let first_and_last = self.points.first().zip(self.points.last());
        match first_and_last.is_some_and(|(first, last)| ascend && *first > 0 && *last < length) {
            true => Ok(()),
            false => Err(CutsError::Points { dimension: self.dimension, length }),
        }
    }

    /// Checks, of the innermost dimension that is cut, that each row of a piece, i.e. its part of this dimension with
    /// all dimensions after it, has whole bytes. Then so has what is cut in the dimensions before it.
    fn check_bytes(&self, dtype: Dtype, dimensions: &[u64]) -> Result<(), CutsError> {
        let (length, inner) =
            (dimensions[self.dimension as usize], &dimensions[self.dimension as usize + 1..]);
        let index_bits = inner
            .iter()
            .fold(u64::from(dtype.bits()), |bits, length| bits % 8 * (length % 8));
        let is_whole = |at: &u64| (at % 8 * index_bits).is_multiple_of(8);
        match self.points.iter().all(is_whole) && is_whole(&length) {
            true => Ok(()),
            false => Err(CutsError::WithinByte { dimension: self.dimension, dtype }),
        }
    }

    /// The range of the part with this number of a dimension that ends at `end`.
    fn range(&self, number: usize, end: u64) -> Range<u64> {
        let start = number.checked_sub(1).map_or(0, |before| self.points[before]);
        start..self.points.get(number).copied().unwrap_or(end)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::Overlap;
    use proptest::prelude::*;

    /// Cuts of some dimensions of a shape: not always at whole bytes.
    pub(crate) fn any_cuts(shape: &Shape) -> impl Strategy<Value = Cuts> + use<> {
        let lengths: Vec<_> = (0u32..)
            .zip(shape.dimensions().to_vec())
            .filter(|(_, length)| *length > 1)
            .collect();
        let cut = |(dimension, length): (u32, u64)| {
            let points = prop::collection::btree_set(1..length, 0..3);
            points.prop_map(move |points| (dimension, points.into_iter().collect::<Vec<_>>()))
        };
        let cuts = lengths.into_iter().map(cut).collect::<Vec<_>>();
        cuts.prop_map(|cuts| Cuts::new(cuts.into_iter().filter(|(_, points)| !points.is_empty())))
    }

    fn any_cut_shape() -> impl Strategy<Value = (Shape, Cuts)> {
        let shape = crate::boxes::tests::any_shape();
        shape.prop_flat_map(|shape| any_cuts(&shape).prop_map(move |cuts| (shape.clone(), cuts)))
    }

    fn check(dtype: Dtype, dimensions: &[u64], cuts: &[(u32, &[u64])]) -> Result<(), CutsError> {
        let cuts = Cuts::new(cuts.iter().map(|(dimension, points)| (*dimension, points.to_vec())));
        cuts.check(dtype, &Shape::new(dimensions).unwrap())
    }

    proptest! {
        /// For any cuts: the pieces are disjoint and together the tensor; where the check permits them, each has whole
        /// bytes, as many as its elements.
        #[test]
        fn pieces_are_the_tensor(
            (shape, cuts) in any_cut_shape(),
            dtype in prop::sample::select(vec![Dtype::U2, Dtype::U4, Dtype::F6E2M3, Dtype::U8, Dtype::F64]),
        ) {
            let pieces: Vec<_> = (0..cuts.pieces()).map(|number| cuts.piece(number, &shape)).collect();
            let elements: u64 = pieces.iter().map(|piece| piece.shape().unwrap().elements()).sum();
            prop_assert_eq!(elements, shape.elements());
            for (at, piece) in pieces.iter().enumerate() {
                prop_assert!(piece.fits(&shape) && !piece.ranges().iter().zip(shape.dimensions()).any(|(r, n)| r.is_empty() && *n > 0));
                let meets = |other: &Bounds| matches!(Overlap::new(Dtype::U8, piece, other), Ok(Some(_)));
                prop_assert!(!pieces[at + 1..].iter().any(meets));
            }
            if cuts.check(dtype, &shape).is_ok() && !cuts.is_empty() {
                for (number, piece) in (0..).zip(&pieces) {
                    let bits = piece.shape().unwrap().elements() * u64::from(dtype.bits());
                    prop_assert!(piece.has_whole_bytes(dtype, &shape) && bits.is_multiple_of(8));
                    prop_assert_eq!(cuts.piece_bytes(number, dtype, &shape), bits / 8);
                }
            } else if dtype.bits() >= 8 {
                prop_assert_eq!(cuts.check(dtype, &shape), Ok(()));
            }
        }

        /// PROTOCOL.md §5.5 cuts a dimension into parts as `equal` does.
        #[test]
        fn equal_parts_are_those_of_slices(length in 0u64..40, parts in 1u32..12) {
            let shape = Shape::new(&[length]).unwrap();
            let cuts = Cuts::equal(0, length, parts);
            let pieces = (0..cuts.pieces()).map(|number| cuts.piece(number, &shape));
            let tensors = crate::Glob::new("**").unwrap();
            let slices = (0..parts).map(|part| {
                let indices = crate::Indices::Part { part, parts };
                let slice = crate::Slice { dimension: 0, indices };
                crate::TensorBox { tensors: tensors.clone(), slices: vec![slice] }.bounds(&shape)
            });
            let slices = slices.filter(|slice| !slice.is_empty() || length == 0).take(cuts.pieces() as usize);
            prop_assert!(pieces.eq(slices));
        }
    }

    #[test]
    fn invalid_cuts_are_refused() {
        assert_eq!(check(Dtype::U8, &[4, 6], &[(0, &[1, 3]), (1, &[5])]), Ok(()));
        for cuts in [&[(2, &[1][..])][..], &[(1, &[1]), (1, &[2])], &[(1, &[1]), (0, &[1])]] {
            assert!(matches!(check(Dtype::U8, &[4, 6], cuts), Err(CutsError::Dimension { .. })), "{cuts:?}");
        }
        for points in [&[][..], &[0], &[4], &[2, 2], &[3, 1], &[u64::MAX]] {
            assert!(
                matches!(check(Dtype::U8, &[4, 6], &[(0, points)]), Err(CutsError::Points { .. })),
                "{points:?}"
            );
        }
    }

    #[test]
    fn bytes_are_not_cut() {
        let within = |dimensions, cuts| {
            matches!(check(Dtype::U4, dimensions, cuts), Err(CutsError::WithinByte { .. }))
        };
        assert!(within(&[4, 6], &[(1, &[3])]) && !within(&[4, 6], &[(1, &[2])]));
        assert!(within(&[4, 5], &[(1, &[2])]), "the last piece has rows of a byte and a half");
        assert!(within(&[4, 5], &[(0, &[1])]) && within(&[4, 5], &[(0, &[2, 3])]));
        assert!(!within(&[4, 5], &[(0, &[2])]), "two rows are five bytes");
        assert!(!within(&[4, 1 << 40], &[(0, &[1])]));
    }
}
