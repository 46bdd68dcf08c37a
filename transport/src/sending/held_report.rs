//! [`HeldReport`]: tells a taker which chunks of a version are here (`Held`, PROTOCOL.md §3.15).

use crate::egress::ReceivedChunks;
use std::{sync::Arc, time::Duration};
use tensor_relay_protocol::RangeSet;
use tokio::{sync::watch, time::Instant};

/// The minimum interval between two reports of a version to one taker.
const INTERVAL: Duration = Duration::from_millis(100);

/// The most ranges of either kind in one report: what remains follows in the next one.
const RANGES_MAX: usize = 512;

/// What a taker was told of the chunks on offer, and when it is told more.
#[derive(Debug)]
pub(super) struct HeldReport {
    received: Arc<ReceivedChunks>,
    changes: watch::Receiver<()>,
    told: RangeSet,
    /// Whether something may be untold.
    is_due: bool,
    next_at: Instant,
}

impl HeldReport {
    /// Nothing was told yet; the first report is due now, even if nothing is held.
    pub(super) fn new(received: &Arc<ReceivedChunks>) -> Self {
        let (received, changes) = (Arc::clone(received), received.changes());
        Self { received, changes, told: RangeSet::new(), is_due: true, next_at: Instant::now() }
    }

    /// Waits until a report is due. Cancel safe.
    pub(super) async fn due(&mut self) {
        if !self.is_due {
            let _ = self.changes.changed().await; // `received` holds the sender.
            self.is_due = true;
        }
        tokio::time::sleep_until(self.next_at).await;
    }

    /// The next report: what is added, and what is withdrawn.
    pub(super) fn take(&mut self) -> (RangeSet, RangeSet) {
        self.changes.mark_unchanged();
        let offered = self.received.offered();
        let (added, is_rest_added) = first(&offered.difference(&self.told));
        let (withdrawn, is_rest_withdrawn) = first(&self.told.difference(&offered));
        self.told = self.told.union(&added).difference(&withdrawn);
        self.is_due = is_rest_added || is_rest_withdrawn;
        self.next_at = Instant::now() + INTERVAL;
        (added, withdrawn)
    }
}

/// The first ranges of a set, and whether there are more.
fn first(set: &RangeSet) -> (RangeSet, bool) {
    let ranges = set.ranges();
    let first = ranges.iter().take(RANGES_MAX).cloned().collect();
    (first, ranges.len() > RANGES_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Workers;
    use tensor_relay_protocol::{
        ChunkHash, ChunkHeader, ChunkIndex, CodecId, Dtype, EncodingEntry, EncodingHash, Epoch, Limits,
        Manifest, Shape, SubscriptionId, TensorName, TensorSpec, Version,
    };

    const CHUNK_BYTES: u32 = 256;
    const CHUNKS: u32 = 4 * RANGES_MAX as u32;

    fn received() -> Arc<ReceivedChunks> {
        let shape = Shape::new(&[u64::from(CHUNKS * CHUNK_BYTES)]).unwrap();
        let spec = TensorSpec::new(TensorName::new("t").unwrap(), Dtype::U8, shape);
        let manifest = Manifest::layout(vec![spec], vec![], CHUNK_BYTES, &Limits::default()).unwrap();
        Arc::new(ReceivedChunks::new(Arc::new(manifest), None, u64::MAX, Workers::Inline))
    }

    fn arrive(received: &ReceivedChunks, chunk: u32) {
        let (chunk, codec, base) = (ChunkIndex(chunk), CodecId::Raw, None);
        let header = ChunkHeader {
            subscription: SubscriptionId(1),
            epoch: Epoch(1),
            version: Version(1),
            chunk,
            codec,
            raw_bytes: CHUNK_BYTES,
            encoded_bytes: CHUNK_BYTES,
            hash: ChunkHash::of(b""),
            base,
        };
        received.handle_encodings(&[EncodingEntry { chunk, codec, base, hash: EncodingHash([0; 32]) }]);
        let kept = received.keep(&header, &[0; CHUNK_BYTES as usize]);
        assert!(received.handle_verified(&header, kept));
    }

    /// Goal: a taker learns what is here at once, then at most ten times a second, and in messages that fit.
    #[tokio::test(start_paused = true)]
    async fn takers_are_told_at_once_and_then_ten_times_a_second() {
        let received = received();
        let mut report = HeldReport::new(&received);
        let began = Instant::now();
        report.due().await;
        assert_eq!(report.take(), (RangeSet::new(), RangeSet::new()));
        for chunk in 0..CHUNKS / 2 {
            arrive(&received, 2 * chunk); // Each is a range of its own.
        }
        let mut known = RangeSet::new();
        for reports in 1..=2 {
            report.due().await;
            assert_eq!(began.elapsed(), reports * INTERVAL);
            let (added, withdrawn) = report.take();
            assert_eq!((added.ranges().len(), withdrawn.is_empty()), (RANGES_MAX, true));
            known = known.union(&added);
        }
        assert_eq!(known, *received.offered());
        assert!(tokio::time::timeout(10 * INTERVAL, report.due()).await.is_err(), "all is told");
        received.close();
        let mut gone = RangeSet::new();
        while gone != known {
            report.due().await;
            gone = gone.union(&report.take().1);
        }
    }
}
