//! Shapes, with arithmetic that cannot overflow.

use super::Dtype;
use std::fmt;

/// The most dimensions of a tensor. Frameworks allow 8 to 64; models use fewer than 8.
const DIMENSIONS_MAX: usize = 16;

/// The dimensions of a tensor, outermost first. A scalar has no dimensions and one element.
///
/// Every value has at most 16 dimensions and an element count that fits 64 bits.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Shape {
    dimensions: Box<[u64]>,
    elements: u64,
}

impl Shape {
    /// The shape with these `dimensions`.
    ///
    /// # Errors
    /// [`ShapeError`] when there are too many dimensions, or the product of the non-zero ones overflows 64 bits: no
    /// framework could index `[u64::MAX, u64::MAX, 0]`, although it has no elements.
    pub fn new(dimensions: &[u64]) -> Result<Self, ShapeError> {
        if dimensions.len() > DIMENSIONS_MAX {
            return Err(ShapeError::TooManyDimensions(dimensions.len()));
        }
        let overflow = || ShapeError::TooLarge(dimensions.into());
        let non_zero = dimensions.iter().filter(|d| **d != 0);
        let product = non_zero.copied().try_fold(1u64, u64::checked_mul).ok_or_else(overflow)?;
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

    /// The size of a dense tensor of this shape in bytes. Sub-byte elements are packed, and the last byte is padded.
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

/// The position of a shard in a global tensor that several ranks hold together.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Shard {
    /// The shape of the global tensor.
    pub global_shape: Shape,
    /// The index of the shard's first element in the global tensor, one number per dimension.
    pub start: Box<[u64]>,
}

impl Shard {
    /// The position of a shard of shape `local` at `start` in a tensor of `global_shape`.
    ///
    /// # Errors
    /// [`ShapeError::OutsideGlobal`] when the shard does not lie within the global tensor.
    pub fn new(local: &Shape, global_shape: Shape, start: &[u64]) -> Result<Self, ShapeError> {
        let global = global_shape.dimensions();
        let fits = local.dimensions().len() == global.len()
            && start.len() == global.len()
            && std::iter::zip(start, local.dimensions())
                .zip(global)
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

/// Why dimensions are not a valid shape, or a shard's position is not valid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShapeError {
    /// More than 16 dimensions.
    #[error("a tensor has at most {DIMENSIONS_MAX} dimensions, this one has {0}")]
    TooManyDimensions(usize),
    /// The number of elements does not fit 64 bits, or that of bytes 63.
    #[error("a tensor of shape {0:?} has more bytes than can be addressed")]
    TooLarge(Box<[u64]>),
    /// A shard that does not lie within the global tensor.
    #[error("a shard of shape {local} at {start:?} does not fit into a tensor of shape {global}")]
    OutsideGlobal {
        /// The shape of the shard.
        local: Shape,
        /// The shape of the global tensor.
        global: Shape,
        /// The start of the shard.
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
    fn scalars_have_one_element_and_sub_byte_elements_are_packed() {
        assert_eq!(Shape::new(&[]).unwrap().byte_len(Dtype::F32), Ok(4));
        assert_eq!(Shape::new(&[3, 0]).unwrap().byte_len(Dtype::F32), Ok(0));
        assert_eq!(Shape::new(&[3]).unwrap().byte_len(Dtype::F4E2M1), Ok(2));
        assert_eq!(Shape::new(&[5]).unwrap().byte_len(Dtype::F6E2M3), Ok(4));
    }

    #[test]
    fn overflow_is_refused_even_with_a_zero() {
        assert!(Shape::new(&[u64::MAX, 2]).is_err());
        assert!(Shape::new(&[u64::MAX, u64::MAX, 0]).is_err());
        assert!(Shape::new(&[u64::MAX]).unwrap().byte_len(Dtype::F64).is_err());
        assert!(Shape::new(&[1; 17]).is_err());
    }

    #[test]
    fn shards_lie_within_the_global_tensor() {
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
