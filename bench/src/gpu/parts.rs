//! The parts of the suite. Each runs in its own process, so that a poisoned context, a hang or a crash does not affect
//! the others.

mod cases;
mod device;
mod exact;
mod fan_out;
mod fault;
mod loopback;
mod program;
mod sharing;
mod small;
mod takers;

pub(super) use device::{FREE_BYTES, GPU, KIND};

use super::engine::{DeviceArg, Engine};
use anyhow::Result;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// One part of the suite.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Describes the device.
    Device,
    /// The test cases of every copy engine.
    Cases,
    /// The pipeline over loopback.
    Loopback,
    /// Many small tensors.
    Small,
    /// One source, many readers.
    FanOut,
    /// Every dtype, byte for byte.
    Exact,
    /// Memory shared with another process, in place and as a copy.
    Sharing,
    /// Versions that other processes of the host take.
    Takers,
    /// Device failures during a transfer.
    Fault,
    /// The program `tensor-relay`.
    Program,
}

/// The properties of a part.
#[derive(Debug, Clone, Copy)]
pub(super) struct Facts {
    /// The name on the command line and in documents.
    pub(super) name: &'static str,
    /// The title of the part's section in the document.
    pub(super) title: &'static str,
    /// The explanation of the part's numbers.
    pub(super) about: &'static str,
    /// The seconds in which the part measures. The suite takes less than nine minutes in all.
    budget_s: u64,
    /// The largest payload that the part moves: large enough that the beginning and the end of a transfer do not
    /// matter, and small enough for several passes. 0 if the part moves no payload or chooses its own.
    pub(super) bytes: u64,
}

impl Part {
    /// The properties of the part.
    pub(super) fn facts(self) -> Facts {
        let (name, title, about, budget_s, bytes) = match self {
            Self::Device => ("device", "The device", device::ABOUT, 0, 256 << 20),
            Self::Cases => ("cases", "Engine cases", cases::ABOUT, 0, 0),
            Self::Loopback => ("loopback", "Pipeline over loopback", loopback::ABOUT, 120, 512 << 20),
            Self::Small => ("small", "Many small tensors", small::ABOUT, 30, 0),
            Self::FanOut => ("fan-out", "Fan-out", fan_out::ABOUT, 15, 512 << 20),
            Self::Exact => ("exact", "Byte for byte", exact::ABOUT, 0, 0),
            Self::Sharing => ("sharing", "Shared with another process", sharing::ABOUT, 20, 256 << 20),
            Self::Takers => ("takers", "Taken by other processes", takers::ABOUT, 0, 1 << 30),
            Self::Fault => ("fault", "A device that fails", fault::ABOUT, 60, 1 << 30),
            Self::Program => ("program", "The program", program::ABOUT, 0, 512 << 20),
        };
        Facts { name, title, about, budget_s, bytes }
    }

    /// The name of the part on the command line and in documents.
    pub(super) fn name(self) -> &'static str {
        self.facts().name
    }

    /// Runs the part in this process.
    pub(super) async fn run(self, job: Job) -> Result<()> {
        match self {
            Self::Device => device::run(job),
            Self::Cases => cases::run(job).await,
            Self::Loopback => loopback::run(job).await,
            Self::Small => small::run(job).await,
            Self::FanOut => fan_out::run(job).await,
            Self::Exact => exact::run(job).await,
            Self::Sharing => sharing::run(job).await,
            Self::Takers => takers::run(job).await,
            Self::Fault => fault::run(job).await,
            Self::Program => program::run(job).await,
        }
    }
}

impl Facts {
    /// The time in which the part measures.
    pub(super) fn budget(self) -> Duration {
        Duration::from_secs(self.budget_s)
    }

    /// The deadline after which the part is killed.
    pub(super) fn deadline(self) -> Duration {
        self.budget() + Duration::from_secs(45)
    }
}

/// The settings of a part: JSON on its command line.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Job {
    /// The device of the tensors.
    pub(super) device: DeviceArg,
    /// The largest payload to move.
    pub(super) bytes: u64,
    /// The time in which the part measures.
    pub(super) budget_ms: u64,
    /// Uses few and small settings, to check that everything runs.
    pub(super) quick: bool,
    /// The fault to cause, in a process that the part `fault` started.
    pub(super) scenario: Option<fault::Scenario>,
    /// The memory to import, in a process that the part `sharing` started.
    pub(super) shared: Option<sharing::Shared>,
    /// What to take, in a process that the part `takers` started.
    pub(super) taker: Option<takers::Taker>,
}

impl Job {
    fn engine(&self) -> Result<Engine> {
        Engine::open(self.device)
    }

    fn budget(&self) -> Duration {
        Duration::from_millis(self.budget_ms)
    }

    /// The `quick` settings in a quick run, otherwise the `usual` ones.
    fn choose<T: Copy>(&self, usual: &[T], quick: &[T]) -> Vec<T> {
        if self.quick { quick.to_vec() } else { usual.to_vec() }
    }

    /// The numbers of slots and the chunk sizes of the pipelines to measure. The default comes first, and again in the
    /// middle, because the goals apply to the default.
    fn pipelines(&self) -> Vec<(usize, u64)> {
        let slots = self.choose(&[2, 3, 4, 8, 16], &[2, 4]);
        let chunks = self.choose(&[1 << 20, 2 << 20, 4 << 20, 8 << 20, 16 << 20], &[256 << 10, 1 << 20]);
        let default = self.default_pipeline();
        let all = slots.iter().flat_map(|slots| chunks.iter().map(|chunk| (*slots, *chunk)));
        let others: Vec<_> = all.filter(|pipeline| *pipeline != default).collect();
        let (first_half, second_half) = others.split_at(others.len() / 2);
        [&[default], first_half, &[default], second_half].concat()
    }

    fn default_pipeline(&self) -> (usize, u64) {
        // The program's defaults: 256 MiB of page-locked memory, in chunks of 4 MiB.
        if self.quick { (4, 1 << 20) } else { (64, 4 << 20) }
    }
}

/// The rate in 10^9 bytes per second.
fn rate(bytes: u64, seconds: f64) -> f64 {
    bytes as f64 / seconds / 1e9
}
