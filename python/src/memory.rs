//! Tensors handed over without a copy, in both directions: by DLPack, and by Python's buffer protocol.
//!
//! All `unsafe` of this crate is here. [`Foreign`] is memory that somebody else owns, [`Tensor`](crate::tensor::Tensor)
//! gives out what is ours. Tensors on GPUs have their place here, too: DLPack says on which device memory is.

mod buffer;
mod dlpack;
mod export;
mod foreign;
mod import;
mod strides;

pub(crate) use buffer::{Viewed, fill_view, format_of};
pub(crate) use dlpack::{DataType, data_type_of};
pub(crate) use export::{Export, capsule};
pub(crate) use foreign::{Exclusive, Foreign, Identity};
pub(crate) use strides::dense;

/// DLPack's number for memory of the host.
pub(crate) const CPU: (i32, i32) = (dlpack::DEVICE_CPU, 0);
