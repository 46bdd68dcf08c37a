//! [`Egress`]: what all subscriptions of a process share to send.

use crate::{ChunkTimes, Gauge, Tally, egress::Encoder};
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

/// What all subscriptions of a process share to send, and where that is counted.
#[derive(Debug)]
pub struct Egress {
    /// Encodes each chunk once for all of them.
    pub encoder: Encoder,
    /// The maximum number of chunks in progress, for each lane of a subscription.
    pub(crate) chunks_in_flight: usize,
    /// A transfer ends its subscription after one to two times this without progress.
    pub(crate) stall_timeout: Duration,
    /// The copies of chunks of borrowed versions that are being sent, in bytes.
    pub(crate) copies: Copies,
    /// The chunks sent, of all topics.
    pub tally: Tally,
    /// The times that chunks took.
    pub chunk_times: ChunkTimes,
    /// Transfers in progress, each of one version to one subscription.
    pub transfers: Gauge,
}

impl Egress {
    /// Chunks encoded by `encoder`, and at most `copies_bytes` of copies.
    pub fn new(
        encoder: Encoder,
        copies_bytes: u64,
        chunks_in_flight: usize,
        stall_timeout: Duration,
    ) -> Self {
        Self {
            encoder,
            chunks_in_flight,
            stall_timeout,
            copies: Copies::new(copies_bytes),
            tally: Tally::default(),
            chunk_times: ChunkTimes::default(),
            transfers: Gauge::default(),
        }
    }
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
