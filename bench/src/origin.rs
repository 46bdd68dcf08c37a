//! The origin of numbers: date, machine and build of a result file.

use crate::{date, machine};
use serde::{Deserialize, Serialize};

/// The head that all result files share, so that a number can be judged, and found again, years later. Nothing in it
/// names the machine or its owner. What the system does not tell is `unknown`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// The day in UTC: `2026-11-21`.
    pub date: String,
    /// The kernel's version.
    pub kernel: String,
    /// The name of the processor.
    pub cpu: String,
    /// The number of usable processors.
    pub cores: usize,
    /// The commit: `TENSOR_RELAY_COMMIT` at build time, or now.
    pub commit: String,
}

impl Origin {
    /// This machine, today.
    pub fn here() -> Self {
        let unknown = || "unknown".to_owned();
        let built = option_env!("TENSOR_RELAY_COMMIT").map(str::to_owned);
        Self {
            date: date::today(),
            kernel: machine::kernel().unwrap_or_else(unknown),
            cpu: machine::cpu().unwrap_or_else(unknown),
            cores: machine::cores().unwrap_or(1),
            commit: built
                .or_else(|| std::env::var("TENSOR_RELAY_COMMIT").ok())
                .unwrap_or_else(unknown),
        }
    }
}

/// A sentence without its full stop.
impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { date, kernel, cpu, cores, commit } = self;
        write!(f, "{date}, {cpu}, {cores} cores, Linux {kernel}, commit {commit}")
    }
}
