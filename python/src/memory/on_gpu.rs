//! GPU memory lent by a tensor of another library.
#![allow(unsafe_code, reason = "lends the memory of other libraries' tensors to a copy engine")]

use super::{foreign::Foreign, layout::Layout, returning::ToReturn};
use crate::gpu;
use pyo3::prelude::*;
use std::ops::Deref;
use tensor_relay_device::{
    Device, DeviceBuffer,
    cuda::{CudaEngine, Fence},
};

/// A tensor of another library on a GPU. The processor cannot access its elements, so it is lent to the GPU's engine.
#[derive(Debug)]
pub(crate) struct OnGpu {
    /// The tensor. Its address is one of the device.
    pub(super) tensor: Foreign,
    device: Device,
}

impl Deref for OnGpu {
    type Target = Layout;

    fn deref(&self) -> &Layout {
        &self.tensor
    }
}

impl OnGpu {
    /// A tensor that lies on `device`, as its library reports.
    pub(super) fn new(tensor: Foreign, device: Device) -> Self {
        Self { tensor, device }
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the memory to its library at once, with the GIL held.
    pub(crate) fn give_back(self, py: Python<'_>) {
        self.tensor.give_back(py);
    }

    /// Lends the memory to copies, none of which begins before `ready` has passed. It goes back by way of
    /// `to_return` when no copy runs and the buffer is dropped.
    ///
    /// # Panics
    /// If the tensor is not contiguous.
    pub(crate) fn into_buffer(self, ready: Fence, to_return: ToReturn) -> DeviceBuffer {
        assert!(self.is_dense(), "the caller has checked this");
        let Self { tensor, device } = self;
        let (address, len, ready) = match tensor.len() {
            0 => (0, 0, None), // Nothing is read, so nothing is waited for.
            len => (tensor.address() as u64, len, Some(ready)),
        };
        // SAFETY: the tensor's library vouches that `len` bytes of this device's memory begin at `address`, and stay
        // valid while the tensor is kept. All libraries on CUDA's runtime use the device's primary context. Earlier
        // work on that memory completes before `ready`, because the library made the engine's stream wait for it
        // (`__dlpack__`): at the export, or at `Unordered::order`, which is called before tensors are lent. The user promises not to write to it while it is read, and not to use it while it is written,
        // as on the host.
        let memory = unsafe { gpu::engine(&device).lend(address, len, to_return.attach(tensor), ready) };
        device.wrap::<CudaEngine>(memory).expect("memory of this engine")
    }
}

/// A buffer without bytes, for an alias, whose memory belongs to another tensor.
pub(crate) fn no_bytes(device: &Device) -> DeviceBuffer {
    // SAFETY: the buffer has no bytes.
    let memory = unsafe { gpu::engine(device).lend(0, 0, (), None) };
    device.wrap::<CudaEngine>(memory).expect("memory of this engine")
}
