//! Errors of the user's buffers.

/// Why a version cannot be received into the user's buffers.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BufferError {
    /// The version has no tensor of that name.
    #[error(
        "there is a buffer for tensor {name}, and the version has no such tensor: take the names from its manifest"
    )]
    NoSuchTensor {
        /// The buffer's name.
        name: Box<str>,
    },
    /// The subscription does not select the tensor.
    #[error(
        "there is a buffer for tensor {name}, which the subscription does not select: add it to the selection"
    )]
    NotSelected {
        /// The buffer's name.
        name: Box<str>,
    },
    /// The buffer is longer or shorter than its tensor.
    #[error(
        "tensor {name} has {expected_bytes} bytes, but its buffer has {given_bytes}: give a buffer of exactly that size"
    )]
    WrongSize {
        /// The buffer's name.
        name: Box<str>,
        /// The bytes of the tensor.
        expected_bytes: u64,
        /// The bytes of the buffer.
        given_bytes: u64,
    },
    /// The tensor's dtype or shape is not the [expected](crate::Buffers::expect) one.
    #[error(
        "tensor {name} is {found}, and its buffer is for {expected}: give a buffer of that dtype and shape"
    )]
    OtherTensor {
        /// The buffer's name.
        name: Box<str>,
        /// The dtype and shape that were expected.
        expected: Box<str>,
        /// Those of the tensor.
        found: Box<str>,
    },
    /// The names of the version's tensors and of the buffers differ.
    #[error("{}", other_names(missing, unexpected))]
    OtherNames {
        /// The selected tensors without a buffer.
        missing: Box<[Box<str>]>,
        /// The buffers without a selected tensor.
        unexpected: Box<[Box<str>]>,
    },
    /// The version has none of the buffers' tensors, or none is selected.
    #[error(
        "the version has none of the tensors that there are buffers for, or none is selected: it has {}, and the buffers are \
         for {}; correct the names",
        list_names(tensors),
        list_names(buffers)
    )]
    NothingInCommon {
        /// The names of the version's tensors.
        tensors: Box<[Box<str>]>,
        /// The buffers' names.
        buffers: Box<[Box<str>]>,
    },
    /// Two tensors share one buffer, but are separate in the version.
    #[error(
        "tensors {name} and {to} have one buffer, but do not share their bytes in the version: give each its own buffer"
    )]
    NotTied {
        /// One tensor's name.
        name: Box<str>,
        /// The other's.
        to: Box<str>,
    },
    /// The tensors are not in host memory.
    #[error(
        "the snapshot is on {device}, and cannot be copied in one step: copy the result of `Snapshot::to_host`"
    )]
    OnDevice {
        /// The device of the tensors.
        device: Box<str>,
    },
    /// The buffers are not all on one device.
    #[error(
        "the buffers for tensors {name} and {other} are on different devices: give buffers on one device"
    )]
    SeveralDevices {
        /// One buffer's name.
        name: Box<str>,
        /// The other's.
        other: Box<str>,
    },
    /// A copy of an earlier, aborted version to this buffer may still be running.
    #[error("the device has not finished its copies to the buffer for tensor {name}: give another buffer")]
    Withheld {
        /// The buffer's name.
        name: Box<str>,
    },
    /// Two names have one tensor (tied weights), and each has a buffer.
    #[error("tensors {name} and {other} share their bytes: give a buffer for one of them")]
    Shared {
        /// One buffer's name.
        name: Box<str>,
        /// The other's.
        other: Box<str>,
    },
}

fn other_names(missing: &[Box<str>], unexpected: &[Box<str>]) -> String {
    let missing = (!missing.is_empty())
        .then(|| format!("there is no buffer for the version's tensors {}", list_names(missing)));
    let unexpected = (!unexpected.is_empty()).then(|| {
        format!(
            "the version has no tensors, or none that are selected, for the buffers {}",
            list_names(unexpected)
        )
    });
    missing.into_iter().chain(unexpected).collect::<Vec<_>>().join("; ")
}

/// The maximum number of names in a message.
const NAMES_MAX: usize = 10;

/// The first names, and the number of the others.
fn list_names(names: &[Box<str>]) -> String {
    let shown = names
        .iter()
        .take(NAMES_MAX)
        .map(AsRef::as_ref)
        .collect::<Vec<&str>>()
        .join(", ");
    match names.len().saturating_sub(NAMES_MAX) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}
