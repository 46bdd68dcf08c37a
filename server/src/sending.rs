//! [`Sending`]: what all subscriptions of a server use.

use crate::{Config, chunk_times::ChunkTimes, failures::Failures, gauge::Gauge};
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tensor_relay_protocol::CodecChoice;
use tensor_relay_transport::{Tally, egress::Encoder};
use tokio::sync::watch;

/// What all subscriptions of a server use to send, and where they are counted.
#[derive(Debug)]
pub(crate) struct Sending {
    pub(crate) encoder: Encoder,
    /// The codec of topics that choose none.
    pub(crate) codec: CodecChoice,
    /// The maximum number of chunks in progress, for each lane of a subscription.
    pub(crate) chunks_in_flight: usize,
    pub(crate) stall_timeout: Duration,
    /// The copies of chunks of borrowed versions that are being sent, in bytes.
    pub(crate) copies: Copies,
    /// The chunks sent, of all topics.
    pub(crate) tally: Tally,
    pub(crate) chunk_times: ChunkTimes,
    /// Transfers in progress, each of one version to one subscription.
    pub(crate) transfers: Gauge,
    pub(crate) counters: Arc<Counters>,
    pub(crate) failures: Arc<Failures>,
    /// Whether the server drains: only ended topics and mode `every` start transfers.
    pub(crate) draining: watch::Receiver<bool>,
}

impl Sending {
    pub(crate) fn new(
        config: &Config,
        encoder: Encoder,
        failures: Arc<Failures>,
        draining: watch::Receiver<bool>,
    ) -> Self {
        Self {
            encoder,
            codec: config.codec,
            chunks_in_flight: config.chunks_in_flight,
            stall_timeout: config.stall_timeout,
            copies: Copies::new(config.encoded_bytes),
            tally: Tally::default(),
            chunk_times: ChunkTimes::default(),
            transfers: Gauge::default(),
            counters: Arc::default(),
            failures,
            draining,
        }
    }
}

/// The counters of a server.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Commits: one for each version and subscriber.
    pub(crate) committed: AtomicU64,
    /// Subscribers that accepted no byte within the deadline, or did not keep up with their publisher.
    pub(crate) evicted: AtomicU64,
}

/// The budget for copies of chunks whose source is not in memory in one piece.
///
/// A slow subscriber may hold its copies for long, so nobody waits for the budget: while it is used up, each
/// subscription sends one such chunk at a time.
#[derive(Debug)]
pub(crate) struct Copies {
    bytes: Arc<AtomicU64>,
    max_bytes: u64,
}

/// The copy of one chunk, counted until this is dropped.
#[derive(Debug)]
pub(crate) struct ChunkCopy {
    all: Arc<AtomicU64>,
    bytes: u64,
}

impl Copies {
    fn new(max_bytes: u64) -> Self {
        Self { bytes: Arc::default(), max_bytes }
    }

    pub(crate) fn has_room(&self) -> bool {
        self.bytes.load(Ordering::Relaxed) < self.max_bytes
    }

    pub(crate) fn count(&self, bytes: u64) -> ChunkCopy {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        ChunkCopy { all: Arc::clone(&self.bytes), bytes }
    }
}

impl Drop for ChunkCopy {
    fn drop(&mut self) {
        self.all.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
