//! [`SourceProgress`]: from which sources parts of chunks arrive.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};
use tensor_relay_protocol::{ChunkHeader, SubscriptionId};

/// The parts of a chunk, each of which is progress of its source: so a steady slow one is not given up near the end of a chunk.
/// Few, because a hostile one that owes N chunks and sends as little as it may, of one after the other, keeps the last of them
/// for N times so many deadlines, and for one more of each that begins.
const PARTS: u64 = 4;

/// The sources whose chunks are being received, each with whether a part arrived of late.
#[derive(Debug, Default)]
pub(crate) struct SourceProgress(BTreeMap<SubscriptionId, Arc<AtomicBool>>);

/// Counts what arrives of one chunk.
#[derive(Debug)]
pub(crate) struct ChunkProgress {
    has_part_arrived: Arc<AtomicBool>,
    received_bytes: AtomicU64,
    part_bytes: u64,
}

impl SourceProgress {
    /// Begins to count a chunk.
    pub(crate) fn begin(&mut self, header: &ChunkHeader) -> ChunkProgress {
        ChunkProgress {
            has_part_arrived: Arc::clone(self.0.entry(header.subscription).or_default()),
            received_bytes: AtomicU64::new(0),
            part_bytes: u64::from(header.encoded_bytes).div_ceil(PARTS).max(1),
        }
    }

    /// The sources of which a part arrived since the last call.
    pub(crate) fn take(&mut self) -> Vec<SubscriptionId> {
        let sources = self.0.iter();
        let moving = sources.filter(|(_, has_part_arrived)| has_part_arrived.swap(false, Ordering::Relaxed));
        let moving = moving.map(|(source, _)| *source).collect();
        self.0.retain(|_, has_part_arrived| Arc::strong_count(has_part_arrived) > 1);
        moving
    }
}

impl ChunkProgress {
    /// Records that bytes of the chunk arrived.
    pub(crate) fn add(&self, bytes: u64) {
        let before = self.received_bytes.fetch_add(bytes, Ordering::Relaxed);
        if before / self.part_bytes < (before + bytes) / self.part_bytes {
            self.has_part_arrived.store(true, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensor_relay_protocol::{ChunkHash, ChunkIndex, CodecId, Epoch, Version};

    fn header(source: u32) -> ChunkHeader {
        ChunkHeader {
            subscription: SubscriptionId(source),
            epoch: Epoch(1),
            version: Version(1),
            chunk: ChunkIndex(0),
            codec: CodecId::Raw,
            raw_bytes: 400,
            encoded_bytes: 400,
            hash: ChunkHash::of(&[]),
            base: None,
        }
    }

    /// Goal: a source makes progress with each part of a chunk, however slowly it comes, and not with single bytes.
    #[test]
    fn a_part_is_progress() {
        let mut progress = SourceProgress::default();
        let (slow, silent) = (progress.begin(&header(1)), progress.begin(&header(2)));
        silent.add(99);
        for _ in 0..PARTS {
            (0..99).for_each(|_| slow.add(1));
            assert_eq!(progress.take(), []);
            slow.add(1);
            assert_eq!(progress.take(), [SubscriptionId(1)]);
        }
        silent.add(1);
        drop((slow, silent));
        assert_eq!(progress.take(), [SubscriptionId(2)], "it ended, and had made progress");
        assert!(progress.0.is_empty());
    }
}
