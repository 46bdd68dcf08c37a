//! Boxes: parts of tensors, as a range of indices of each dimension (PROTOCOL.md §5.5).

mod overlap;

pub use overlap::{NotWholeBytes, Overlap, Rectangle};

use crate::{Dtype, Shape, ShapeError};
use std::{fmt, ops::Range};

/// A box of a tensor: the elements whose index is, in each dimension, within a range.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Bounds(Box<[Range<u64>]>);

impl Bounds {
    /// The box of these ranges, one for each dimension, outermost first.
    pub fn new(ranges: impl IntoIterator<Item = Range<u64>>) -> Self {
        let ordered = |range: Range<u64>| range.start..range.end.max(range.start);
        Self(ranges.into_iter().map(ordered).collect())
    }

    /// The whole of a tensor.
    pub fn whole(shape: &Shape) -> Self {
        Self(shape.dimensions().iter().map(|length| 0..*length).collect())
    }

    /// The ranges, one for each dimension.
    pub fn ranges(&self) -> &[Range<u64>] {
        &self.0
    }

    /// The lengths of the dimensions.
    ///
    /// # Errors
    /// [`ShapeError`]: never for a box that [fits](Self::fits) a shape.
    pub fn shape(&self) -> Result<Shape, ShapeError> {
        let lengths: Vec<u64> = self.0.iter().map(|range| range.end - range.start).collect();
        Shape::new(&lengths)
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.0.iter().any(|range| range.is_empty())
    }

    /// Whether it is the whole of a tensor of this shape.
    pub fn is_whole(&self, shape: &Shape) -> bool {
        *self == Self::whole(shape)
    }

    /// Whether it has the dimensions of this shape and does not end beyond one.
    pub fn fits(&self, shape: &Shape) -> bool {
        self.0.len() == shape.dimensions().len()
            && self
                .0
                .iter()
                .zip(shape.dimensions())
                .all(|(range, length)| range.end <= *length)
    }

    /// Whether the box of a tensor of this dtype and shape consists of whole bytes: always, unless elements have fewer
    /// than 8 bits.
    pub fn has_whole_bytes(&self, dtype: Dtype, shape: &Shape) -> bool {
        Overlap::new(dtype, &Self::whole(shape), self).is_ok()
    }

    /// The elements that are in both boxes, which have equally many dimensions.
    fn common(&self, other: &Self) -> Self {
        let both = self.0.iter().zip(&other.0);
        Self::new(both.map(|(one, other)| one.start.max(other.start)..one.end.min(other.end)))
    }
}

impl fmt::Display for Bounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranges: Vec<_> = self.0.iter().map(|range| format!("{}:{}", range.start, range.end)).collect();
        write!(f, "[{}]", ranges.join(", "))
    }
}

impl fmt::Debug for Bounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A shape of up to four dimensions.
    pub(crate) fn any_shape() -> impl Strategy<Value = Shape> {
        prop::collection::vec(prop_oneof![1 => Just(0u64), 2 => Just(1), 9 => 2u64..7], 0..5)
            .prop_map(|dimensions| Shape::new(&dimensions).unwrap())
    }

    /// A box within `shape`.
    pub(crate) fn any_bounds(shape: &Shape) -> impl Strategy<Value = Bounds> + use<> {
        let dimensions: Vec<_> = shape.dimensions().to_vec();
        let ends = dimensions.into_iter().map(|length| (0..=length, 0..=length));
        ends.collect::<Vec<_>>()
            .prop_map(|ends| Bounds::new(ends.into_iter().map(|(one, other)| one.min(other)..one.max(other))))
    }

    #[test]
    fn a_box_fits_a_shape_of_as_many_dimensions() {
        let shape = Shape::new(&[4, 6]).unwrap();
        assert!(Bounds::whole(&shape).fits(&shape) && Bounds::whole(&shape).is_whole(&shape));
        assert!(Bounds::new([4..4, 0..6]).fits(&shape));
        assert!(!Bounds::new([0..5, 0..6]).fits(&shape));
        assert!(!Bounds::new(std::iter::once(0..4)).fits(&shape));
        assert_eq!(Bounds::new([1..3, 0..6]).to_string(), "[1:3, 0:6]");
    }
}
