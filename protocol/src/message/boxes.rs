//! Boxes: the parts of tensors that a subscription selects. The draft of PROTOCOL.md §5.5, which no build offers: boxes
//! are parsed and bounded, and not used.

use super::{
    Field, SELECTION_MAX_BYTES,
    field::{list, message_fields},
    wire,
};
use crate::{Glob, MessageError};

/// The most boxes in one subscription.
pub const BOXES_MAX: usize = 256;

/// The most dimensions of a tensor.
const DIMENSIONS_MAX: usize = 16;

/// The part that is selected of each tensor whose name matches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorBox {
    /// The tensors.
    pub tensors: Glob,
    /// The slices, of different dimensions in ascending order. Other dimensions are whole.
    pub slices: Vec<Slice>,
}

/// A part of one dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slice {
    /// The dimension.
    pub dimension: u32,
    /// The indices.
    pub indices: Indices,
}

/// Indices of a dimension. Those beyond its end do not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Indices {
    /// `length` of them, from `start` on.
    Range {
        /// The first.
        start: u64,
        /// The number of them, not 0.
        length: u64,
    },
    /// One of `parts` equal parts, as PyTorch's `chunk` makes them.
    Part {
        /// The part, from 0.
        part: u32,
        /// The number of parts.
        parts: u32,
    },
}

message_fields! { TensorBox { tensors, slices } => TensorBox { tensors, slices } }

impl Field for Vec<TensorBox> {
    type Wire = Vec<wire::TensorBox>;

    fn into_wire(self) -> Self::Wire {
        self.into_iter().map(Field::into_wire).collect()
    }

    fn from_wire(field: &'static str, wire: Self::Wire) -> Result<Self, MessageError> {
        let (bytes, max) = (wire.iter().map(|each| each.tensors.len()).sum(), SELECTION_MAX_BYTES);
        match bytes > max {
            true => Err(MessageError::TooLarge { what: field, bytes, max }),
            false => list(field, BOXES_MAX, wire, |each| Field::from_wire(field, each)),
        }
    }
}

impl Field for Vec<Slice> {
    type Wire = Vec<wire::Slice>;

    fn into_wire(self) -> Self::Wire {
        self.into_iter().map(Field::into_wire).collect()
    }

    fn from_wire(field: &'static str, wire: Self::Wire) -> Result<Self, MessageError> {
        let slices = list(field, DIMENSIONS_MAX, wire, |slice| Slice::from_wire(field, slice))?;
        match slices.is_sorted_by(|one, next| one.dimension < next.dimension) {
            true => Ok(slices),
            false => Err(MessageError::Malformed("slices that are not of ascending dimensions".into())),
        }
    }
}

impl Field for Slice {
    type Wire = wire::Slice;

    fn into_wire(self) -> wire::Slice {
        let dimension = self.dimension;
        match self.indices {
            Indices::Range { start, length } => {
                wire::Slice { dimension, start, length, ..wire::Slice::default() }
            }
            Indices::Part { part, parts } => wire::Slice { dimension, part, parts, ..wire::Slice::default() },
        }
    }

    fn from_wire(_: &'static str, wire: wire::Slice) -> Result<Self, MessageError> {
        let wire::Slice { dimension, start, length, part, parts } = wire;
        let indices = match (start, length, part, parts) {
            (start, 1.., 0, 0) => Indices::Range { start, length },
            (0, 0, part, parts) if part < parts => Indices::Part { part, parts },
            _ => return Err(MessageError::Malformed("a slice that is neither a range nor a part".into())),
        };
        match (dimension as usize) < DIMENSIONS_MAX {
            true => Ok(Self { dimension, indices }),
            false => Err(MessageError::Malformed("a slice of a dimension that no tensor has".into())),
        }
    }
}
