//! [`Heartbeat`]: detects that the network thread hangs.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// The interval of beats.
const BEAT_INTERVAL: Duration = Duration::from_secs(1);

/// The time without a beat after which the thread counts as hung: longer than a task runs between two waits, even on a
/// machine that swaps.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(15);

/// The last time at which a runtime ran its tasks.
#[derive(Debug, Clone)]
pub(super) struct Heartbeat {
    began: Instant,
    beat_ms: Arc<AtomicU64>,
}

impl Heartbeat {
    /// Spawns a task on the caller's runtime that beats until the runtime ends or every clone of the result is dropped.
    pub(super) fn start() -> Self {
        let heartbeat = Self::new();
        let beats = heartbeat.clone();
        tokio::spawn(async move {
            while Arc::strong_count(&beats.beat_ms) > 1 {
                beats.beat(Instant::now());
                tokio::time::sleep(BEAT_INTERVAL).await;
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

    /// The time since the last beat, if it exceeds [`SILENCE_TIMEOUT`].
    pub(super) fn silence(&self, now: Instant) -> Option<Duration> {
        let silence =
            Duration::from_millis(self.ms(now).saturating_sub(self.beat_ms.load(Ordering::Relaxed)));
        (silence > SILENCE_TIMEOUT).then_some(silence)
    }

    /// The milliseconds from the start until `now`.
    fn ms(&self, now: Instant) -> u64 {
        now.duration_since(self.began).as_millis() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_without_beats_counts_as_hung() {
        let heartbeat = Heartbeat::new();
        let at = |seconds| heartbeat.began + Duration::from_secs(seconds);
        assert_eq!(heartbeat.silence(at(15)), None);
        assert_eq!(heartbeat.silence(at(16)), Some(Duration::from_secs(16)));
        heartbeat.beat(at(16));
        assert_eq!(heartbeat.silence(at(31)), None);
    }
}
