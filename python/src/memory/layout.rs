//! [`Layout`]: what the elements of a lent tensor are, and where they lie.

use super::{footprint::Footprint, strides::ContiguousRuns};
use std::ptr::NonNull;
use tensor_relay_client::Dtype;

/// The description of a lent tensor, on the host or on a GPU. It accesses no element.
#[derive(Debug)]
pub(crate) struct Layout {
    /// The GPU of the memory; `None` for the host.
    pub(super) gpu: Option<usize>,
    /// The first element.
    pub(super) start: NonNull<u8>,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
    pub(super) len: usize,
    pub(super) runs: ContiguousRuns,
    pub(super) is_writable: bool,
}

/// The identity of a tensor's memory and layout: equal for tied weights.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Identity {
    address: usize,
    dtype: Dtype,
    shape: Vec<u64>,
    outer: Vec<(u64, isize)>,
}

impl Layout {
    pub(crate) fn dtype(&self) -> Dtype {
        self.dtype
    }

    pub(crate) fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// The size of the tensor in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The address of the first element, on the host or on a device.
    pub(super) fn address(&self) -> usize {
        self.start.as_ptr().addr()
    }

    /// Whether the tensor is contiguous.
    pub(crate) fn is_dense(&self) -> bool {
        self.runs.is_one()
    }

    pub(crate) fn is_writable(&self) -> bool {
        self.is_writable
    }

    /// The addresses that the tensor occupies; `None` for an empty tensor.
    pub(crate) fn footprint(&self) -> Option<Footprint> {
        (self.len > 0).then(|| Footprint::new(self.gpu, self.address(), &self.runs))
    }

    /// The identity of the memory, by which aliases are found; `None` for an empty tensor.
    pub(crate) fn identity(&self) -> Option<Identity> {
        (self.len > 0).then(|| Identity {
            address: self.address(),
            dtype: self.dtype,
            shape: self.shape.clone(),
            outer: self.runs.outer().to_vec(),
        })
    }
}
