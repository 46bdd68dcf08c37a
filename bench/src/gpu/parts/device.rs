//! The description of the device.

use super::{Job, rate};
use crate::{
    gpu::{
        engine::{DeviceArg, Engine},
        line,
    },
    machine::trimmed_file,
    stats::format_number,
};
use anyhow::{Context, Result};
use tensor_relay_device::cuda::{
    self,
    measure::{Pages, PlainCopies, plain_copies},
};

pub(super) const ABOUT: &str = "\
The properties that the driver and the system report are listed above, and the rates of one large synchronous copy by the \
driver, in 10^9 bytes per second: from or to page-locked memory it is the limit of the bus. The part fails if no engine opens on \
the device.";

/// The name of the fact with the kind of device.
pub(in crate::gpu) const KIND: &str = "kind";

/// The kind of a real GPU: only measurements of it are results.
pub(in crate::gpu) const GPU: &str = "gpu";

/// The name of the fact with the number of free bytes of device memory.
pub(in crate::gpu) const FREE_BYTES: &str = "free bytes";

pub(super) fn run(job: Job) -> Result<()> {
    match job.device {
        DeviceArg::Host => {
            line::fact(KIND, "host");
            line::fact("name", "the reference engine in host memory");
        }
        DeviceArg::Cuda(ordinal) => {
            describe(ordinal)?;
            measure_plain_copies(&job, ordinal)?;
        }
    }
    Engine::open(job.device)?;
    Ok(())
}

fn describe(ordinal: usize) -> Result<()> {
    let driver = cuda::probe()?;
    let device = cuda::devices()?.into_iter().nth(ordinal);
    let device = device.with_context(|| format!("there is no cuda:{ordinal}"))?;
    line::fact(KIND, if is_fake(&device.name) { "fake" } else { GPU });
    line::fact("name", &device.name);
    let (major, minor) = device.compute_capability;
    line::fact("compute capability", format!("{major}.{minor}"));
    line::fact("memory", format!("{} MiB", device.total_bytes >> 20));
    line::fact("CUDA of the driver", driver.version().to_string());
    describe_bus(&device.pci_bus_id);
    let memory = cuda::device_memory(ordinal)?;
    line::fact(FREE_BYTES, memory.free_bytes.to_string());
    Ok(())
}

/// Measures plain copies, and prints their rates.
fn measure_plain_copies(job: &Job, ordinal: usize) -> Result<()> {
    let len = usize::try_from(job.bytes)?;
    for (name, pages) in [("page-locked", Pages::Locked), ("pageable", Pages::Pageable)] {
        let PlainCopies { to_host_s, to_device_s } = plain_copies(ordinal, len, pages)?;
        for (direction, seconds) in [("D2H", to_host_s), ("H2D", to_device_s)] {
            let gb_per_s = format_number(rate(job.bytes, seconds));
            line::fact(&format!("plain {direction}, {name}"), format!("{gb_per_s} GB/s"));
        }
    }
    Ok(())
}

/// Whether this is the tests' fake driver: by the name of its device, or by the environment variable that enables it.
fn is_fake(name: &str) -> bool {
    name.to_ascii_lowercase().contains("fake") || std::env::var_os("TENSOR_RELAY_FAKE_CUDA").is_some()
}

/// Prints what the kernel reports about the driver and the device's bus. Containers often hide parts of it.
fn describe_bus(pci_bus_id: &str) {
    let of_device = |file: &str| trimmed_file(&format!("/sys/bus/pci/devices/{pci_bus_id}/{file}"));
    let driver = trimmed_file("/proc/driver/nvidia/version");
    let driver = driver.and_then(|text| text.lines().next().map(|line| line.replace("NVRM version:", "")));
    let facts = [
        ("driver", driver.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))),
        ("PCIe speed", of_device("current_link_speed")),
        ("PCIe width", of_device("current_link_width")),
        ("NUMA node", of_device("numa_node")),
        ("processors near it", of_device("local_cpulist")),
    ];
    for (name, value) in facts {
        if let Some(value) = value {
            line::fact(name, value);
        }
    }
}
