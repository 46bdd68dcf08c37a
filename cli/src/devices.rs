//! `tensor-relay devices`: the GPUs of this machine.

use crate::{args::DevicesArgs, exit::Exit, subscribe::print_line, table, units};
use serde_json::{Value, json};
use tensor_relay_device::cuda::{self, CudaError, DeviceProcess, Survey, SurveyedGpu};

pub(crate) async fn run(args: &DevicesArgs) -> anyhow::Result<Exit> {
    // Queries of the driver and NVML may take a second, so they run on a blocking thread.
    let survey = tokio::task::spawn_blocking(cuda::survey).await?;
    let reason = why_unusable(&survey);
    let gpus = survey.gpus.unwrap_or_default();
    match args.json {
        true => {
            let gpus: Vec<Value> = gpus.iter().map(as_json).collect();
            print_line(&json!({ "gpus": gpus, "reason": reason }).to_string());
        }
        false if gpus.is_empty() => {}
        false => table::print(TITLES, &gpus.iter().map(row).collect::<Vec<_>>()),
    }
    if let Some(reason) = reason {
        crate::log::message!("no GPU can be used here: {reason} --device cpu works without a GPU.");
    } else if let Err(reason) = survey.nvml_gpus {
        tracing::info!("The processes that use these GPUs are unknown: {reason}.");
    }
    Ok(Exit::Done)
}

/// Why no GPU can be used. In a container with the driver's tools but without the driver, CUDA fails although NVML
/// lists GPUs.
fn why_unusable(survey: &Survey) -> Option<String> {
    let error = survey.gpus.as_ref().err()?;
    Some(match (error, &survey.nvml_gpus) {
        (CudaError::NoLibrary { .. }, Ok(gpus)) if !gpus.is_empty() => format!(
            "{error} NVML, NVIDIA's management library, lists {} here ({}): the container lacks the driver capability \
             `compute`.",
            units::count(gpus.len(), "GPU"),
            gpus.join(", "),
        ),
        _ => error.to_string(),
    })
}

fn as_json(gpu: &SurveyedGpu) -> Value {
    let process = |process: &DeviceProcess| json!({ "pid": process.pid, "used_bytes": process.used_bytes });
    let processes: Option<Vec<Value>> = gpu.processes.as_ref().map(|all| all.iter().map(process).collect());
    json!({
        "device": name(gpu),
        "name": gpu.info.name,
        "pci": gpu.info.pci_bus_id,
        "compute_capability": capability(gpu),
        "cuda_version": gpu.cuda_version.to_string(),
        "driver_version": gpu.driver_version,
        "total_bytes": total_bytes(gpu),
        "free_bytes": gpu.memory.map(|memory| memory.free_bytes),
        "processes": processes,
    })
}

const TITLES: [&str; 9] = ["DEVICE", "NAME", "PCI", "COMPUTE", "CUDA", "DRIVER", "MEMORY", "FREE", "USED BY"];

fn row(gpu: &SurveyedGpu) -> [String; 9] {
    [
        name(gpu),
        gpu.info.name.clone(),
        gpu.info.pci_bus_id.clone(),
        capability(gpu),
        gpu.cuda_version.to_string(),
        gpu.driver_version.clone().unwrap_or_else(unknown),
        units::bytes(total_bytes(gpu)),
        gpu.memory.map_or_else(unknown, |memory| units::bytes(memory.free_bytes)),
        gpu.processes.as_deref().map_or_else(unknown, users),
    ]
}

fn name(gpu: &SurveyedGpu) -> String {
    format!("cuda:{}", gpu.info.ordinal)
}

/// The total memory that NVML reports, or else the driver, whose figure is a little lower.
fn total_bytes(gpu: &SurveyedGpu) -> u64 {
    gpu.memory.map_or(gpu.info.total_bytes, |memory| memory.total_bytes)
}

fn capability(gpu: &SurveyedGpu) -> String {
    let (major, minor) = gpu.info.compute_capability;
    format!("{major}.{minor}")
}

/// The processes that use a GPU, or `-` for none.
fn users(processes: &[DeviceProcess]) -> String {
    let user = |process: &DeviceProcess| match process.used_bytes {
        Some(bytes) => format!("{} ({})", process.pid, units::bytes(bytes)),
        None => process.pid.to_string(),
    };
    match processes {
        [] => "-".into(),
        _ => processes.iter().map(user).collect::<Vec<_>>().join(", "),
    }
}

fn unknown() -> String {
    "?".into()
}
