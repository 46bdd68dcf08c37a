use super::{
    devices::{DeviceInfo, DeviceMemory, device_memory, devices},
    error::CudaError,
    nvml::{NvmlData, PciGpu},
    probe::{probe, query_aside},
    version::Version,
};

pub use super::nvml::DeviceProcess;

/// A survey of this machine's GPUs for diagnostics, from CUDA's driver and NVML.
#[derive(Debug)]
pub struct Survey {
    /// The GPUs that this process can use, or the error if CUDA cannot be used.
    pub gpus: Result<Vec<SurveyedGpu>, CudaError>,
    /// The names of the GPUs known to NVML, whether or not CUDA can use them; or why NVML failed, as a clause without a
    /// full stop.
    pub nvml_gpus: Result<Vec<String>, String>,
}

/// One GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SurveyedGpu {
    /// The driver's data.
    pub info: DeviceInfo,
    /// The newest version of CUDA that the driver supports.
    pub cuda_version: Version,
    /// The driver's version, such as `550.163.01`, if NVML reports it.
    pub driver_version: Option<String>,
    /// The free and total memory, if known.
    pub memory: Option<DeviceMemory>,
    /// The processes that use the GPU, if NVML reports them.
    pub processes: Option<Vec<DeviceProcess>>,
}

/// Surveys all GPUs. Takes up to a second, and more if NVML does not report the memory of a GPU: then the driver is
/// queried for it, which needs a temporary context on that GPU. Blocks, with deadlines for NVML and the driver.
pub fn survey() -> Survey {
    let nvml_data = query_nvml();
    let gpus = probe().and_then(|driver| {
        let nvml_data = nvml_data.as_ref().ok();
        let surveyed = |info| join(info, driver.version(), nvml_data, |ordinal| device_memory(ordinal).ok());
        Ok(devices()?.into_iter().map(surveyed).collect())
    });
    let name = |board: PciGpu| board.name.unwrap_or_else(|| "a GPU without a name".into());
    let known_to_nvml = nvml_data.map(|nvml_data| nvml_data.boards.into_iter().map(name).collect());
    Survey { gpus, nvml_gpus: known_to_nvml }
}

/// Queries NVML on a separate thread, like the driver, since either may block in the kernel for ever.
fn query_nvml() -> Result<NvmlData, String> {
    query_aside("NVML", || Ok(NvmlData::read())).unwrap_or_else(|error| {
        Err(match error {
            CudaError::NoAnswer { waited, .. } => format!("NVML did not answer within {waited:?}"),
            CudaError::NoThread { reason, .. } => {
                format!("NVML cannot be queried without a thread: {reason}")
            }
            _ => "NVML did not answer".into(),
        })
    })
}

/// Joins the driver's and NVML's data of a GPU. `query_memory` is called if NVML does not report the GPU's memory.
fn join(
    info: DeviceInfo,
    cuda_version: Version,
    nvml_data: Option<&NvmlData>,
    query_memory: impl FnOnce(usize) -> Option<DeviceMemory>,
) -> SurveyedGpu {
    let board = nvml_data.and_then(|nvml_data| nvml_data.board_at(&info.pci_bus_id));
    let memory = board.and_then(|board| board.memory).or_else(|| query_memory(info.ordinal));
    SurveyedGpu {
        cuda_version,
        driver_version: nvml_data.and_then(|nvml_data| nvml_data.driver_version.clone()),
        memory,
        processes: board.and_then(|board| board.processes.clone()),
        info,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(ordinal: usize, pci_bus_id: &str) -> DeviceInfo {
        DeviceInfo {
            ordinal,
            name: "GPU".into(),
            pci_bus_id: pci_bus_id.into(),
            uuid: None,
            compute_capability: (9, 0),
            total_bytes: 100,
        }
    }

    #[test]
    fn data_of_driver_and_nvml_is_joined_by_bus_address() {
        let measured = DeviceMemory { free_bytes: 1, total_bytes: 100 };
        let reported = DeviceMemory { free_bytes: 50, total_bytes: 101 };
        let process = DeviceProcess { pid: 7, used_bytes: None };
        let board = |place: &str, memory| PciGpu {
            pci: super::super::nvml::PciAddress::parse(place).unwrap(),
            name: None,
            memory,
            processes: Some(vec![process.clone()]),
        };
        let boards = vec![board("00000000:3B:00.0", None), board("00000000:19:00.0", Some(reported))];
        let nvml_data = NvmlData { driver_version: Some("550".into()), boards };
        let join_at =
            |place: &str, nvml_data| join(info(0, place), Version::OLDEST, nvml_data, |_| Some(measured));
        let both = join_at("0000:19:00.0", Some(&nvml_data));
        assert_eq!((both.memory, both.processes), (Some(reported), Some(vec![process.clone()])));
        let divided = join_at("0000:3b:00.0", Some(&nvml_data));
        assert_eq!((divided.memory, divided.driver_version.as_deref()), (Some(measured), Some("550")));
        let unknown = join_at("0000:aa:00.0", Some(&nvml_data));
        assert_eq!((unknown.memory, unknown.processes), (Some(measured), None));
        assert_eq!(join_at("0000:19:00.0", None).memory, Some(measured));
    }
}
