//! The options for the device that holds tensors.

use crate::units;
use std::{fmt, str::FromStr};

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct DeviceArgs {
    /// Where tensors are held: `cpu` is this machine's memory, `cuda:N` the memory of GPU N, as `tensor-relay devices`
    /// counts them.
    #[arg(long, value_name = "cpu|cuda:N", default_value = "cpu", help_heading = "Device")]
    pub(crate) device: DeviceName,

    /// With a GPU: how much of its memory versions may take; what does not fit is refused. Default: no bound but the
    /// GPU's.
    #[arg(long, value_name = "SIZE", value_parser = units::parse_bytes, help_heading = "Device")]
    pub(crate) gpu_mem_limit: Option<u64>,

    /// With a GPU: how much page-locked memory of this machine chunks pass through. A chunk that is sent stays there
    /// until it is acknowledged, and half of it keeps chunks for further subscribers. It is taken once, at the start.
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = units::parse_bytes, help_heading = "Device")]
    pub(crate) pinned_mem: u64,
}

impl DeviceArgs {
    /// A hint for errors about GPU memory: this option, if it is set.
    pub(crate) fn limit_hint(&self) -> String {
        let hint = |bytes| format!(" (--gpu-mem-limit is {bytes} bytes)");
        self.gpu_mem_limit.map_or_else(String::new, hint)
    }

    /// The same as command line words, for another process of this program.
    pub(crate) fn words(&self) -> Vec<String> {
        let limit = self.gpu_mem_limit.map(|bytes| format!("--gpu-mem-limit={bytes}"));
        let words = [format!("--device={}", self.device), format!("--pinned-mem={}", self.pinned_mem)];
        words.into_iter().chain(limit).collect()
    }
}

/// A device name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeviceName {
    /// This machine's memory.
    Cpu,
    /// A GPU, as the CUDA driver counts them.
    Cuda(usize),
}

impl FromStr for DeviceName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let number = text.strip_prefix("cuda:").filter(|digits| !digits.starts_with('+'));
        match (text, number.and_then(|digits| digits.parse().ok())) {
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
    use clap::Parser;

    #[test]
    fn a_device_is_read_as_it_is_written() {
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

    #[test]
    fn another_process_is_told_the_same() {
        #[derive(Debug, Parser)]
        struct Words {
            #[command(flatten)]
            device: DeviceArgs,
        }
        for words in [&["x"][..], &["x", "--device=cuda:1", "--gpu-mem-limit=1.5GiB", "--pinned-mem=64MiB"]] {
            let said = Words::parse_from(words).device;
            let again = Words::parse_from([vec!["x".into()], said.words()].concat()).device;
            assert_eq!(format!("{again:?}"), format!("{said:?}"));
        }
    }
}
