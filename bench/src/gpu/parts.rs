//! The parts of the suite. Each runs in its own process, so that a poisoned context, a hang or a crash does not affect
//! the others.

mod bandwidth;
mod cases;
mod device;
mod exact;
mod fan_out;
mod fault;
mod null_network;
mod program;
mod quic;
mod sessions;
mod sharing;
mod small;

pub(super) use device::{FREE_BYTES, KIND};

use super::{
    line::{Cells, Printer},
    place::{Engine, Place},
};
use crate::size;
use anyhow::Result;
use clap::ValueEnum;
use std::time::Duration;

/// One part of the suite.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Describes the device.
    Device,
    /// The cases that every copy engine passes.
    Cases,
    /// The engine's copy rate, beside plain copies.
    Bandwidth,
    /// The pipeline without a network.
    NullNetwork,
    /// The pipeline over QUIC on loopback.
    Quic,
    /// Several sessions at once.
    Sessions,
    /// Many small tensors.
    Small,
    /// One source, many readers.
    FanOut,
    /// Every dtype, byte for byte.
    Exact,
    /// Memory that another process reads in place.
    Sharing,
    /// Device failures in mid-transfer.
    Fault,
    /// The program itself.
    Program,
}

impl Part {
    /// Its name on the command line and in documents.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Cases => "cases",
            Self::Bandwidth => "bandwidth",
            Self::NullNetwork => "null-network",
            Self::Quic => "quic",
            Self::Sessions => "sessions",
            Self::Small => "small",
            Self::FanOut => "fan-out",
            Self::Exact => "exact",
            Self::Sharing => "sharing",
            Self::Fault => "fault",
            Self::Program => "program",
        }
    }

    /// The title of its section in the document.
    pub(super) fn title(self) -> &'static str {
        match self {
            Self::Device => "The device",
            Self::Cases => "Engine cases",
            Self::Bandwidth => "Bandwidth of copies",
            Self::NullNetwork => "Pipeline over a null network",
            Self::Quic => "Pipeline over QUIC on loopback",
            Self::Sessions => "Several sessions",
            Self::Small => "Many small tensors",
            Self::FanOut => "Fan-out",
            Self::Exact => "Byte for byte",
            Self::Sharing => "Shared with another process",
            Self::Fault => "A device that fails",
            Self::Program => "The program",
        }
    }

    /// How to read its numbers.
    pub(super) fn about(self) -> &'static str {
        match self {
            Self::Device => device::ABOUT,
            Self::Cases => cases::ABOUT,
            Self::Bandwidth => bandwidth::ABOUT,
            Self::NullNetwork => null_network::ABOUT,
            Self::Quic => quic::ABOUT,
            Self::Sessions => sessions::ABOUT,
            Self::Small => small::ABOUT,
            Self::FanOut => fan_out::ABOUT,
            Self::Exact => exact::ABOUT,
            Self::Sharing => sharing::ABOUT,
            Self::Fault => fault::ABOUT,
            Self::Program => program::ABOUT,
        }
    }

    /// The time to measure. The whole suite stays below nine minutes.
    pub(super) fn budget(self) -> Duration {
        Duration::from_secs(match self {
            Self::Device | Self::Cases | Self::Exact | Self::Program => 0,
            Self::Fault => 60,
            Self::Bandwidth => 50,
            Self::NullNetwork => 80,
            Self::Quic => 120,
            Self::Sessions => 40,
            Self::Small => 30,
            Self::FanOut => 15,
            Self::Sharing => 20,
        })
    }

    /// The deadline after which it is killed.
    pub(super) fn deadline(self) -> Duration {
        self.budget() + Duration::from_secs(45)
    }

    /// The largest payload it moves: large enough to hide the beginning and end of a transfer, and small enough
    /// for several passes.
    pub(super) fn bytes(self) -> u64 {
        match self {
            Self::Device | Self::Cases | Self::Small | Self::Exact => 0,
            Self::Quic | Self::Sessions | Self::FanOut | Self::Program => 512 << 20,
            Self::Sharing => 256 << 20,
            Self::Bandwidth | Self::Fault => 1 << 30,
            Self::NullNetwork => 2 << 30,
        }
    }

    /// Runs it.
    pub(super) async fn run(self, job: Job) -> Result<()> {
        match self {
            Self::Device => device::run(job),
            Self::Cases => cases::run(job).await,
            Self::Bandwidth => bandwidth::run(job).await,
            Self::NullNetwork => null_network::run(job).await,
            Self::Quic => quic::run(job).await,
            Self::Sessions => sessions::run(job).await,
            Self::Small => small::run(job).await,
            Self::FanOut => fan_out::run(job).await,
            Self::Exact => exact::run(job).await,
            Self::Sharing => sharing::run(job).await,
            Self::Fault => fault::run(job).await,
            Self::Program => program::run(job).await,
        }
    }
}

/// The settings of a part.
#[derive(Debug, Clone, clap::Args)]
pub struct Job {
    /// The device of the tensors.
    #[arg(long)]
    pub(super) device: Place,
    /// The largest payload to move.
    #[arg(long, value_parser = size::parse)]
    pub(super) bytes: u64,
    /// The time to measure.
    #[arg(long)]
    pub(super) budget_ms: u64,
    /// Uses few and small settings, to check that everything runs.
    #[arg(long)]
    pub(super) quick: bool,
    /// The fault to cause, in a process made for it.
    #[arg(long, value_enum)]
    pub(super) scenario: Option<fault::Scenario>,
    /// Memory shared by another process, in a process made to import it.
    #[arg(long)]
    pub(super) shared: Option<sharing::Shared>,
}

impl Job {
    fn engine(&self) -> Result<Engine> {
        Engine::open(self.device)
    }

    fn budget(&self) -> Duration {
        Duration::from_millis(self.budget_ms)
    }

    /// Prints measurements.
    fn printer(&self) -> Printer {
        Printer
    }

    /// All of `usual`, or only the `quick` ones.
    fn choose<T: Copy>(&self, usual: &[T], quick: &[T]) -> Vec<T> {
        if self.quick { quick.to_vec() } else { usual.to_vec() }
    }

    /// Slots and chunk sizes of a pipeline: the default first, and more often than the others, because the pipeline is
    /// judged by it.
    fn pipelines(&self) -> Vec<(usize, u64)> {
        let slots = self.choose(&[2, 3, 4, 8, 16], &[2, 4]);
        let chunks = self.choose(&[1 << 20, 2 << 20, 4 << 20, 8 << 20, 16 << 20], &[256 << 10, 1 << 20]);
        let default = self.default_pipeline();
        let all = slots.iter().flat_map(|slots| chunks.iter().map(|chunk| (*slots, *chunk)));
        let others: Vec<_> = all.filter(|pipeline| *pipeline != default).collect();
        let (some, rest) = others.split_at(others.len() / 2);
        [&[default], some, &[default], rest].concat()
    }

    fn default_pipeline(&self) -> (usize, u64) {
        // The program's defaults: 256 MiB of page-locked memory, in chunks of 4 MiB.
        if self.quick { (4, 1 << 20) } else { (64, 4 << 20) }
    }
}

/// The name of a pipeline in tables.
fn pipeline_cells(slots: usize, chunk_bytes: u64) -> Cells<String> {
    Cells::of([("slots", slots.to_string()), ("chunk", size::text(chunk_bytes))])
}

/// 10^9 bytes per second.
fn rate(bytes: u64, seconds: f64) -> f64 {
    bytes as f64 / seconds / 1e9
}
