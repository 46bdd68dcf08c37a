use std::{sync::mpsc, thread, time::Duration};

use cudarc::driver::sys::CUdevice_attribute;

use super::{
    driver::{Driver, probe},
    error::CudaError,
    gpu,
};

/// What the driver says of a device, without a context on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Which one: `cuda:0` is 0. Counted among those that this process sees (`CUDA_VISIBLE_DEVICES`).
    pub ordinal: usize,
    /// Its model: `NVIDIA H100 80GB HBM3`.
    pub name: String,
    /// Where it is on the PCI bus: `0000:17:00.0`. The same device has the same place in NVML and in sysfs.
    pub pci_bus_id: String,
    /// Its generation: (9, 0) for Hopper.
    pub compute_capability: (u32, u32),
    /// Its memory.
    pub total_bytes: u64,
}

/// All devices that this process sees. Fails where there is no CUDA, and says what is missing.
pub fn devices() -> Result<Vec<DeviceInfo>, CudaError> {
    let driver = probe()?;
    (0..driver.devices()).map(|ordinal| DeviceInfo::ask(&driver, ordinal)).collect()
}

/// How much memory of a device is free, and how much there is.
///
/// Asks the driver in a context, on a thread of its own: that takes some hundred milliseconds, and as many megabytes of
/// the device meanwhile, where nothing else in this process uses it. NVML knows the same for less.
pub fn device_memory(ordinal: usize) -> Result<DeviceMemory, CudaError> {
    let driver = probe()?;
    let device = format!("cuda:{ordinal}");
    let (reply, answer) = mpsc::sync_channel(1);
    let measure = move || {
        let measured = gpu::measure(&driver, ordinal);
        // Nobody waits any more: the number is of no use.
        let _ =
            reply.send(measured.map(|(free_bytes, total_bytes)| DeviceMemory { free_bytes, total_bytes }));
    };
    thread::Builder::new()
        .name("relay-look".into())
        .spawn(measure)
        .map_err(|error| CudaError::NoThread { device: device.clone(), reason: error.to_string() })?;
    let waited = MEASURE_TIMEOUT;
    answer
        .recv_timeout(waited)
        .unwrap_or(Err(CudaError::NoAnswer { device, waited }))
}

/// The memory of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Bytes that nobody has.
    pub free_bytes: u64,
    /// All of them.
    pub total_bytes: u64,
}

/// Making a context takes less than a second, unless the device is in trouble.
const MEASURE_TIMEOUT: Duration = Duration::from_secs(20);

impl DeviceInfo {
    pub(super) fn ask(driver: &Driver, ordinal: usize) -> Result<Self, CudaError> {
        let device = driver.device(ordinal)?;
        let capability = |attribute| {
            let number = driver.attribute(device, attribute)?;
            Ok::<_, CudaError>(u32::try_from(number).unwrap_or(0))
        };
        let major = capability(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = capability(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        Ok(Self {
            ordinal,
            name: driver.device_name(device)?,
            pci_bus_id: driver.pci_bus_id(device)?,
            compute_capability: (major, minor),
            total_bytes: driver.total_bytes(device)?,
        })
    }
}
