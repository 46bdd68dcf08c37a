//! [`SentChunks`]: counts the chunks that are sent to one subscription.

use crate::Tally;
use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};
use tensor_relay_protocol::CodecId;

/// Counts the chunks that are sent to one subscription, also in the tally of its topic.
#[derive(Debug)]
pub struct SentChunks {
    topic: Arc<Tally>,
    payload_bytes: AtomicU64,
    wire_bytes: AtomicU64,
    /// The numbers of chunks being read and encoded, and being written.
    encoding: AtomicU32,
    writing: AtomicU32,
}

/// A chunk at one stage, until this is dropped.
#[derive(Debug)]
#[must_use = "the stage ends when this is dropped"]
pub(crate) struct StageGuard<'a>(&'a AtomicU32);

impl SentChunks {
    /// Counts in `topic`, too.
    pub fn new(topic: Arc<Tally>) -> Self {
        Self {
            topic,
            payload_bytes: AtomicU64::new(0),
            wire_bytes: AtomicU64::new(0),
            encoding: AtomicU32::new(0),
            writing: AtomicU32::new(0),
        }
    }

    /// The payload bytes of the chunks that were written.
    pub fn payload_bytes(&self) -> u64 {
        self.payload_bytes.load(Ordering::Relaxed)
    }

    /// Their encoded bytes.
    pub fn wire_bytes(&self) -> u64 {
        self.wire_bytes.load(Ordering::Relaxed)
    }

    /// The number of chunks being read and encoded.
    pub fn encoding(&self) -> u32 {
        self.encoding.load(Ordering::Relaxed)
    }

    /// The number of chunks being written.
    pub fn writing(&self) -> u32 {
        self.writing.load(Ordering::Relaxed)
    }

    /// Records that a chunk is being read and encoded.
    pub(crate) fn begin_encoding(&self) -> StageGuard<'_> {
        StageGuard::new(&self.encoding)
    }

    /// Records that a chunk is being written.
    pub(crate) fn begin_writing(&self) -> StageGuard<'_> {
        StageGuard::new(&self.writing)
    }

    /// Counts a chunk that was written.
    pub(crate) fn count(&self, codec: CodecId, payload_bytes: u64, wire_bytes: u64, worker_time: Duration) {
        self.topic.count(codec, payload_bytes, wire_bytes, worker_time);
        self.payload_bytes.fetch_add(payload_bytes, Ordering::Relaxed);
        self.wire_bytes.fetch_add(wire_bytes, Ordering::Relaxed);
    }
}

impl<'a> StageGuard<'a> {
    fn new(count: &'a AtomicU32) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for StageGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
