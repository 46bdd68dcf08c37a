//! The boxes of tensors that a subscription selects (PROTOCOL.md §5.5).

use super::{
    Field, SELECTION_MAX_BYTES,
    field::{list, message_fields},
    wire,
};
use crate::{Bounds, Glob, MessageError, Shape, files::is_reserved};
use std::{fmt, ops::Range};

/// The most boxes in one subscription.
pub const BOXES_MAX: usize = 256;

/// The most slices of all boxes of a subscription, so that the message stays within its frame.
const SLICES_MAX: usize = 512;

/// The most dimensions of a tensor.
const DIMENSIONS_MAX: usize = 16;

/// The box that is selected of each tensor whose name matches.
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
        /// The number of them.
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

impl TensorBox {
    /// Whether it is for the tensor called `name`. None is for the side files of a folder.
    pub fn is_for(&self, name: &str) -> bool {
        self.tensors.matches(name) && !is_reserved(name)
    }

    /// The box of a tensor of this shape, cut off at its ends.
    pub fn bounds(&self, shape: &Shape) -> Bounds {
        let slice = |dimension| self.slices.iter().find(|slice| slice.dimension == dimension);
        let lengths = (0..).zip(shape.dimensions());
        Bounds::new(lengths.map(|(dimension, length)| {
            slice(dimension).map_or(0..*length, |slice| slice.indices.of(*length))
        }))
    }
}

impl Indices {
    /// These indices of a dimension of this length.
    pub fn of(self, length: u64) -> Range<u64> {
        let (start, count) = match self {
            Self::Range { start, length } => (start, length),
            Self::Part { part, parts } => {
                let each = length.div_ceil(u64::from(parts).max(1));
                (each.saturating_mul(part.into()), each)
            }
        };
        let start = start.min(length);
        start..start.saturating_add(count).min(length)
    }
}

impl fmt::Display for TensorBox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let slices: Vec<_> = self.slices.iter().map(Slice::to_string).collect();
        write!(f, "[{}]", slices.join(", "))
    }
}

impl fmt::Display for Slice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dimension = self.dimension;
        match self.indices {
            Indices::Range { start, length } => {
                write!(f, "{start}:{} of dimension {dimension}", start.saturating_add(length))
            }
            Indices::Part { part, parts } => write!(f, "part {part} of {parts} of dimension {dimension}"),
        }
    }
}

message_fields! { TensorBox { tensors, slices } => TensorBox { tensors, slices } }

/// Checks that boxes are well formed, and not too many for a message.
///
/// # Errors
/// The rule of PROTOCOL.md §5.5 (1, 2) that they break.
pub fn check_boxes(boxes: &[TensorBox]) -> Result<(), &'static str> {
    let globs_bytes: usize = boxes.iter().map(|each| each.tensors.as_str().len()).sum();
    let slices: usize = boxes.iter().map(|each| each.slices.len()).sum();
    match boxes.len() > BOXES_MAX || globs_bytes > SELECTION_MAX_BYTES || slices > SLICES_MAX {
        true => Err("there are more than 256 of them, of 8,192 bytes of globs and 512 slices together"),
        false => boxes.iter().try_for_each(|each| check_slices(&each.slices)),
    }
}

fn check_slices(slices: &[Slice]) -> Result<(), &'static str> {
    let is_beyond = |slice: &Slice| matches!(slice.indices, Indices::Part { part, parts } if part >= parts);
    match slices {
        _ if !slices.is_sorted_by(|one, next| one.dimension < next.dimension) => {
            Err("slices are not of ascending dimensions")
        }
        _ if slices.iter().any(|slice| slice.dimension as usize >= DIMENSIONS_MAX) => {
            Err("a slice is of a dimension that no tensor has")
        }
        _ if slices.iter().any(is_beyond) => Err("a slice is a part beyond the last one"),
        _ => Ok(()),
    }
}

impl Field for Vec<TensorBox> {
    type Wire = Vec<wire::TensorBox>;

    fn into_wire(self) -> Self::Wire {
        self.into_iter().map(Field::into_wire).collect()
    }

    fn from_wire(field: &'static str, wire: Self::Wire) -> Result<Self, MessageError> {
        let boxes: Self = list(field, BOXES_MAX, wire, |each| Field::from_wire(field, each))?;
        let malformed = |why| MessageError::Malformed(format!("boxes: {why}"));
        check_boxes(&boxes).map(|()| boxes).map_err(malformed)
    }
}

impl Field for Vec<Slice> {
    type Wire = Vec<wire::Slice>;

    fn into_wire(self) -> Self::Wire {
        self.into_iter().map(Field::into_wire).collect()
    }

    fn from_wire(field: &'static str, wire: Self::Wire) -> Result<Self, MessageError> {
        list(field, DIMENSIONS_MAX, wire, |slice| Slice::from_wire(field, slice))
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
            (start, length, 0, 0) => Indices::Range { start, length },
            (0, 0, part, parts) => Indices::Part { part, parts },
            _ => return Err(MessageError::Malformed("a slice that is neither a range nor a part".into())),
        };
        Ok(Self { dimension, indices })
    }
}
