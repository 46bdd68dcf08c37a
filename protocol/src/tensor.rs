//! Tensors: element types, shapes, and shards.

mod dtype;
mod shape;

pub use dtype::Dtype;
pub use shape::{Shape, ShapeError, Shard};
