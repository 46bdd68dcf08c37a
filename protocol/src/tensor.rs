//! What a tensor is: an element type, a shape, and perhaps its place in a larger whole.

mod dtype;
mod shape;

pub use dtype::Dtype;
pub use shape::{Shape, ShapeError, Shard};
