//! [`Pace`]: a bound on the rate of what is sent.

use std::time::Duration;
use tokio::{sync::Mutex, time::Instant};

/// Bounds the rate at which bytes are sent, over everything that shares it. Turns come in the order of the calls; nothing
/// is saved up while nothing is sent, so that there are no bursts.
#[derive(Debug)]
pub struct Pace {
    bytes_per_s: u64,
    /// When everything that has its turn is sent.
    free_at: Mutex<Option<Instant>>,
}

impl Pace {
    /// A rate in bytes per second; 0 counts as 1.
    pub fn new(bytes_per_s: u64) -> Self {
        Self { bytes_per_s: bytes_per_s.max(1), free_at: Mutex::new(None) }
    }

    /// Waits for the turn of so many bytes. Cancel safe: a cancelled wait takes nothing of the rate.
    pub(crate) async fn turn(&self, bytes: u64) {
        let mut free_at = self.free_at.lock().await; // In the order of the calls.
        if let Some(free_at) = *free_at {
            tokio::time::sleep_until(free_at).await;
        }
        let now = Instant::now();
        *free_at = now.checked_add(self.duration(bytes)).or(Some(now));
    }

    /// The time for which so many bytes take the whole rate.
    fn duration(&self, bytes: u64) -> Duration {
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_s);
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn the_rate_is_never_exceeded_and_nothing_is_saved_up() {
        let (pace, begun) = (Pace::new(1_000), Instant::now());
        for (pause, bytes, at) in
            [(0, 500, 0.0), (0, 2_000, 0.5), (0, 1, 2.5), (10, 1_000, 12.5), (0, 1, 13.5)]
        {
            tokio::time::sleep(pause * SECOND).await;
            pace.turn(bytes).await;
            let waited = begun.elapsed().as_secs_f64();
            assert!((waited - at).abs() < 0.01, "{bytes} bytes after {waited} s instead of {at}");
        }
        Pace::new(0).turn(u64::MAX).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_cancelled_wait_takes_nothing() {
        let (pace, begun) = (Pace::new(1_000), Instant::now());
        pace.turn(1_000).await;
        for _ in 0..100 {
            assert_eq!(pace.turn(1 << 30).now_or_never(), None);
        }
        pace.turn(1).await;
        assert_eq!(begun.elapsed().as_secs(), 1);
    }
}
