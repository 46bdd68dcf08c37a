//! The date, machine and build recorded in a result file.

use crate::machine;
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

/// The head that all result files share, so that their numbers can be judged, and measured again, years later. It does
/// not identify the machine or its owner. A text that the system does not report is `unknown`; an unknown number of
/// processors is 1.
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
    /// The commit: `TENSOR_RELAY_COMMIT` at build time, or else at run time.
    pub commit: String,
}

impl Origin {
    /// This machine, today.
    pub fn here() -> Self {
        let unknown = || "unknown".to_owned();
        let built = option_env!("TENSOR_RELAY_COMMIT").map(str::to_owned);
        Self {
            date: OffsetDateTime::now_utc().date().to_string(),
            kernel: machine::kernel().unwrap_or_else(unknown),
            cpu: machine::cpu().unwrap_or_else(unknown),
            cores: machine::cores().unwrap_or(1),
            commit: built
                .or_else(|| std::env::var("TENSOR_RELAY_COMMIT").ok())
                .unwrap_or_else(unknown),
        }
    }
}

/// All fields, separated by commas, without a full stop.
impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { date, kernel, cpu, cores, commit } = self;
        write!(f, "{date}, {cpu}, {cores} cores, Linux {kernel}, commit {commit}")
    }
}
