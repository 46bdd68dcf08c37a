//! The job of the two sides in a run of a workload.

use super::{load::Load, steps::StepsArgs};
use serde::{Deserialize, Serialize};

/// What is published and received, and how: the same for both sides, which receive it as JSON on their command lines.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Job {
    pub(crate) work: Work,
    pub(crate) hold: Hold,
    /// Whether receivers subscribe in mode `every`, so that the publisher waits for them.
    pub(crate) every: bool,
    /// The number of receivers for whose commits the publisher waits.
    pub(crate) receivers: u32,
    /// Whether there is one more receiver, which is slow and not waited for.
    pub(crate) has_slow: bool,
}

/// The versions of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Work {
    /// One large version a round.
    Version(Load),
    /// A stream of this number of small versions a round, each of which is timed.
    Stream { bytes: u64, pace: Pace, versions: u64 },
    /// Versions that differ a little, one a round, all in one topic.
    Steps(StepsArgs),
}

/// The pace of a stream: when its next version is published.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Pace {
    /// At this number of versions per second, even if consumers do not keep up.
    PerSecond(u32),
    /// When all consumers have committed the version before.
    AfterCommit,
}

/// The memory in which the tensors lie while they are published.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Hold {
    /// In the server's memory. They are hashed before the round.
    #[default]
    Stage,
    /// In the producer's memory, from which they are read and hashed when they are sent.
    Borrow,
}

/// The number of versions in a counted round of a stream for each version in its warm-up round.
const WARM_UP_DIVISOR: u64 = 10;

impl Job {
    /// The number of versions of round number `round`, of which the first warms up.
    pub(super) fn versions(&self, round: u32) -> u64 {
        match self.work {
            Work::Stream { versions, .. } if round == 0 => (versions / WARM_UP_DIVISOR).max(1),
            Work::Stream { versions, .. } => versions,
            Work::Version(_) | Work::Steps(_) => 1,
        }
    }

    /// Whether all rounds have one topic and one subscription.
    pub(super) fn has_one_topic(&self) -> bool {
        matches!(self.work, Work::Steps(_))
    }

    /// The topic of round number `round`.
    pub(super) fn topic(&self, round: u32) -> String {
        let number = if self.has_one_topic() { 0 } else { round };
        format!("bench/{number}")
    }
}
