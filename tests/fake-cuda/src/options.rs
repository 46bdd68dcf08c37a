use std::{env, str::FromStr};

use crate::faults::Faults;

/// The options of the simulated machine. They are read from the environment once. A test may change them; a reset
/// applies a changed number of devices, and a changed amount of their memory.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    /// The number of devices: `FAKE_CUDA_DEVICES`, by default 1.
    pub(crate) devices: usize,
    /// The machine-wide number of this process's first device: `FAKE_CUDA_FIRST_DEVICE`, by default 0. With it, one
    /// ordinal can mean different devices in two processes, as with `CUDA_VISIBLE_DEVICES`.
    pub(crate) first_device: usize,
    /// The memory of each device, in bytes: `FAKE_CUDA_MEM`, by default 1 GiB.
    pub(crate) memory_bytes: usize,
    /// The rate of copies from host to device, in 10⁹ bytes per second: `FAKE_CUDA_H2D_GBPS`, by default 0, which is
    /// unlimited.
    pub(crate) h2d_gbps: f64,
    /// The rate of copies from device to host, likewise: `FAKE_CUDA_D2H_GBPS`.
    pub(crate) d2h_gbps: f64,
    /// Whether memory from `cuMemAlloc` can be exported by CUDA IPC: `FAKE_CUDA_EXPORTABLE`, by default 1. With 0, the
    /// export is refused, as for PyTorch's expandable segments.
    pub(crate) exportable: usize,
    /// Whether physical memory can be shared as file descriptors: `FAKE_CUDA_SHAREABLE_FDS`, by default 1.
    pub(crate) shareable_fds: usize,
    /// The result of `cuDriverGetVersion`: `FAKE_CUDA_VERSION`, by default 13000.
    pub(crate) version: i32,
}

impl Options {
    pub(crate) fn from_environment() -> Self {
        Self {
            devices: variable("FAKE_CUDA_DEVICES", 1),
            first_device: variable("FAKE_CUDA_FIRST_DEVICE", 0),
            memory_bytes: variable("FAKE_CUDA_MEM", 1 << 30),
            h2d_gbps: variable("FAKE_CUDA_H2D_GBPS", 0.0),
            d2h_gbps: variable("FAKE_CUDA_D2H_GBPS", 0.0),
            exportable: variable("FAKE_CUDA_EXPORTABLE", 1),
            shareable_fds: variable("FAKE_CUDA_SHAREABLE_FDS", 1),
            version: variable("FAKE_CUDA_VERSION", 13000),
        }
    }

    /// Sets an option by the name of its field. False if there is no such option or the value is invalid.
    pub(crate) fn set(&mut self, name: &str, value: &str) -> bool {
        match name {
            "devices" => assign(&mut self.devices, value),
            "first_device" => assign(&mut self.first_device, value),
            "exportable" => assign(&mut self.exportable, value),
            "shareable_fds" => assign(&mut self.shareable_fds, value),
            "memory_bytes" => assign(&mut self.memory_bytes, value),
            "h2d_gbps" => assign(&mut self.h2d_gbps, value),
            "d2h_gbps" => assign(&mut self.d2h_gbps, value),
            "version" => assign(&mut self.version, value),
            _ => false,
        }
    }
}

/// Whether the environment allows this process to use the fake driver.
pub(crate) fn allowed_by_environment() -> bool {
    env::var_os("TENSOR_RELAY_FAKE_CUDA").is_some_and(|value| value == "1")
}

/// The initial faults: `FAKE_CUDA_FAULTS`, in the syntax of `faults`, separated by commas.
pub(crate) fn faults_from_environment() -> Faults {
    let mut faults = Faults::default();
    for fault in env::var("FAKE_CUDA_FAULTS")
        .unwrap_or_default()
        .split(',')
        .filter(|fault| !fault.is_empty())
    {
        assert!(
            faults.add(fault),
            "FAKE_CUDA_FAULTS: {fault:?} is neither WHAT:NTH:EFFECT nor WHAT:NTH:EFFECT:on"
        );
    }
    faults
}

fn variable<T: FromStr>(name: &str, default: T) -> T {
    let Ok(text) = env::var(name) else { return default };
    text.parse()
        .unwrap_or_else(|_| panic!("{name}: {text:?} is not a number, or out of range"))
}

fn assign<T: FromStr>(field: &mut T, value: &str) -> bool {
    let parsed = value.parse();
    parsed.map(|value| *field = value).is_ok()
}
