//! [`Tally`]: counts chunks by codec.

use std::{
    ops::Add,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};
use tensor_relay_protocol::CodecId;

/// Counts chunks by codec. Costs four atomic additions per chunk. Reads take no lock, so a snapshot may count a chunk
/// partially.
#[derive(Debug, Default)]
pub struct Tally([Counters; CodecId::ALL.len()]);

#[derive(Debug, Default)]
struct Counters {
    chunks: AtomicU64,
    raw_bytes: AtomicU64,
    wire_bytes: AtomicU64,
    worker_time_ns: AtomicU64,
}

/// The counters of one codec.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CodecCount {
    /// The number of chunks.
    pub chunks: u64,
    /// Their total decoded size.
    pub raw_bytes: u64,
    /// Their total encoded size, without headers.
    pub wire_bytes: u64,
    /// Worker time spent on encoding, including estimates and failed attempts, or on decoding. A shared encoding is
    /// counted once.
    pub worker_time: Duration,
}

/// A snapshot of the counters, by codec.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CodecStats([CodecCount; CodecId::ALL.len()]);

impl Tally {
    /// Counts one chunk.
    pub fn count(&self, codec: CodecId, raw_bytes: u64, wire_bytes: u64, worker_time: Duration) {
        let Some(counters) = CodecId::ALL.iter().zip(&self.0).find_map(|(id, c)| (*id == codec).then_some(c))
        else {
            return;
        };
        counters.chunks.fetch_add(1, Ordering::Relaxed);
        counters.raw_bytes.fetch_add(raw_bytes, Ordering::Relaxed);
        counters.wire_bytes.fetch_add(wire_bytes, Ordering::Relaxed);
        let worker_time_ns = u64::try_from(worker_time.as_nanos()).unwrap_or(u64::MAX);
        counters.worker_time_ns.fetch_add(worker_time_ns, Ordering::Relaxed);
    }

    /// The current counts.
    pub fn stats(&self) -> CodecStats {
        CodecStats(self.0.each_ref().map(|counters| CodecCount {
            chunks: counters.chunks.load(Ordering::Relaxed),
            raw_bytes: counters.raw_bytes.load(Ordering::Relaxed),
            wire_bytes: counters.wire_bytes.load(Ordering::Relaxed),
            worker_time: Duration::from_nanos(counters.worker_time_ns.load(Ordering::Relaxed)),
        }))
    }
}

impl CodecStats {
    /// The codecs that were used, with their counters.
    pub fn iter(&self) -> impl Iterator<Item = (CodecId, CodecCount)> + '_ {
        let all = CodecId::ALL.iter().copied().zip(self.0);
        all.filter(|(_, count)| count.chunks > 0)
    }

    /// The counters of `codec`.
    pub fn of(&self, codec: CodecId) -> CodecCount {
        self.iter()
            .find(|(id, _)| *id == codec)
            .map(|(_, count)| count)
            .unwrap_or_default()
    }

    /// The sum over delta codecs.
    pub fn deltas(&self) -> CodecCount {
        let deltas = self.iter().filter(|(codec, _)| codec.needs_base());
        deltas.fold(CodecCount::default(), |sum, (_, count)| sum + count)
    }

    /// The sum over all codecs.
    pub fn total(&self) -> CodecCount {
        self.0.into_iter().fold(CodecCount::default(), Add::add)
    }
}

impl CodecCount {
    /// Raw bytes per byte on the wire; 1 if there are none on the wire.
    pub fn ratio(&self) -> f64 {
        match self.wire_bytes {
            0 => 1.0,
            wire_bytes => self.raw_bytes as f64 / wire_bytes as f64,
        }
    }
}

impl Add for CodecCount {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            chunks: self.chunks + other.chunks,
            raw_bytes: self.raw_bytes + other.raw_bytes,
            wire_bytes: self.wire_bytes + other.wire_bytes,
            worker_time: self.worker_time + other.worker_time,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_codec_is_counted_separately() {
        let tally = Tally::default();
        tally.count(CodecId::Zstd, 400, 100, Duration::from_micros(3));
        tally.count(CodecId::Raw, 50, 50, Duration::ZERO);
        tally.count(CodecId::Zstd, 200, 200, Duration::from_micros(2));
        let stats = tally.stats();
        assert_eq!(stats.iter().map(|(codec, _)| codec).collect::<Vec<_>>(), [CodecId::Raw, CodecId::Zstd]);
        let zstd =
            CodecCount { chunks: 2, raw_bytes: 600, wire_bytes: 300, worker_time: Duration::from_micros(5) };
        assert_eq!((stats.of(CodecId::Zstd), zstd.ratio()), (zstd, 2.0));
        assert_eq!((stats.total().chunks, stats.total().raw_bytes, stats.total().wire_bytes), (3, 650, 350));
        assert_eq!(stats.total().worker_time, Duration::from_micros(5));
        assert_eq!((CodecStats::default().total().ratio(), stats.deltas()), (1.0, CodecCount::default()));
        tally.count(CodecId::Sparse, 300, 3, Duration::from_micros(1));
        let deltas = tally.stats().deltas();
        assert_eq!((deltas.chunks, deltas.raw_bytes, deltas.wire_bytes), (1, 300, 3));
        assert_eq!(deltas.worker_time, Duration::from_micros(1));
    }
}
