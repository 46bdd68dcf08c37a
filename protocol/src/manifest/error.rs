//! [`ManifestError`].

use super::CutsError;
use crate::{NameError, ShapeError, TensorName};

/// Why bytes from a peer are not a valid manifest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ManifestError {
    /// The bytes are not this protobuf message.
    #[error("the manifest is malformed: {0}")]
    Malformed(String),
    /// A tensor name that breaks a rule.
    #[error("the manifest contains an invalid tensor name: {0}")]
    Name(#[from] NameError),
    /// A shape that breaks a rule.
    #[error("tensor {name:?} of the manifest has no valid shape: {source}")]
    Shape {
        /// The tensor.
        name: TensorName,
        /// The reason.
        source: ShapeError,
    },
    /// A dtype of a later revision.
    #[error(
        "tensor {name:?} has a dtype with code {code} that this build does not know: update tensor-relay here"
    )]
    UnknownDtype {
        /// The tensor.
        name: TensorName,
        /// The received code.
        code: u32,
    },
    /// Two tensors with one name.
    #[error("the manifest names {0:?} twice")]
    DuplicateName(TensorName),
    /// A tensor that is cut in a way that breaks a rule.
    #[error("tensor {name:?} of the manifest is not cut by the rules: {source}")]
    Cuts {
        /// The tensor.
        name: TensorName,
        /// The reason.
        source: CutsError,
    },
    /// A tensor whose numbers of pieces, offsets and owners differ, or that is not laid out as the manifest says.
    #[error("tensor {0:?} does not have the offset and owner of each of its pieces that the layout requires")]
    Pieces(TensorName),
    /// A layout of a later revision.
    #[error("the manifest has layout {0}, which this build does not know: update tensor-relay here")]
    UnknownLayout(u32),
    /// A tensor whose offset breaks the rules of layout.
    #[error("tensor {0:?} of the manifest overlaps another, lies outside of the payload or is not aligned")]
    Misplaced(TensorName),
    /// A payload size that contradicts the tensors, or a chunk size that is not a multiple of 256.
    #[error("the manifest states a {what} size of {stated} bytes where {computed} would be valid")]
    WrongSize {
        /// The size in question: `payload` or `chunk`.
        what: &'static str,
        /// The stated value.
        stated: u64,
        /// A valid value.
        computed: u64,
    },
    /// More tensors, bytes or chunks than this end accepts.
    #[error("the manifest has {found} {what}, and this end accepts at most {max}")]
    TooMuch {
        /// The counted items or bytes.
        what: &'static str,
        /// The number of them, or a lower bound of that number.
        found: u64,
        /// The limit.
        max: u64,
    },
}
