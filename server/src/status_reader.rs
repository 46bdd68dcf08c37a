//! [`StatusReader`]: computes a server's status on demand from existing counters; it costs nothing otherwise.

use crate::{ServerStatus, server, shared::Shared, topic::TopicState};
use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{Arc, Weak},
    time::Instant,
};
use tensor_relay_device::HostMemory;
use tensor_relay_protocol::Topic;
use tensor_relay_transport::Listener;

/// The maximum number of listed subscriptions and lanes: more than a person reads, and few enough for a page.
const DESCRIBED_MAX: usize = 256;

/// Reads the status of a server while it exists, without keeping it alive.
#[derive(Debug, Clone)]
pub struct StatusReader {
    shared: Weak<Shared>,
    memory: HostMemory,
    listen: Option<SocketAddr>,
    socket: Option<PathBuf>,
    began: Instant,
}

impl StatusReader {
    pub(crate) fn new(shared: &Arc<Shared>, memory: HostMemory, listener: &Listener) -> Self {
        let listen = Some(listener.local_address()).filter(|address| address.port() != 0);
        let socket = listener.socket_path().map(Path::to_owned);
        Self { shared: Arc::downgrade(shared), memory, listen, socket, began: Instant::now() }
    }

    /// The current status; `None` when the server is dropped. Takes a few locks briefly, for a time that grows with the
    /// numbers of topics and lanes.
    pub fn read(&self) -> Option<ServerStatus> {
        let shared = self.shared.upgrade()?;
        let (subscribers_count, subscribers) = shared.subscribers.status(DESCRIBED_MAX);
        let (lanes_count, lanes) = shared.traffic.lanes(DESCRIBED_MAX);
        Some(ServerStatus {
            listen: self.listen,
            socket: self.socket.clone(),
            uptime: self.began.elapsed(),
            is_draining: *shared.draining.borrow(),
            stats: server::stats(&shared, &self.memory),
            access_problem: shared.access.problem(),
            topics: shared.catalogue.map_topics(|_| true, TopicState::status),
            subscribers_count,
            subscribers,
            lanes_count,
            lanes,
            traffic: shared.traffic.by_kind(),
            published: shared.catalogue.published(),
            failures: shared.failures.counts(),
            chunk_times: shared.egress.chunk_times.stats(),
        })
    }

    /// Whether each of `topics` has a version. False when the server is dropped.
    pub fn offers(&self, topics: &[Topic]) -> bool {
        let Some(shared) = self.shared.upgrade() else { return false };
        let names = shared.catalogue.names(|_| true);
        topics.iter().all(|topic| names.contains(topic))
    }

    /// Whether any topic has a version. False when the server is dropped.
    pub fn has_version(&self) -> bool {
        self.shared
            .upgrade()
            .is_some_and(|shared| !shared.catalogue.names(|_| true).is_empty())
    }

    /// Whether the server is shutting down; true when it is dropped.
    pub fn is_draining(&self) -> bool {
        self.shared.upgrade().is_none_or(|shared| *shared.draining.borrow())
    }
}
