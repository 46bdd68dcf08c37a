//! [`Heartbeat`]: detects that the network thread hangs.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tensor_relay_device::Lock;

/// The interval of beats.
const BEAT_INTERVAL: Duration = Duration::from_secs(1);

/// The time without a beat after which the thread counts as hung: longer than a task runs between two waits, even on a
/// machine that swaps.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(15);

/// The last time at which a runtime ran its tasks.
#[derive(Debug, Clone)]
pub(super) struct Heartbeat(Arc<Lock<Instant>>);

impl Heartbeat {
    /// Spawns a task on the caller's runtime that beats until the runtime ends or every clone of the result is dropped.
    pub(super) fn start() -> Self {
        let last = Arc::new(Lock::new(Instant::now()));
        let beats = Arc::downgrade(&last);
        tokio::spawn(async move {
            while let Some(last) = beats.upgrade() {
                *last.lock() = Instant::now();
                drop(last);
                tokio::time::sleep(BEAT_INTERVAL).await;
            }
        });
        Self(last)
    }

    /// The time from the last beat until `now`, if it exceeds [`SILENCE_TIMEOUT`].
    pub(super) fn silence(&self, now: Instant) -> Option<Duration> {
        let last = *self.0.lock();
        Some(now.duration_since(last)).filter(|silence| *silence > SILENCE_TIMEOUT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_without_beats_counts_as_hung() {
        let last = Instant::now();
        let heartbeat = Heartbeat(Arc::new(Lock::new(last)));
        assert_eq!(heartbeat.silence(last + SILENCE_TIMEOUT), None);
        let late = SILENCE_TIMEOUT + Duration::from_secs(1);
        assert_eq!(heartbeat.silence(last + late), Some(late));
    }
}
