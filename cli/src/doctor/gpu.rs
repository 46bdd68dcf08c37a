//! Checks of GPUs: whether this process can use the machine's GPUs, and their free memory.

use super::finding::{Finding, Fix, State};
use crate::units;
use std::fs;
use tensor_relay_device::cuda::{self, CudaError, Survey, SurveyedGpu};

const NAME: &str = "GPU";

/// The fraction of a GPU's memory below which its free memory is a warning.
const FREE_FRACTION_MIN: f64 = 0.05;

const FIX: Fix = Fix {
    host: "install NVIDIA's driver, and check that nvidia-smi lists the GPUs",
    docker: "--gpus all, with the NVIDIA Container Toolkit on the host, and NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    kubernetes: "resources.limits.nvidia.com/gpu: 1, with NVIDIA's device plugin on the node",
};

pub(super) fn check() -> Vec<Finding> {
    let nodes = device_nodes();
    let visible = std::env::var("NVIDIA_VISIBLE_DEVICES").ok();
    judge(&cuda::survey(), &nodes, visible.as_deref())
}

/// The names of the GPU device files in this container.
fn device_nodes() -> Vec<String> {
    let names = fs::read_dir("/dev").into_iter().flatten().flatten();
    let names = names.filter_map(|entry| entry.file_name().into_string().ok());
    let is_gpu =
        |name: &String| name.strip_prefix("nvidia").is_some_and(|number| number.parse::<u32>().is_ok());
    let mut nodes: Vec<String> = names.filter(is_gpu).collect();
    nodes.sort();
    nodes
}

/// Judges the survey: a machine without a GPU is ok, a GPU that cannot be used is a failure. `nodes` has the names of
/// the GPU device files, `visible` the value of `NVIDIA_VISIBLE_DEVICES`.
fn judge(survey: &Survey, nodes: &[String], visible: Option<&str>) -> Vec<Finding> {
    let wanted = "a usable GPU, or none; --device cpu works everywhere";
    let hidden = visible.filter(|visible| matches!(*visible, "void" | "none" | ""));
    match &survey.gpus {
        Ok(gpus) if !gpus.is_empty() => gpus.iter().map(free_memory).collect(),
        Err(CudaError::NoLibrary { .. }) if nodes.is_empty() => {
            vec![Finding::ok(NAME, "neither a GPU nor a driver is present", wanted)]
        }
        other => {
            let reason = other
                .as_ref()
                .err()
                .map_or_else(|| "the driver lists no GPU".into(), ToString::to_string);
            let nodes = match nodes {
                [] => "there is no device node /dev/nvidia0".into(),
                nodes => format!("there are device nodes ({})", nodes.join(", ")),
            };
            let hidden = hidden
                .map_or_else(String::new, |value| format!("; NVIDIA_VISIBLE_DEVICES={value} hides all GPUs"));
            vec![Finding::new(NAME, State::Fail, format!("{reason} ({nodes}{hidden})"), wanted, FIX)]
        }
    }
}

fn free_memory(gpu: &SurveyedGpu) -> Finding {
    let fix = Fix {
        host: "tensor-relay devices lists the processes that use it; --gpu-mem-limit limits tensor-relay",
        docker: "choose another GPU with --gpus device=1; --gpu-mem-limit limits tensor-relay",
        kubernetes: "a dedicated GPU, or a larger share of one; --gpu-mem-limit limits tensor-relay",
    };
    let driver = gpu.driver_version.as_deref().unwrap_or("of unknown version");
    let about = format!("{}, CUDA {}, driver {driver}", gpu.info.name, gpu.cuda_version);
    let Some(memory) = &gpu.memory else { return Finding::ok(NAME, about, "") };
    let is_good = memory.free_bytes as f64 >= memory.total_bytes as f64 * FREE_FRACTION_MIN;
    let measured =
        format!("{about}, {} free of {}", units::bytes(memory.free_bytes), units::bytes(memory.total_bytes));
    Finding::new(NAME, State::Warn.unless(is_good), measured, "memory for the versions to hold there", fix)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_that_cannot_be_used_fails() {
        let survey = Survey {
            gpus: Err(CudaError::NoLibrary { reason: "no such file".into() }),
            nvml_gpus: Err("there is none".into()),
        };
        assert_eq!(judge(&survey, &[], None)[0].state, State::Ok, "no GPU is present");
        let found = judge(&survey, &["nvidia0".into()], Some("void")).remove(0);
        assert_eq!(found.state, State::Fail);
        assert!(found.measured.contains("nvidia0") && found.measured.contains("void"), "{found:?}");
    }
}
