//! [`ReadRetry`]: when failed reads of a version under way are tried again.
//!
//! Pure: the time is an argument.

use std::time::{Duration, Instant};

/// The first wait after a failed read.
const DELAY_MIN: Duration = Duration::from_millis(100);

/// The longest wait. It is far below the time for which a client waits for bytes (30 s), which each wait restarts.
const DELAY_MAX: Duration = Duration::from_secs(5);

/// The failed reads of one version for one subscription. Chunks that fail at the same time share a wait.
#[derive(Debug, Default)]
pub struct ReadRetry {
    /// The first failure since the last read that succeeded.
    since: Option<Instant>,
    delay: Duration,
    again_at: Option<Instant>,
}

/// The next attempt to read.
#[derive(Debug, PartialEq, Eq)]
pub struct Attempt {
    /// When to try.
    pub at: Instant,
    /// Whether the failure begins a wait, and is not one of several in the same wait.
    pub begins_wait: bool,
    /// For how long reads have failed.
    pub failing: Duration,
}

impl ReadRetry {
    /// Handles a read that failed at `now`.
    pub fn handle_failed(&mut self, now: Instant) -> Attempt {
        let failing = now - *self.since.get_or_insert(now);
        if let Some(at) = self.again_at.filter(|at| now < *at) {
            return Attempt { at, begins_wait: false, failing };
        }
        self.delay = (self.delay * 2).clamp(DELAY_MIN, DELAY_MAX);
        let at = now + self.delay;
        self.again_at = Some(at);
        Attempt { at, begins_wait: true, failing }
    }

    /// Handles a read that succeeded.
    pub fn handle_read(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(clippy::disallowed_methods, reason = "the clock is the only source of an instant")]
    fn waits_are_shared_and_double_up_to_a_bound() {
        let (mut retry, began) = (ReadRetry::default(), Instant::now());
        let (mut now, mut waits_ms) = (began, vec![]);
        for _ in 0..8 {
            let first = retry.handle_failed(now);
            assert_eq!((first.begins_wait, first.failing), (true, now - began));
            let second = retry.handle_failed(now + DELAY_MIN / 2);
            assert_eq!((second.begins_wait, second.at), (false, first.at));
            waits_ms.push((first.at - now).as_millis());
            now = first.at;
        }
        assert_eq!(waits_ms, [100, 200, 400, 800, 1600, 3200, 5000, 5000]);
        retry.handle_read();
        assert_eq!(
            retry.handle_failed(now),
            Attempt { at: now + DELAY_MIN, begins_wait: true, failing: Duration::ZERO }
        );
    }
}
