use cudarc::driver::sys::CUdevice_attribute;

use super::{
    device_uuid::DeviceUuid,
    driver::Driver,
    error::CudaError,
    gpu,
    probe::{probe, query_aside},
};

/// The properties of a device that the driver reports without a context.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The ordinal among the devices visible to this process (`CUDA_VISIBLE_DEVICES`): 0 for `cuda:0`.
    pub ordinal: usize,
    /// The model: `NVIDIA H100 80GB HBM3`.
    pub name: String,
    /// The PCI bus address: `0000:17:00.0`, the same in NVML and in sysfs.
    pub pci_bus_id: String,
    /// The UUID, the same in every process; `None` if the driver does not report it.
    pub uuid: Option<DeviceUuid>,
    /// The compute capability: (9, 0) for Hopper.
    pub compute_capability: (u32, u32),
    /// The size of the device's memory.
    pub total_bytes: u64,
}

/// All devices visible to this process. Without CUDA, the error says what is missing.
pub fn devices() -> Result<Vec<DeviceInfo>, CudaError> {
    let driver = probe()?;
    query_aside("the CUDA driver", move || {
        (0..driver.device_count())
            .map(|ordinal| DeviceInfo::query(&driver, ordinal))
            .collect()
    })
}

/// The free and total memory of a device.
///
/// Queries the driver in a context, on a separate thread: this takes some hundred milliseconds, and temporarily some
/// hundred megabytes of device memory, unless this process already has a context. NVML reports the same at less cost.
pub fn device_memory(ordinal: usize) -> Result<DeviceMemory, CudaError> {
    let driver = probe()?;
    query_aside(&format!("cuda:{ordinal}"), move || {
        let (free_bytes, total_bytes) = gpu::query_memory(&driver, ordinal)?;
        Ok(DeviceMemory { free_bytes, total_bytes })
    })
}

/// The free and total memory of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMemory {
    /// The free bytes.
    pub free_bytes: u64,
    /// The total bytes.
    pub total_bytes: u64,
}

impl DeviceInfo {
    pub(super) fn query(driver: &Driver, ordinal: usize) -> Result<Self, CudaError> {
        let device = driver.device(ordinal)?;
        let capability = |attribute| {
            let value = driver.attribute(device, attribute)?;
            Ok::<_, CudaError>(u32::try_from(value).unwrap_or(0))
        };
        let major = capability(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = capability(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        Ok(Self {
            ordinal,
            name: driver.device_name(device)?,
            pci_bus_id: driver.pci_bus_id(device)?,
            uuid: driver.uuid(device).ok(),
            compute_capability: (major, minor),
            total_bytes: driver.total_bytes(device)?,
        })
    }
}
