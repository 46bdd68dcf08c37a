//! The device of a measurement, and a copy engine on it.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr, sync::Arc, time::Duration};
use tensor_relay_device::{
    Capacity, Device, DeviceBuffer, HostEngine, HostEngineMemory, HostMemory,
    cuda::{CudaEngine, CudaMemory, CudaOptions},
};

/// The device of a measurement, as the command line names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceArg {
    /// The reference engine in host memory, which shows that the suite runs.
    Host,
    /// The GPU with this number.
    Cuda(usize),
}

impl FromStr for DeviceArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let ordinal = text.strip_prefix("cuda:").and_then(|ordinal| ordinal.parse().ok());
        match (text, ordinal) {
            ("host", _) => Ok(Self::Host),
            (_, Some(ordinal)) => Ok(Self::Cuda(ordinal)),
            _ => Err(format!("{text:?} is no device: write cuda:0, cuda:1, …, or host")),
        }
    }
}

impl fmt::Display for DeviceArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// An open copy engine, which creates devices with any number and size of slots.
#[derive(Clone)]
pub(super) enum Engine {
    Host(Arc<HostEngine>),
    Cuda(Arc<CudaEngine>),
}

impl Engine {
    /// Opens an engine, with threads and streams of its own.
    pub(super) fn open(device: DeviceArg) -> Result<Self> {
        match device {
            DeviceArg::Host => Ok(Self::Host(Arc::new(HostEngine::new(HostMemory::new(u64::MAX))?))),
            DeviceArg::Cuda(ordinal) => Ok(Self::Cuda(CudaEngine::open(ordinal, cuda_options())?)),
        }
    }

    /// A device with slots of its own on this engine.
    pub(super) fn device(&self, capacity: Capacity) -> Result<Device> {
        let Capacity { slots, slot_bytes } = capacity;
        let device = match self {
            Self::Host(engine) => Device::new(Arc::clone(engine), capacity),
            Self::Cuda(engine) => Device::new(Arc::clone(engine), capacity),
        };
        device.with_context(|| format!("no memory for {slots} slots of {slot_bytes} bytes"))
    }

    /// The memory of `buffer`, which another device of this engine allocated, as a buffer of `device`.
    pub(super) fn adopt(&self, device: &Device, buffer: &DeviceBuffer) -> Result<DeviceBuffer> {
        let adopted = match self {
            Self::Host(_) => buffer.memory::<HostEngineMemory>().and_then(|m| device.wrap::<HostEngine>(m)),
            Self::Cuda(_) => buffer.memory::<CudaMemory>().and_then(|m| device.wrap::<CudaEngine>(m)),
        };
        adopted.with_context(|| {
            format!("the buffer of {} belongs to another kind of engine", buffer.device().name())
        })
    }
}

/// CUDA's default options, with shorter timeouts for a device that hangs.
fn cuda_options() -> CudaOptions {
    CudaOptions {
        copy_timeout: Duration::from_secs(5),
        answer_timeout: Duration::from_secs(20),
        ..CudaOptions::default()
    }
}
