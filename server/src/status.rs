//! A server as it is at one moment, for those who run it.
//!
//! Everything here is read when somebody asks, from counters that are moved anyway: a server that nobody looks at pays
//! nothing for it.

use crate::{
    ChunkTimeStats, FailureCount, ServerStats, TrafficStats, server, shared::Shared, topic::TopicState,
};
use std::{
    net::SocketAddr,
    sync::{Arc, Weak},
    time::{Duration, Instant},
};
use tensor_relay_device::HostMemory;
use tensor_relay_protocol::{Topic, Version, VersionId};
use tensor_relay_transport::{CodecStats, LaneKind, LaneStats};

/// How many subscriptions and lanes are described one by one: more than a person reads, and few enough for a page.
const DESCRIBED: usize = 256;

/// Reads the status of a server for as long as there is one. It keeps nothing alive, so it may be held anywhere.
#[derive(Debug, Clone)]
pub struct StatusReader {
    shared: Weak<Shared>,
    memory: HostMemory,
    listen: SocketAddr,
    began: Instant,
}

/// What a server is doing, and for whom.
#[derive(Debug, Clone)]
pub struct ServerStatus {
    /// Where it listens.
    pub listen: SocketAddr,
    /// How long it has been there.
    pub uptime: Duration,
    /// Whether it ends, and begins nothing any more.
    pub is_draining: bool,
    /// Its counters.
    pub stats: ServerStats,
    /// Why the rules of access are older than their files, if they are.
    pub access_problem: Option<String>,
    /// Every topic that has a version, in order of name.
    pub topics: Vec<TopicStatus>,
    /// How many subscriptions there are.
    pub subscribers_count: usize,
    /// The first 256 of them, the oldest first.
    pub subscribers: Vec<SubscriberStatus>,
    /// How many lanes there are.
    pub lanes_count: usize,
    /// The first 256 of them.
    pub lanes: Vec<LaneStatus>,
    /// What the lanes of each kind carried, those that are gone included, and how many there are now.
    pub traffic: Vec<(LaneKind, u64, TrafficStats)>,
    /// Versions that were published since it began.
    pub published: u64,
    /// What went wrong.
    pub failures: Vec<FailureCount>,
    /// How long chunks took from being begun until the network had them.
    pub chunk_times: ChunkTimeStats,
}

/// One topic.
#[derive(Debug, Clone)]
pub struct TopicStatus {
    /// Its newest version.
    pub newest: VersionId,
    /// How many tensors that has.
    pub tensors: u64,
    /// How large that is.
    pub payload_bytes: u64,
    /// How long ago it was published.
    pub age: Duration,
    /// How many versions are retained.
    pub retained: u64,
    /// How many were published through this server.
    pub published: u64,
    /// How many follow it.
    pub subscribers: u64,
    /// What was sent of it, codec by codec.
    pub sent: CodecStats,
}

/// One subscription.
#[derive(Debug, Clone)]
pub struct SubscriberStatus {
    /// Of which topic.
    pub topic: Topic,
    /// Where its client is.
    pub peer: SocketAddr,
    /// What its session runs over.
    pub transport: LaneKind,
    /// Whether it gets every version, and not the newest ones.
    pub is_every: bool,
    /// How long it has been there.
    pub since: Duration,
    /// The newest version that it has.
    pub held: Option<Version>,
    /// How many versions it is behind the newest one.
    pub lag_versions: u64,
    /// For how long there has been a version that it does not have, as far as the last 64 publishes tell.
    pub lag: Duration,
    /// What it is being sent.
    pub under_way: Option<TransferStatus>,
    /// How many versions it committed.
    pub committed: u64,
    /// How many versions it did not get because newer ones were there.
    pub skipped: u64,
    /// Payload bytes that were sent to it.
    pub sent_payload_bytes: u64,
    /// The same as encoded.
    pub sent_wire_bytes: u64,
}

/// A version on its way to one subscription.
#[derive(Debug, Clone)]
pub struct TransferStatus {
    /// Which one.
    pub version: VersionId,
    /// How large it is. Who selects some of its tensors gets less.
    pub payload_bytes: u64,
    /// How much of it was sent.
    pub sent_bytes: u64,
    /// How long ago it was begun.
    pub since: Duration,
    /// What it waits for at this moment.
    pub limit: Limit,
}

/// What holds a transfer up: where most of its chunks are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    /// They are being read of their source, or encoded: the processor, or a disk.
    Encoding,
    /// They are being written: the line, its window, or a receiver that does not read.
    Network,
    /// None is under way: the receiver has granted no credit, or verifies the end.
    Receiver,
}

/// One lane.
#[derive(Debug, Clone)]
pub struct LaneStatus {
    /// Where it leads.
    pub peer: SocketAddr,
    /// What it is.
    pub transport: LaneKind,
    /// What it did.
    pub stats: LaneStats,
}

impl Limit {
    /// The word for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Encoding => "encoding",
            Self::Network => "network",
            Self::Receiver => "receiver",
        }
    }
}

impl StatusReader {
    pub(crate) fn new(shared: &Arc<Shared>, memory: HostMemory, listen: SocketAddr) -> Self {
        Self { shared: Arc::downgrade(shared), memory, listen, began: Instant::now() }
    }

    /// The status now; `None` when the server is gone. Takes a few locks for a moment each, and time by the number of topics.
    pub fn read(&self) -> Option<ServerStatus> {
        let shared = self.shared.upgrade()?;
        let (subscribers_count, subscribers) = shared.subscribers.status(DESCRIBED);
        let (lanes_count, lanes) = shared.traffic.lanes(DESCRIBED);
        Some(ServerStatus {
            listen: self.listen,
            uptime: self.began.elapsed(),
            is_draining: *shared.draining.borrow(),
            stats: server::stats(&shared, &self.memory),
            access_problem: shared.access.problem(),
            topics: shared.catalogue.describe(TopicState::status),
            subscribers_count,
            subscribers,
            lanes_count,
            lanes,
            traffic: shared.traffic.by_kind(),
            published: shared.catalogue.published(),
            failures: shared.failures.counts(),
            chunk_times: shared.chunk_times.stats(),
        })
    }

    /// Whether every one of `topics` can be subscribed to: it has a version. False when the server is gone.
    pub fn offers(&self, topics: &[Topic]) -> bool {
        let Some(shared) = self.shared.upgrade() else { return false };
        let names = shared.catalogue.names();
        topics.iter().all(|topic| names.contains(topic))
    }

    /// Whether the server begins nothing any more; true when it is gone.
    pub fn is_draining(&self) -> bool {
        self.shared.upgrade().is_none_or(|shared| *shared.draining.borrow())
    }
}
