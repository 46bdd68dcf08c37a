//! GPU memory lent by a tensor of another library.
#![allow(unsafe_code, reason = "lends the memory of other libraries' tensors to a copy engine")]

use super::{
    footprint::Footprint,
    foreign::{Foreign, Identity},
    returning::ToReturn,
};
use crate::gpu;
use pyo3::prelude::*;
use tensor_relay_client::Dtype;
use tensor_relay_device::{
    Device, DeviceBuffer,
    cuda::{CudaEngine, Fence},
};

/// A tensor of another library on a GPU. The processor cannot reach its elements, so all there is to do with it is to lend
/// it to the GPU's engine.
#[derive(Debug)]
pub(crate) struct OnGpu {
    /// Its memory is at an address of the device.
    tensor: Foreign,
    device: Device,
}

impl OnGpu {
    /// `tensor`, whose library says that it lies on `device`.
    pub(super) fn new(tensor: Foreign, device: Device) -> Self {
        Self { tensor, device }
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn dtype(&self) -> Dtype {
        self.tensor.dtype()
    }

    pub(crate) fn shape(&self) -> &[u64] {
        self.tensor.shape()
    }

    /// The size of its elements in bytes.
    pub(crate) fn len(&self) -> usize {
        self.tensor.len()
    }

    /// Whether its elements lie side by side, in order.
    pub(crate) fn is_dense(&self) -> bool {
        self.tensor.is_dense()
    }

    pub(crate) fn is_writable(&self) -> bool {
        self.tensor.is_writable()
    }

    pub(super) fn footprint(&self) -> Option<Footprint> {
        self.tensor.footprint(Some(gpu::engine(&self.device).info().ordinal))
    }

    pub(crate) fn identity(&self) -> Option<Identity> {
        self.tensor.identity()
    }

    pub(super) fn taken_for(self, dtype: Dtype) -> Self {
        Self { tensor: self.tensor.taken_for(dtype), ..self }
    }

    /// Gives the memory back now, where the interpreter is at hand.
    pub(crate) fn give_back(self, py: Python<'_>) {
        self.tensor.give_back(py);
    }

    /// Lends its memory to copies, none of which begins before `ready` is passed. It comes back, by `back`, when none runs
    /// and nobody holds the buffer.
    ///
    /// # Panics
    /// When its elements do not lie side by side.
    pub(crate) fn into_buffer(self, ready: Fence, back: ToReturn) -> DeviceBuffer {
        assert!(self.is_dense(), "asked before");
        let Self { tensor, device } = self;
        let (address, len, ready) = match tensor.len() {
            0 => (0, 0, None), // Nothing is read, so nothing is waited for.
            len => (tensor.address() as u64, len, Some(ready)),
        };
        // SAFETY: the tensor's library vouches that so many bytes lie there, in memory of this device, and stay while the
        // tensor is kept. All processes of CUDA's runtime use its primary context. What was put on streams before to use
        // the memory is behind `ready`, since the library was given the engine's stream to make it wait (`__dlpack__`).
        // That nobody writes it while it is read, nor touches it while it is written, is the user's promise, as on the
        // host.
        let memory = unsafe { gpu::engine(&device).lend(address, len, back.bring(tensor), ready) };
        device.wrap::<CudaEngine>(memory).expect("memory of this engine")
    }
}

/// A buffer without bytes, for a tensor that has its memory under another name.
pub(crate) fn no_bytes(device: &Device) -> DeviceBuffer {
    // SAFETY: there is no byte.
    let memory = unsafe { gpu::engine(device).lend(0, 0, (), None) };
    device.wrap::<CudaEngine>(memory).expect("memory of this engine")
}
