//! [`StallWatch`]: detects stalled transfers.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::time::Instant;

/// Watches one transfer. All progress adds to a counter that the watch reads once per timeout: a stall is detected
/// after one to two timeouts, and progress costs an addition and no timer.
#[derive(Debug)]
pub(crate) struct StallWatch {
    progress: ProgressCounter,
    seen: u64,
    timeout: Duration,
    check_at: Instant,
}

/// The progress counter. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct ProgressCounter(Arc<AtomicU64>);

impl ProgressCounter {
    /// Records progress, in bytes or other steps.
    pub(crate) fn note(&self, steps: u64) {
        self.0.fetch_add(steps, Ordering::Relaxed);
    }
}

impl StallWatch {
    pub(crate) fn new(timeout: Duration) -> Self {
        Self { progress: ProgressCounter::default(), seen: 0, timeout, check_at: Instant::now() + timeout }
    }

    pub(crate) fn progress(&self) -> &ProgressCounter {
        &self.progress
    }

    /// Waits until there was no progress for the timeout. Cancel safe.
    pub(crate) async fn stalled(&mut self) {
        loop {
            tokio::time::sleep_until(self.check_at).await;
            let now = self.progress.0.load(Ordering::Relaxed);
            if now == self.seen {
                return;
            }
            self.seen = now;
            self.check_at = Instant::now() + self.timeout; // Without checks that were missed.
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_check_that_comes_late_is_not_made_twice() {
        let mut watch = StallWatch::new(Duration::from_secs(10));
        watch.progress().note(1);
        tokio::time::advance(Duration::from_secs(35)).await;
        let began = Instant::now();
        watch.stalled().await;
        assert_eq!(began.elapsed(), Duration::from_secs(10));
    }

    #[tokio::test(start_paused = true)]
    async fn a_stall_is_detected_after_one_to_two_timeouts() {
        let began = Instant::now();
        let mut watch = StallWatch::new(Duration::from_secs(10));
        let progress = watch.progress().clone();
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_secs(12)).await;
            progress.note(1);
        });
        watch.stalled().await;
        assert_eq!(began.elapsed(), Duration::from_secs(10), "no progress in the first ten seconds");
        watch = StallWatch::new(Duration::from_secs(10));
        watch.progress().note(1);
        watch.stalled().await;
        assert_eq!(
            began.elapsed(),
            Duration::from_secs(30),
            "progress before the first check, none before the second"
        );
    }
}
