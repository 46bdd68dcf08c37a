//! [`Stages`]: counts chunks at each stage of the pipeline, to measure overlap.

use std::sync::atomic::{AtomicU64, Ordering};

/// The stages of sending and of receiving a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Reading from the source.
    Read,
    /// Hashing or encoding.
    Encode,
    /// Sending.
    Send,
    /// Receiving and decoding into the sink's memory.
    Receive,
    /// Writing: the copy to a device sink. Takes no time for a sink in host memory.
    Write,
}

/// Counts the chunks at each stage, and overlaps between stages.
///
/// Overlap is the purpose of the pipeline, and timings only suggest it. With these counters, tests check whether a read
/// began during another chunk's send.
#[derive(Debug, Default)]
pub struct Stages {
    active: [AtomicU64; Stage::COUNT],
    begun: [AtomicU64; Stage::COUNT],
    overlaps: [[AtomicU64; Stage::COUNT]; Stage::COUNT],
    passed_bytes: AtomicU64,
}

/// A guard that counts a chunk at one stage until it is dropped.
#[derive(Debug)]
#[must_use = "the stage ends when this is dropped"]
pub struct AtStage<'a> {
    stages: &'a Stages,
    stage: Stage,
}

/// A snapshot of [`Stages`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StageStats {
    active: [u64; Stage::COUNT],
    begun: [u64; Stage::COUNT],
    overlaps: [[u64; Stage::COUNT]; Stage::COUNT],
    passed_bytes: u64,
}

impl Stage {
    const COUNT: usize = 5;
}

impl Stages {
    /// Records that a chunk begins `stage`.
    pub fn begin(&self, stage: Stage) -> AtStage<'_> {
        let this = stage as usize;
        for (other, overlaps) in self.overlaps[this].iter().enumerate() {
            let is_active = self.active[other].load(Ordering::Relaxed) > 0;
            overlaps.fetch_add(is_active.into(), Ordering::Relaxed);
        }
        self.begun[this].fetch_add(1, Ordering::Relaxed);
        // Balanced when the returned value is dropped.
        self.active[this].fetch_add(1, Ordering::Relaxed);
        AtStage { stages: self, stage }
    }

    /// Records a pass over `bytes` of memory: hashing, comparing, encoding, decoding or copying them.
    pub(crate) fn pass(&self, bytes: usize) {
        self.passed_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// The current counts.
    pub fn stats(&self) -> StageStats {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        StageStats {
            active: self.active.each_ref().map(load),
            begun: self.begun.each_ref().map(load),
            overlaps: self.overlaps.each_ref().map(|row| row.each_ref().map(load)),
            passed_bytes: load(&self.passed_bytes),
        }
    }
}

impl Drop for AtStage<'_> {
    fn drop(&mut self) {
        self.stages.active[self.stage as usize].fetch_sub(1, Ordering::Relaxed);
    }
}

impl StageStats {
    /// The number of chunks currently at `stage`.
    pub fn active(&self, stage: Stage) -> u64 {
        self.active[stage as usize]
    }

    /// The number of chunks that began `stage`. The number that ended it is this minus [`active`](Self::active).
    pub fn begun(&self, stage: Stage) -> u64 {
        self.begun[stage as usize]
    }

    /// The bytes of chunks, and of their bases, that were hashed, compared, encoded or decoded, counted for each pass over
    /// memory. One pass may do several of these. What is hashed while it arrives is not counted.
    pub fn passed_bytes(&self) -> u64 {
        self.passed_bytes
    }

    /// The number of chunks that began `stage` while at least one other chunk was at `other`.
    pub fn overlaps(&self, stage: Stage, other: Stage) -> u64 {
        self.overlaps[stage as usize][other as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_stages_are_counted() {
        let stages = Stages::default();
        let sending = stages.begin(Stage::Send);
        let reading = stages.begin(Stage::Read);
        drop(sending);
        drop(stages.begin(Stage::Read));
        drop(reading);
        drop(stages.begin(Stage::Read));
        let stats = stages.stats();
        assert_eq!(
            (stats.begun(Stage::Read), stats.begun(Stage::Send), stats.begun(Stage::Encode)),
            (3, 1, 0)
        );
        assert_eq!(stats.overlaps(Stage::Read, Stage::Send), 1);
        assert_eq!(stats.overlaps(Stage::Read, Stage::Read), 1);
        assert_eq!(stats.overlaps(Stage::Send, Stage::Read), 0);
        assert_eq!(stats.active(Stage::Read), 0);
    }
}
