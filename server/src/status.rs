//! [`ServerStatus`], for operators.

#[cfg(doc)]
use crate::StatusReader;
use crate::{ChunkTimeStats, FailureCount, ServerStats, SwarmStatus, TrafficStats};
use std::{net::SocketAddr, path::PathBuf, time::Duration};
use tensor_relay_protocol::{Topic, Version, VersionId};
use tensor_relay_transport::{CodecStats, LaneKind, LaneStats, Peer};

/// The status of a server.
#[derive(Debug, Clone)]
pub struct ServerStatus {
    /// The local address on the network, if it listens there.
    pub listen: Option<SocketAddr>,
    /// The path of the Unix socket for clients of this host.
    pub socket: Option<PathBuf>,
    /// The time since the [`StatusReader`] was made, normally at the server's start.
    pub uptime: Duration,
    /// Whether it is shutting down.
    pub is_draining: bool,
    /// Its counters.
    pub stats: ServerStats,
    /// Why the access rules are older than their files; `None` if they are current.
    pub access_problem: Option<String>,
    /// Every topic that has a version, in order of name.
    pub topics: Vec<TopicStatus>,
    /// The number of subscriptions.
    pub subscribers_count: usize,
    /// The first 256 of them, the oldest first.
    pub subscribers: Vec<SubscriberStatus>,
    /// The number of lanes.
    pub lanes_count: usize,
    /// At most 256 of them.
    pub lanes: Vec<LaneStatus>,
    /// The traffic of the lanes of each kind, ended ones included, and their current number.
    pub traffic: Vec<(LaneKind, u64, TrafficStats)>,
    /// Versions published since its start.
    pub published: u64,
    /// The failure counters.
    pub failures: Vec<FailureCount>,
    /// The times from the start of a chunk's send until the network accepted it.
    pub chunk_times: ChunkTimeStats,
}

/// One topic.
#[derive(Debug, Clone)]
pub struct TopicStatus {
    /// Its newest version; while that waits for a lost origin of its own, the one before it.
    pub newest: VersionId,
    /// The number of its tensors.
    pub tensors: u64,
    /// The size of its payload.
    pub payload_bytes: u64,
    /// The time since it was published.
    pub age: Duration,
    /// The number of retained versions.
    pub retained: u64,
    /// The number of versions published into it on this server.
    pub published: u64,
    /// The number of its subscriptions.
    pub subscribers: u64,
    /// Why its publisher cannot publish newer content, if so.
    pub publish_problem: Option<String>,
    /// Its sent chunks, by codec.
    pub sent: CodecStats,
    /// The clients that take its versions from each other.
    pub swarm: SwarmStatus,
}

/// One subscription.
#[derive(Debug, Clone)]
pub struct SubscriberStatus {
    /// Its topic.
    pub topic: Topic,
    /// The client's address.
    pub peer: Peer,
    /// The transport of its session.
    pub transport: LaneKind,
    /// Whether its mode is `every`.
    pub is_every: bool,
    /// The time since it began.
    pub since: Duration,
    /// The newest version that it has.
    pub held: Option<Version>,
    /// The number of versions that it is behind the newest.
    pub lag_versions: u64,
    /// The age of the oldest version that it lacks, within the last 64 publishes; at most the time since it began.
    pub lag: Duration,
    /// The current transfer.
    pub transfer: Option<TransferStatus>,
    /// The number of versions that it committed.
    pub committed: u64,
    /// The number of versions skipped for newer ones.
    pub skipped: u64,
    /// Payload bytes sent to it.
    pub sent_payload_bytes: u64,
    /// Bytes sent to it, as encoded.
    pub sent_wire_bytes: u64,
}

/// A transfer of a version to one subscription.
#[derive(Debug, Clone)]
pub struct TransferStatus {
    /// The version.
    pub version: VersionId,
    /// The size of its payload. A selection is smaller.
    pub payload_bytes: u64,
    /// The bytes of it that were sent.
    pub sent_bytes: u64,
    /// The time since it began.
    pub since: Duration,
    /// Its current bottleneck.
    pub limit: Limit,
}

/// The bottleneck of a transfer: where most of its chunks are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    /// Reading from the source, or encoding: the processor, or a disk.
    Encoding,
    /// Writing: the network, its window, or a receiver that does not read.
    Network,
    /// No chunk is in progress: the receiver has granted no credit, or is verifying chunks.
    Receiver,
}

/// One lane.
#[derive(Debug, Clone)]
pub struct LaneStatus {
    /// The address of the peer.
    pub peer: Peer,
    /// Its kind.
    pub transport: LaneKind,
    /// Its counters.
    pub stats: LaneStats,
}

impl Limit {
    /// Its identifier for programs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Encoding => "encoding",
            Self::Network => "network",
            Self::Receiver => "receiver",
        }
    }
}
