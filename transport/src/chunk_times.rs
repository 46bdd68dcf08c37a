//! A histogram of the times from starting a chunk until the network accepts it.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// The upper bounds of the buckets, in microseconds, each four times the previous one.
const BOUNDS_US: [u64; 10] =
    [100, 400, 1_600, 6_400, 25_600, 102_400, 409_600, 1_638_400, 6_553_600, 26_214_400];

/// A histogram shared by all threads. One chunk costs two additions.
#[derive(Debug, Default)]
pub struct ChunkTimes {
    /// One for each bound, and one for longer times.
    buckets: [AtomicU64; BOUNDS_US.len() + 1],
    sum_ns: AtomicU64,
}

/// A snapshot of [`ChunkTimes`].
#[derive(Debug, Clone, PartialEq)]
pub struct ChunkTimeStats {
    /// The upper bound of each bucket in seconds, `f64::MAX` for the last, and the number of chunks in that bucket.
    pub buckets: Vec<(f64, u64)>,
    /// The sum of the times of all chunks, in seconds.
    pub sum_s: f64,
}

impl ChunkTimes {
    /// Adds a chunk.
    pub fn note(&self, took: Duration) {
        let took_us = took.as_micros();
        let bucket = BOUNDS_US.partition_point(|bound| u128::from(*bound) < took_us);
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        let took_ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.sum_ns.fetch_add(took_ns, Ordering::Relaxed);
    }

    /// The counts so far.
    pub fn stats(&self) -> ChunkTimeStats {
        let bounds = BOUNDS_US.iter().map(|us| *us as f64 / 1e6).chain([f64::MAX]);
        let counts = self.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed));
        let sum_s = self.sum_ns.load(Ordering::Relaxed) as f64 / 1e9;
        ChunkTimeStats { buckets: bounds.zip(counts).collect(), sum_s }
    }
}

impl ChunkTimeStats {
    /// The number of chunks.
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(|(_, count)| count).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_counts_in_the_lowest_matching_bucket() {
        let times = ChunkTimes::default();
        for us in [0, 100, 101, 26_214_400, 26_214_401] {
            times.note(Duration::from_micros(us));
        }
        let stats = times.stats();
        let counts: Vec<u64> = stats.buckets.iter().map(|(_, count)| *count).collect();
        assert_eq!(counts, [2, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1]);
        assert_eq!(stats.count(), 5);
        assert!((stats.sum_s - 52.429_002).abs() < 1e-6, "{}", stats.sum_s);
    }
}
