//! The events that the demo's child processes send: one JSON object per line on stdout.

use serde::{Deserialize, Serialize};
use std::io::Write;
use tensor_relay_client::Progress;

/// Events of the producer.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(crate) enum ProducerEvent {
    Serving(Serving),
    Sent(Sent),
}

/// The producer serves its model.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Serving {
    pub(crate) ticket: String,
    pub(crate) large_tensors: usize,
    pub(crate) small_tensors: usize,
    pub(crate) tensor_bytes: u64,
}

/// The consumer committed a version.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Sent {
    /// The producer's CPU time from the publish to the commit.
    pub(crate) cpu_s: f64,
}

/// Events of the consumer.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(crate) enum ConsumerEvent {
    Connected,
    Progress(VersionProgress),
    Verified(Verified),
    SmallVersions(SmallVersions),
}

/// The progress of an incoming version.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct VersionProgress {
    version: u64,
    payload_bytes: u64,
    verified_bytes: u64,
    wire_bytes: u64,
}

/// A version was received and verified.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Verified {
    pub(crate) version: u64,
    pub(crate) tensors: usize,
    pub(crate) payload_bytes: u64,
    pub(crate) wire_bytes: u64,
    pub(crate) chunks: u32,
    pub(crate) duration_s: f64,
    /// The CPU time of the transfer: the consumer's, to which the demo adds the producer's.
    pub(crate) cpu_s: f64,
    pub(crate) checked_bytes: u64,
    pub(crate) udp_payload_bytes: u16,
}

/// The small versions were received.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct SmallVersions {
    pub(crate) bytes_each: u64,
    pub(crate) received: u64,
    pub(crate) skipped: u64,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) max_us: f64,
}

impl From<Progress> for VersionProgress {
    fn from(progress: Progress) -> Self {
        let Progress { version, payload_bytes, verified_bytes, wire_bytes, .. } = progress;
        Self { version, payload_bytes, verified_bytes, wire_bytes }
    }
}

impl From<VersionProgress> for Progress {
    fn from(progress: VersionProgress) -> Self {
        let VersionProgress { version, payload_bytes, verified_bytes, wire_bytes } = progress;
        Self { version, payload_bytes, verified_bytes, wire_bytes }
    }
}

/// Writes `event` to stdout.
pub(crate) fn write(event: &impl Serialize) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, event)?;
    writeln!(out)?;
    Ok(out.flush()?)
}
