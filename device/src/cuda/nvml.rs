//! NVML queries: the GPUs' memory without a context, and the processes that use them, which the CUDA driver does not
//! report.
//!
//! For diagnostics only: in a container NVML exists only with the driver capability `utility`. Nothing here panics,
//! even if the library of that name is not NVML.

use nvml_wrapper::{Device, Nvml, enums::device::UsedGpuMemory, error::NvmlError};

use super::devices::DeviceMemory;

/// A process that computes on a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceProcess {
    /// The process id in the host's PID namespace. In a container, that id may not exist or belong to another process.
    pub pid: u32,
    /// The GPU memory that it uses, if the driver reports it.
    pub used_bytes: Option<u64>,
}

/// NVML's data of the machine.
#[derive(Debug, Clone, Default)]
pub(super) struct NvmlData {
    /// The driver's version, such as `550.163.01`.
    pub(super) driver_version: Option<String>,
    pub(super) boards: Vec<PciGpu>,
}

/// One GPU on the bus.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PciGpu {
    pub(super) pci: PciAddress,
    pub(super) name: Option<String>,
    /// Total and free memory. `None` if NVML does not report it, and for a divided GPU (MIG): NVML reports the whole
    /// GPU, and the CUDA driver a part.
    pub(super) memory: Option<DeviceMemory>,
    pub(super) processes: Option<Vec<DeviceProcess>>,
}

/// The PCI bus address of a GPU, which identifies it: the CUDA driver and NVML number GPUs differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PciAddress {
    domain: u32,
    bus: u32,
    device: u32,
}

impl PciAddress {
    /// Parses `0000:19:00.0`, the CUDA driver's form, or `00000000:19:00.0`, NVML's form.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let parse_hex = |digits: &str| u32::from_str_radix(digits, 16).ok();
        let (address, _function) = text.split_once('.')?;
        let mut parts = address.splitn(3, ':').map(parse_hex);
        let (domain, bus, device) = (parts.next()??, parts.next()??, parts.next()??);
        Some(Self { domain, bus, device })
    }
}

impl NvmlData {
    /// Queries NVML. The error says why that failed, as a clause without a full stop.
    pub(super) fn read() -> Result<Self, String> {
        let nvml = Nvml::init().map_err(|error| why_unavailable(&error))?;
        if nvml.lib().nvmlShutdown.is_err() {
            // Dropping `nvml` would panic.
            std::mem::forget(nvml);
            return Err("the library under NVML's name lacks nvmlShutdown".into());
        }
        let count = nvml.device_count().map_err(|error| why_unavailable(&error))?;
        let boards = (0..count).filter_map(|index| read_board(&nvml.device_by_index(index).ok()?));
        Ok(Self { driver_version: nvml.sys_driver_version().ok(), boards: boards.collect() })
    }

    /// The GPU at the bus address `pci`, in the form of the CUDA driver or NVML.
    pub(super) fn board_at(&self, pci: &str) -> Option<&PciGpu> {
        let pci = PciAddress::parse(pci)?;
        self.boards.iter().find(|board| board.pci == pci)
    }
}

/// The data of a GPU; `None` without a bus address.
fn read_board(device: &Device<'_>) -> Option<PciGpu> {
    let pci = device.pci_info().ok()?;
    let is_divided = device.mig_mode().is_ok_and(|mode| mode.current == 1);
    let memory = device.memory_info().ok().filter(|_| !is_divided);
    Some(PciGpu {
        pci: PciAddress { domain: pci.domain, bus: pci.bus, device: pci.device },
        name: device.name().ok(),
        memory: memory.map(|memory| DeviceMemory { total_bytes: memory.total, free_bytes: memory.free }),
        processes: running_processes(device).ok(),
    })
}

fn running_processes(device: &Device<'_>) -> Result<Vec<DeviceProcess>, NvmlError> {
    let found = device.running_compute_processes()?.into_iter().map(|process| DeviceProcess {
        pid: process.pid,
        used_bytes: match process.used_gpu_memory {
            UsedGpuMemory::Used(bytes) => Some(bytes),
            UsedGpuMemory::Unavailable => None,
        },
    });
    let mut processes: Vec<DeviceProcess> = found.collect();
    processes.sort_by_key(|process| process.pid);
    Ok(processes)
}

fn why_unavailable(error: &NvmlError) -> String {
    match error {
        NvmlError::LibloadingError(error) => {
            format!("NVML was not found ({error}); containers have it with the driver capability `utility`")
        }
        error => format!("NVML cannot be queried: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_of_a_bus_address_are_parsed() {
        let place = PciAddress { domain: 0, bus: 0x19, device: 0 };
        for text in ["0000:19:00.0", "00000000:19:00.0", "0:19:0.0"] {
            assert_eq!(PciAddress::parse(text), Some(place), "{text}");
        }
        assert_ne!(PciAddress::parse("0001:19:00.0"), Some(place));
        for wrong in ["", "19:00.0", "0000:19:00", "0000:xx:00.0", ":::.0", "1:2:3:4.0"] {
            assert_eq!(PciAddress::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_gpu_is_found_by_its_bus_address() {
        let board = |bus| PciGpu {
            pci: PciAddress { domain: 0, bus, device: 0 },
            name: None,
            memory: None,
            processes: None,
        };
        let nvml_data = NvmlData { driver_version: None, boards: vec![board(0x3b), board(0x19)] };
        assert_eq!(nvml_data.board_at("0000:19:00.0"), Some(&board(0x19)));
        assert_eq!(nvml_data.board_at("0000:86:00.0"), None);
    }

    #[test]
    fn without_the_library_the_error_names_nvml() {
        // On a machine with a GPU the query succeeds.
        if let Err(reason) = NvmlData::read() {
            assert!(reason.starts_with("NVML"), "{reason}");
        }
    }
}
