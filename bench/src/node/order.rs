//! The messages between a driver and its workers, one JSON object a line.
//!
//! ```text
//! driver                        worker
//!                           ◄── Here
//! Produce, or Consume       ──►
//!                           ◄── Serving, or Connected
//! Prepare                   ──►
//!                           ◄── Prepared, or Waiting
//! Begin, once all are ready ──►
//!                           ◄── Moving, from time to time
//!                           ◄── Sent, or Received
//! …                                                        further rounds
//! End                       ──►
//!                           ◄── Ended
//! ```
//!
//! A worker that fails says `Failed` and ends. A consumer that is told to `Stop` in mid-round says `Stopped`.

use super::{latency::Buckets, load::Load, proof::Proof};
use crate::origin::Origin;
use serde::{Deserialize, Serialize};
use tensor_relay_client::LaneStats;
use tensor_relay_server::TrafficStats;

/// The messages of a driver.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Order {
    /// Become the producer.
    Produce(Production),
    /// Become a consumer.
    Consume(Consumption),
    /// Make everything ready for a round.
    Prepare(Round),
    /// All are ready: publish, or receive. The producer gives up when its consumers take longer than that.
    Begin { round: u32, patience_s: u64 },
    /// Stop receiving.
    Stop { round: u32 },
    /// There are no more rounds.
    End,
}

/// A producer's job.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Production {
    pub(crate) work: Work,
    pub(crate) hold: Hold,
    pub(crate) udp_payload_max: Option<u16>,
    /// Whether a stream waits for readers in mode `every`.
    pub(crate) every: bool,
}

/// A consumer's job.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Consumption {
    /// The producer's ticket, with an address that this consumer can reach.
    pub(crate) ticket: String,
    pub(crate) work: Work,
    pub(crate) udp_payload_max: Option<u16>,
    /// Over how many lanes.
    pub(crate) lanes: u32,
    /// Whether to subscribe in mode `every`.
    pub(crate) every: bool,
    /// Whether to be a slow reader.
    pub(crate) slow: bool,
}

/// The versions of a round.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Work {
    /// One version, which is timed.
    Version(Load),
    /// One small version after the other, each of which is timed.
    Stream { bytes: u64, pace: Pace },
}

/// When the next version of a stream is published.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Pace {
    /// So many a second, whether or not anybody keeps up.
    PerSecond(u32),
    /// When all consumers have committed the one before.
    AfterCommit,
}

/// The memory of the tensors while they are published.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Hold {
    /// In memory of the server's own, copied and hashed before.
    #[default]
    Stage,
    /// In the producer's memory, read and hashed when they are sent.
    Borrow,
}

/// One round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Round {
    /// Its number, from 1. It decides the bytes.
    pub(crate) number: u32,
    /// The number of commits that complete a version.
    pub(crate) readers: u32,
    /// The number of versions of a stream.
    pub(crate) versions: u64,
}

/// The messages of a worker.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Report {
    /// It runs, and where.
    Here(Introduction),
    /// The producer's server is up.
    Serving { ticket: String },
    /// A consumer is connected to it.
    Connected,
    /// The producer could publish now.
    Prepared(Prepared),
    /// A consumer has subscribed.
    Waiting { round: u32 },
    /// The progress of a consumer in the round.
    Moving { bytes: u64 },
    /// The producer is done.
    Sent(Sent),
    /// A consumer is done, and has hashed what it received.
    Received(Received),
    /// A consumer stopped as it was told.
    Stopped { round: u32, bytes: u64 },
    /// The last words of a worker that did all it was asked for.
    Ended { peak_resident_bytes: Option<u64> },
    /// The last words of another.
    Failed { reason: String },
}

/// The machine a worker runs on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Introduction {
    pub(crate) origin: Origin,
    /// See [`clock::name`](crate::clock::name).
    pub(crate) clock: Option<String>,
}

/// The versions to publish in the round.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Prepared {
    pub(crate) round: u32,
    pub(crate) tensors: u64,
    /// The size of one version as it travels, with the padding between its tensors; of a stream without any.
    pub(crate) payload_bytes: u64,
    /// The expected content; for a stream consumers know it already.
    pub(crate) proof: Option<Proof>,
}

/// The producer's round.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sent {
    pub(crate) round: u32,
    pub(crate) versions: u64,
    /// From the first publish until the last commit was told.
    pub(crate) seconds: f64,
    pub(crate) cpu_s: f64,
    pub(crate) traffic: Traffic,
    /// The number of chunks hashed or encoded in the round.
    pub(crate) chunks_hashed: u64,
    /// From publish until all commits were told, where each version waited for the one before.
    pub(crate) round_trips: Buckets,
}

/// A consumer's round.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Received {
    pub(crate) round: u32,
    pub(crate) versions: u64,
    /// Versions that were published and not delivered.
    pub(crate) missed: u64,
    /// Payload bytes; of a stream, those of its tensor, without the padding behind it.
    pub(crate) bytes: u64,
    /// Of a version: from its announcement to its commit. Of a stream: from the first version to the last.
    pub(crate) seconds: f64,
    pub(crate) cpu_s: f64,
    pub(crate) chunks: u64,
    pub(crate) traffic: Traffic,
    pub(crate) path: Path,
    pub(crate) proof: Option<Proof>,
    /// From publish to commit, by both machines' clocks: means something if these are the same.
    pub(crate) one_way: Buckets,
}

/// The bytes that a worker's lanes carried in the round.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Traffic {
    pub(crate) sent_packets: u64,
    /// Of those, how many were lost. What they carried was sent again.
    pub(crate) lost_packets: u64,
    /// UDP payload, retransmissions and control included.
    pub(crate) sent_bytes: u64,
    pub(crate) received_bytes: u64,
}

/// The path statistics of a consumer's first lane.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Path {
    /// The UDP payload in use.
    pub(crate) udp_payload_bytes: u16,
    pub(crate) round_trip_us: f64,
    /// The number of lanes.
    pub(crate) lanes: u32,
}

impl Traffic {
    /// Both together.
    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            sent_packets: self.sent_packets.saturating_add(other.sent_packets),
            lost_packets: self.lost_packets.saturating_add(other.lost_packets),
            sent_bytes: self.sent_bytes.saturating_add(other.sent_bytes),
            received_bytes: self.received_bytes.saturating_add(other.received_bytes),
        }
    }

    /// The difference to `earlier`. A new connection counts from zero.
    pub(crate) fn since(self, earlier: Self) -> Self {
        Self {
            sent_packets: self.sent_packets.saturating_sub(earlier.sent_packets),
            lost_packets: self.lost_packets.saturating_sub(earlier.lost_packets),
            sent_bytes: self.sent_bytes.saturating_sub(earlier.sent_bytes),
            received_bytes: self.received_bytes.saturating_sub(earlier.received_bytes),
        }
    }
}

impl From<LaneStats> for Traffic {
    fn from(stats: LaneStats) -> Self {
        Self {
            sent_packets: stats.sent_packets,
            lost_packets: stats.lost_packets,
            sent_bytes: stats.sent_bytes,
            received_bytes: stats.received_bytes,
        }
    }
}

impl From<TrafficStats> for Traffic {
    fn from(stats: TrafficStats) -> Self {
        let TrafficStats { sent_packets, lost_packets, sent_bytes, received_bytes } = stats;
        Self { sent_packets, lost_packets, sent_bytes, received_bytes }
    }
}

impl Path {
    /// The path of a session whose first lane is `first`, of so many `lanes`.
    pub(crate) fn of(first: LaneStats, lanes: usize) -> Self {
        Self {
            udp_payload_bytes: first.udp_payload_bytes,
            round_trip_us: first.rtt.as_secs_f64() * 1e6,
            lanes: u32::try_from(lanes).unwrap_or(u32::MAX),
        }
    }
}

impl Report {
    /// Its name.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Here(_) => "here",
            Self::Serving { .. } => "serving",
            Self::Connected => "connected",
            Self::Prepared(_) => "prepared",
            Self::Waiting { .. } => "waiting",
            Self::Moving { .. } => "moving",
            Self::Sent(_) => "sent",
            Self::Received(_) => "received",
            Self::Stopped { .. } => "stopped",
            Self::Ended { .. } => "ended",
            Self::Failed { .. } => "failed",
        }
    }
}
