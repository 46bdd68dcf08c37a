//! Shapes, with arithmetic that cannot overflow.

use super::Dtype;
use std::fmt;

/// The most dimensions a tensor may have. Frameworks stop at 8 to 64; real models stay below 8.
const DIMENSIONS_MAX: usize = 16;

/// The dimensions of a tensor, outermost first; none at all is a scalar of one element.
///
/// A shape that exists has at most 16 dimensions and an element count that fits 64 bits.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Shape {
    dimensions: Box<[u64]>,
    elements: u64,
}

impl Shape {
    /// Checks `dimensions`.
    ///
    /// # Errors
    /// [`ShapeError`] when there are too many, or when their product overflows. A zero anywhere makes the product zero
    /// but hides no overflow: `[u64::MAX, u64::MAX, 0]` is refused, since no framework could index it.
    pub fn new(dimensions: &[u64]) -> Result<Self, ShapeError> {
        if dimensions.len() > DIMENSIONS_MAX {
            return Err(ShapeError::TooManyDimensions(dimensions.len()));
        }
        let overflow = || ShapeError::TooLarge(dimensions.into());
        let strides = dimensions.iter().filter(|d| **d != 0);
        let product = strides.copied().try_fold(1u64, u64::checked_mul).ok_or_else(overflow)?;
        let elements = if dimensions.contains(&0) { 0 } else { product };
        Ok(Self { dimensions: dimensions.into(), elements })
    }

    /// The dimensions, outermost first.
    pub fn dimensions(&self) -> &[u64] {
        &self.dimensions
    }

    /// The number of elements.
    pub fn elements(&self) -> u64 {
        self.elements
    }

    /// The size of a dense tensor of this shape in bytes; sub-byte elements are packed, the last byte filled up.
    ///
    /// # Errors
    /// [`ShapeError::TooLarge`] when the size does not fit 63 bits, so that offsets can be added without overflow.
    pub fn byte_len(&self, dtype: Dtype) -> Result<u64, ShapeError> {
        let bits = u128::from(self.elements) * u128::from(dtype.bits());
        let bytes = bits.div_ceil(8);
        u64::try_from(bytes)
            .ok()
            .filter(|b| *b <= i64::MAX as u64)
            .ok_or_else(|| ShapeError::TooLarge(self.dimensions.clone()))
    }
}

/// The place of a shard in a larger tensor that several ranks hold together.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Shard {
    /// The shape of the whole.
    pub global_shape: Shape,
    /// The index of this part's first element, one number per dimension of the whole.
    pub start: Box<[u64]>,
}

impl Shard {
    /// Checks that a part of shape `local` fits into `global_shape` at `start`.
    ///
    /// # Errors
    /// [`ShapeError::OutsideGlobal`] when the part would reach outside of the whole.
    pub fn new(local: &Shape, global_shape: Shape, start: &[u64]) -> Result<Self, ShapeError> {
        let whole = global_shape.dimensions();
        let fits = local.dimensions().len() == whole.len()
            && start.len() == whole.len()
            && std::iter::zip(start, local.dimensions())
                .zip(whole)
                .all(|((s, l), g)| s.checked_add(*l).is_some_and(|end| end <= *g));
        if !fits {
            return Err(ShapeError::OutsideGlobal {
                local: local.clone(),
                global: global_shape,
                start: start.into(),
            });
        }
        Ok(Self { global_shape, start: start.into() })
    }
}

/// Why dimensions are not a valid shape.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShapeError {
    /// More dimensions than any framework uses.
    #[error("a tensor has at most {DIMENSIONS_MAX} dimensions, this one has {0}")]
    TooManyDimensions(usize),
    /// The element or byte count overflows.
    #[error("a tensor of shape {0:?} has more bytes than can be addressed")]
    TooLarge(Box<[u64]>),
    /// A shard that is not inside its whole.
    #[error("a shard of shape {local} at {start:?} does not fit into a tensor of shape {global}")]
    OutsideGlobal {
        /// The shape of the part.
        local: Shape,
        /// The shape of the whole.
        global: Shape,
        /// The start of the part.
        start: Box<[u64]>,
    },
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.dimensions)
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.dimensions)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn scalars_empties_and_sub_byte() {
        assert_eq!(Shape::new(&[]).unwrap().byte_len(Dtype::F32), Ok(4));
        assert_eq!(Shape::new(&[3, 0]).unwrap().byte_len(Dtype::F32), Ok(0));
        assert_eq!(Shape::new(&[3]).unwrap().byte_len(Dtype::F4E2M1), Ok(2));
        assert_eq!(Shape::new(&[5]).unwrap().byte_len(Dtype::F6E2M3), Ok(4));
    }

    #[test]
    fn overflow_is_refused_even_behind_a_zero() {
        assert!(Shape::new(&[u64::MAX, 2]).is_err());
        assert!(Shape::new(&[u64::MAX, u64::MAX, 0]).is_err());
        assert!(Shape::new(&[u64::MAX]).unwrap().byte_len(Dtype::F64).is_err());
        assert!(Shape::new(&[1; 17]).is_err());
    }

    #[test]
    fn shards_stay_inside() {
        let global = Shape::new(&[8, 4]).unwrap();
        let local = Shape::new(&[4, 4]).unwrap();
        assert!(Shard::new(&local, global.clone(), &[4, 0]).is_ok());
        assert!(Shard::new(&local, global.clone(), &[5, 0]).is_err());
        assert!(Shard::new(&local, global.clone(), &[u64::MAX, 0]).is_err());
        assert!(Shard::new(&local, global, &[4]).is_err());
    }

    proptest! {
        #[test]
        fn byte_len_is_exact_or_refused(dims in prop::collection::vec(0u64..1 << 40, 0..5), i in 0..Dtype::ALL.len()) {
            let dtype = Dtype::ALL[i];
            let exact = dims.iter().map(|d| u128::from(*d)).try_fold(1u128, u128::checked_mul)
                .map(|n| (n * u128::from(dtype.bits())).div_ceil(8));
            if let Ok(Ok(bytes)) = Shape::new(&dims).map(|s| s.byte_len(dtype)) {
                prop_assert_eq!(Some(u128::from(bytes)), exact);
            }
        }
    }
}
