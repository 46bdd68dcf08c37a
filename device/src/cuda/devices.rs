use cudarc::driver::sys::CUdevice_attribute;

use super::{
    device_uuid::DeviceUuid,
    driver::Driver,
    error::CudaError,
    gpu,
    probe::{ask_aside, probe},
};

/// The properties of a device that the driver reports without a context.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The ordinal: `cuda:0` is 0. Counted among the devices visible to this process (`CUDA_VISIBLE_DEVICES`).
    pub ordinal: usize,
    /// Its model: `NVIDIA H100 80GB HBM3`.
    pub name: String,
    /// The PCI bus address: `0000:17:00.0`, the same in NVML and in sysfs.
    pub pci_bus_id: String,
    /// The UUID, the same in every process; `None` if the driver does not report it.
    pub uuid: Option<DeviceUuid>,
    /// The architecture: (9, 0) for Hopper.
    pub compute_capability: (u32, u32),
    /// The size of its memory.
    pub total_bytes: u64,
}

/// All devices visible to this process. Fails without CUDA, and says what is missing.
pub fn devices() -> Result<Vec<DeviceInfo>, CudaError> {
    let driver = probe()?;
    ask_aside("the CUDA driver", move || {
        (0..driver.devices()).map(|ordinal| DeviceInfo::ask(&driver, ordinal)).collect()
    })
}

/// The free and total memory of a device.
///
/// Queries the driver in a context, on a thread of its own: that takes some hundred milliseconds, and as many megabytes
/// of the device meanwhile, unless this process uses it already. NVML reports the same for less.
pub fn device_memory(ordinal: usize) -> Result<DeviceMemory, CudaError> {
    let driver = probe()?;
    ask_aside(&format!("cuda:{ordinal}"), move || {
        let (free_bytes, total_bytes) = gpu::measure(&driver, ordinal)?;
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
            uuid: driver.uuid(device).ok(),
            compute_capability: (major, minor),
            total_bytes: driver.total_bytes(device)?,
        })
    }
}
