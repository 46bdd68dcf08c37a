//! Tensors imported and exported without a copy, by DLPack and by Python's buffer protocol.
//!
//! All `unsafe` of this crate is here, except `Tensor::__getbuffer__`, which calls [`fill_view`]. An imported tensor is
//! [`Lent`] memory, on the host ([`Foreign`]) or on a GPU ([`OnGpu`]), with a [`Layout`](layout::Layout); a
//! [`Tensor`](crate::tensor::Tensor) exports our memory, on the host or on a GPU ([`Readable`]).

mod buffer;
mod dlpack;
mod export;
mod footprint;
mod foreign;
mod import;
mod layout;
mod on_gpu;
mod places;
mod readable;
mod returning;
mod stream;
mod strides;

pub(crate) use buffer::{ViewSource, fill_view, format_of};
pub(crate) use dlpack::{DataType, to_dlpack};
pub(crate) use export::{Export, Exported, capsule};
pub(crate) use footprint::{Footprint, overlapping};
pub(crate) use foreign::{Exclusive, Foreign};
pub(crate) use import::{Lent, Unordered, not_lent};
pub(crate) use layout::Identity;
pub(crate) use on_gpu::{OnGpu, no_bytes};
pub(crate) use places::Places;
pub(crate) use readable::{Readable, Reading};
pub(crate) use returning::{Returning, ToReturn};
pub(crate) use stream::Stream;
pub(crate) use strides::dense;

/// DLPack's device of host memory.
pub(crate) const CPU: (i32, i32) = (dlpack::DEVICE_CPU, 0);
