//! The options for the device that holds tensors.

use crate::units;
use std::{fmt, str::FromStr};

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct DeviceArgs {
    /// The memory for tensors: `cpu` is this machine's memory, `cuda:N` the memory of GPU N in `tensor-relay devices`.
    #[arg(long, value_name = "cpu|cuda:N", default_value = "cpu", help_heading = "Device")]
    pub(crate) device: DeviceName,

    /// With a GPU: the maximum GPU memory for versions; a version that does not fit is refused. Default: the GPU's
    /// memory.
    #[arg(long, value_name = "SIZE", value_parser = units::parse_bytes, help_heading = "Device")]
    pub(crate) gpu_mem_limit: Option<u64>,

    /// With a GPU: the size of the page-locked host memory through which chunks are copied, allocated once at the
    /// start. While a quarter of it is free, a chunk that is sent stays there until the receiver acknowledges the
    /// chunk. Up to half of the memory caches chunks for further subscribers.
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = units::parse_bytes, help_heading = "Device")]
    pub(crate) pinned_mem: u64,
}

impl DeviceArgs {
    /// A hint for errors about GPU memory: the value of `--gpu-mem-limit`, if it is set.
    pub(crate) fn limit_hint(&self) -> String {
        let hint = |bytes| format!(" (--gpu-mem-limit is {bytes} bytes)");
        self.gpu_mem_limit.map_or_else(String::new, hint)
    }
}

/// A value of `--device`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeviceName {
    /// This machine's memory.
    Cpu,
    /// A GPU, with its number in the CUDA driver.
    Cuda(usize),
}

impl FromStr for DeviceName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let digits = text.strip_prefix("cuda:").filter(|digits| !digits.starts_with('+'));
        match (text, digits.and_then(|digits| digits.parse().ok())) {
            ("cpu", _) => Ok(Self::Cpu),
            (_, Some(ordinal)) => Ok(Self::Cuda(ordinal)),
            _ => Err("write cpu, or cuda:N for GPU N, e.g. cuda:0"),
        }
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_names_parse_and_print_alike() {
        for word in ["cpu", "cuda:0", "cuda:12"] {
            assert_eq!(word.parse::<DeviceName>().map(|name| name.to_string()), Ok(word.into()));
        }
        for wrong in [
            "",
            "cuda",
            "cuda:",
            "cuda:-1",
            "cuda:+1",
            "cuda:1x",
            "CPU",
            "gpu",
            "0",
            "cuda:18446744073709551616",
        ] {
            assert!(wrong.parse::<DeviceName>().is_err(), "{wrong}");
        }
    }
}
