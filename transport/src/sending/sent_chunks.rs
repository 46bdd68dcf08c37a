//! [`SentChunks`]: counts the chunks that are sent to one subscription.

use crate::{InUse, Tally, egress::Encoded};
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// Counts the chunks that are sent to one subscription, also in the tally of its topic.
#[derive(Debug, Default)]
pub struct SentChunks {
    /// The tally of its topic.
    pub topic: Arc<Tally>,
    /// The payload bytes of the chunks that were written.
    pub payload_bytes: AtomicU64,
    /// Their encoded bytes.
    pub wire_bytes: AtomicU64,
    /// The number of chunks being read and encoded.
    pub encoding: InUse,
    /// The number of chunks being written.
    pub writing: InUse,
}

impl SentChunks {
    /// Counts a chunk of `payload_bytes` that was written.
    pub(crate) fn count(&self, encoded: &Encoded, payload_bytes: u64) {
        let wire_bytes = encoded.bytes.len() as u64;
        self.topic.count(encoded.codec, payload_bytes, wire_bytes, encoded.worker_time);
        self.payload_bytes.fetch_add(payload_bytes, Ordering::Relaxed);
        self.wire_bytes.fetch_add(wire_bytes, Ordering::Relaxed);
    }
}
