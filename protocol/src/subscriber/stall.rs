//! Detection of a version that makes no progress.

use std::time::{Duration, Instant};

/// The time between two checks.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The periodic check of a version's progress: it is stalled if no byte was received for the timeout.
#[derive(Debug)]
pub(super) struct Stall {
    timeout: Duration,
    /// The time of the next check.
    check_at: Instant,
    /// The time of the last check at which bytes had been received since the one before.
    progress_at: Instant,
    /// The number of bytes received until the last check, or until the timeout was restarted.
    received_bytes: u64,
}

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Check {
    /// Bytes were received since the last check.
    Progress,
    /// The check is not due, or the timeout has not passed yet.
    Waiting,
    /// The timeout has passed without a byte.
    Stalled,
}

impl Stall {
    pub(super) fn new(timeout: Duration, now: Instant) -> Self {
        let check_at = now + timeout.min(CHECK_INTERVAL);
        Self { timeout, check_at, progress_at: now, received_bytes: 0 }
    }

    /// Restarts the timeout. `received_bytes` is the number of bytes received so far.
    pub(super) fn restart(&mut self, now: Instant, received_bytes: u64) {
        *self = Self { received_bytes, ..Self::new(self.timeout, now) };
    }

    pub(super) fn check_at(&self) -> Instant {
        self.check_at
    }

    /// Checks for progress if the check is due. A stall restarts the timeout.
    pub(super) fn handle_check(&mut self, now: Instant, received_bytes: u64) -> Check {
        if now < self.check_at {
            return Check::Waiting;
        }
        let check = match () {
            () if received_bytes != self.received_bytes => Check::Progress,
            () if now >= self.progress_at + self.timeout => Check::Stalled,
            () => {
                self.check_at = (now + CHECK_INTERVAL).min(self.progress_at + self.timeout);
                return Check::Waiting;
            }
        };
        self.restart(now, received_bytes);
        check
    }

    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::subscriber::fixtures;

    #[test]
    fn a_stall_is_the_timeout_without_a_byte() {
        let begun = fixtures::now();
        let mut stall = Stall::new(Duration::from_millis(2_500), begun);
        let mut check = |ms, bytes| {
            let now = begun + Duration::from_millis(ms);
            (stall.handle_check(now, bytes), stall.check_at() - begun)
        };
        let at = Duration::from_millis;
        assert_eq!(check(999, 5), (Check::Waiting, at(1_000)), "it is not due");
        assert_eq!(check(1_000, 5), (Check::Progress, at(2_000)));
        assert_eq!(check(2_000, 5), (Check::Waiting, at(3_000)));
        assert_eq!(check(3_000, 6), (Check::Progress, at(4_000)));
        assert_eq!(check(4_000, 6), (Check::Waiting, at(5_000)));
        assert_eq!(check(5_000, 6), (Check::Waiting, at(5_500)));
        assert_eq!(check(5_500, 6), (Check::Stalled, at(6_500)));
    }
}
