//! The memory that this process uses for a GPU, there and on the host.

use serde_json::{Map, Value};
use std::sync::{Arc, Weak};
use tensor_relay_device::{
    Device,
    cuda::{CudaEngine, CudaStats},
};

/// A reader of a GPU's memory use that does not keep the GPU open.
#[derive(Debug, Clone, Default)]
pub(crate) struct DeviceMemory(Weak<CudaEngine>);

impl DeviceMemory {
    /// The reader for `device`; without a GPU, it reports nothing.
    pub(crate) fn of(device: Option<&Device>) -> Self {
        let engine = device.and_then(|device| device.engine::<CudaEngine>());
        Self(engine.map(Arc::downgrade).unwrap_or_default())
    }

    /// The memory in bytes, by kind; empty without an open GPU.
    pub(super) fn bytes(&self) -> Vec<(&'static str, u64)> {
        let Some(engine) = self.0.upgrade() else { return vec![] };
        let CudaStats { pinned_bytes, device_bytes, cached_bytes, .. } = engine.stats();
        vec![("pinned", pinned_bytes), ("device", device_bytes), ("device_reusable", cached_bytes)]
    }
}

/// The memory of versions as a JSON object: of the host by kind, then that of `device`.
pub(super) fn as_object(host: &[(&str, u64)], device: &DeviceMemory) -> Map<String, Value> {
    let all = host.iter().copied().chain(device.bytes());
    all.map(|(kind, bytes)| (format!("{kind}_bytes"), bytes.into())).collect()
}
