//! The heartbeat of the thread that moves tensors.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// The interval of beats.
const BEAT: Duration = Duration::from_secs(1);

/// The silence after which the thread counts as hung. Longer than any step takes, even on a machine that swaps.
const SILENT: Duration = Duration::from_secs(15);

/// When a runtime last ran its tasks.
#[derive(Debug, Clone)]
pub(super) struct Heartbeat {
    began: Instant,
    beat_ms: Arc<AtomicU64>,
}

impl Heartbeat {
    /// Starts to beat on the caller's runtime, until that ends or nobody listens.
    pub(super) fn begin() -> Self {
        let heartbeat = Self::new();
        let beats = heartbeat.clone();
        tokio::spawn(async move {
            while Arc::strong_count(&beats.beat_ms) > 1 {
                beats.beat(Instant::now());
                tokio::time::sleep(BEAT).await;
            }
        });
        heartbeat
    }

    fn new() -> Self {
        Self { began: Instant::now(), beat_ms: Arc::default() }
    }

    fn beat(&self, now: Instant) {
        self.beat_ms.store(self.ms(now), Ordering::Relaxed);
    }

    /// How long it has been silent, if that is too long.
    pub(super) fn silence(&self, now: Instant) -> Option<Duration> {
        let silent = Duration::from_millis(self.ms(now).saturating_sub(self.beat_ms.load(Ordering::Relaxed)));
        (silent > SILENT).then_some(silent)
    }

    fn ms(&self, now: Instant) -> u64 {
        now.duration_since(self.began).as_millis() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_does_not_beat_hangs() {
        let heartbeat = Heartbeat::new();
        let at = |seconds| heartbeat.began + Duration::from_secs(seconds);
        assert_eq!(heartbeat.silence(at(15)), None);
        assert_eq!(heartbeat.silence(at(16)), Some(Duration::from_secs(16)));
        heartbeat.beat(at(16));
        assert_eq!(heartbeat.silence(at(31)), None);
    }
}
