//! The GPU memory used by this process.

use std::sync::{Arc, Weak};
use tensor_relay_device::{
    Device,
    cuda::{CudaEngine, CudaStats},
};

/// Reads the memory use of a GPU while it is open, and does not keep it open.
#[derive(Debug, Clone, Default)]
pub(crate) struct DeviceMemory(Weak<CudaEngine>);

impl DeviceMemory {
    /// The memory of `device`, if it is a GPU.
    pub(crate) fn of(device: Option<&Device>) -> Self {
        let engine = device.and_then(|device| device.engine::<CudaEngine>());
        Self(engine.map(Arc::downgrade).unwrap_or_default())
    }

    /// The used memory by kind; empty without a GPU.
    pub(super) fn bytes(&self) -> Vec<(&'static str, u64)> {
        let Some(engine) = self.0.upgrade() else { return vec![] };
        let CudaStats { pinned_bytes, device_bytes, cached_bytes, .. } = engine.stats();
        vec![("pinned", pinned_bytes), ("device", device_bytes), ("device_reusable", cached_bytes)]
    }
}
