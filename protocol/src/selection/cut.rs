//! Tensors that are not selected whole.

use crate::{Bounds, Dtype, Indices, Manifest, RangeSet, Tensor, TensorBox, TensorName};
use std::collections::HashMap;

/// A box of a tensor.
#[derive(Debug)]
pub(super) struct Cut {
    pub(super) bounds: Bounds,
    /// The box as a tensor.
    pub(super) tensor: Tensor,
}

/// Why a box does not fit a version. The receiver is to blame, or the publisher has changed its layout.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BoxError {
    /// No tensor has the name that a box is for.
    #[error("there is no tensor {0:?}, of which a box is wanted")]
    NoSuchTensor(Box<str>),
    /// A box that ends beyond its tensor, or cuts a dimension that it does not have.
    #[error("the box {wanted} does not fit tensor {name:?} of shape {shape}")]
    Outside {
        /// The tensor.
        name: TensorName,
        /// The box.
        wanted: Box<str>,
        /// The shape of the tensor.
        shape: Box<str>,
    },
    /// A box that begins or ends within a byte.
    #[error(
        "the box {wanted} of tensor {name:?}, of {dtype}, does not begin and end at whole bytes: widen it"
    )]
    NotWholeBytes {
        /// The tensor.
        name: TensorName,
        /// The box.
        wanted: Box<str>,
        /// Its dtype.
        dtype: Dtype,
    },
    /// A box of a tensor that shares its bytes with one of another shape.
    #[error("tensor {name:?} shares its bytes with {other:?}, of another shape: receive it whole")]
    OtherShape {
        /// The tensor.
        name: TensorName,
        /// The first one with these bytes.
        other: TensorName,
    },
}

/// The boxes of the selected `tensors` that are not selected whole, by index; and the first reason for which a box is not
/// exactly what was requested: it is cut off at the tensor's end, or the tensor is selected whole instead.
pub(super) fn cut(
    manifest: &Manifest,
    tensors: &RangeSet,
    boxes: &[TensorBox],
) -> (HashMap<u32, Cut>, Option<BoxError>) {
    let owners = owners(manifest);
    let (mut cuts, mut misfit) = (HashMap::new(), None);
    for index in tensors.iter() {
        let tensor = &manifest.tensors()[index as usize];
        let Some(wanted) = boxes.iter().find(|each| each.is_for(tensor.name.as_str())) else { continue };
        let bounds = wanted.bounds(&tensor.shape);
        let checked = check(wanted, tensor).and_then(|()| check_bounds(&bounds, tensor, &owners));
        let is_whole = match checked {
            Err(BoxError::NotWholeBytes { .. } | BoxError::OtherShape { .. }) => true,
            _ => bounds.is_whole(&tensor.shape),
        };
        misfit = misfit.or_else(|| checked.err());
        if !is_whole {
            cuts.insert(index, Cut { tensor: tensor.cut(&bounds), bounds });
        }
    }
    (cuts, misfit.or_else(|| missing(manifest, boxes)))
}

/// The first box that is for a tensor by its name, if there is no such tensor.
fn missing(manifest: &Manifest, boxes: &[TensorBox]) -> Option<BoxError> {
    let mut names = boxes.iter().map(|each| &each.tensors).filter(|glob| glob.is_literal());
    let missing = names.find(|name| manifest.tensor(name.as_str()).is_none())?;
    Some(BoxError::NoSuchTensor(missing.as_str().into()))
}

/// The first tensor at each place of the payload.
fn owners(manifest: &Manifest) -> HashMap<u64, &Tensor> {
    let mut owners = HashMap::new();
    for tensor in manifest.tensors().iter().filter(|tensor| tensor.byte_len() > 0) {
        owners.entry(tensor.offset()).or_insert(tensor);
    }
    owners
}

/// Checks that a box lies within a tensor.
fn check(wanted: &TensorBox, tensor: &Tensor) -> Result<(), BoxError> {
    let dimensions = tensor.shape.dimensions();
    let fits =
        wanted
            .slices
            .iter()
            .all(|slice| match (slice.indices, dimensions.get(slice.dimension as usize)) {
                (Indices::Range { start, length }, Some(end)) => start.saturating_add(length) <= *end,
                (Indices::Range { .. }, None) => false,
                (Indices::Part { .. }, _) => true,
            });
    let outside = || {
        let (wanted, shape) = (wanted.to_string().into(), tensor.shape.to_string().into());
        BoxError::Outside { name: tensor.name.clone(), wanted, shape }
    };
    fits.then_some(()).ok_or_else(outside)
}

/// Checks that a box within a tensor can be received alone.
fn check_bounds(bounds: &Bounds, tensor: &Tensor, owners: &HashMap<u64, &Tensor>) -> Result<(), BoxError> {
    let name = tensor.name.clone();
    if !bounds.has_whole_bytes(tensor.dtype, &tensor.shape) {
        return Err(BoxError::NotWholeBytes { name, wanted: bounds.to_string().into(), dtype: tensor.dtype });
    }
    match owners.get(&tensor.offset()).filter(|_| tensor.byte_len() > 0) {
        Some(owner) if owner.shape != tensor.shape && !bounds.is_whole(&tensor.shape) => {
            Err(BoxError::OtherShape { name, other: owner.name.clone() })
        }
        _ => Ok(()),
    }
}
