//! Detection of a version that makes no progress.

use std::time::{Duration, Instant};

/// The periodic check of a version's progress: it is stalled if no byte was received between two checks.
#[derive(Debug)]
pub(super) struct Stall {
    /// The time between two checks.
    timeout: Duration,
    /// The time of the next check.
    check_at: Instant,
    /// The number of bytes received until the last check, or until the timeout was restarted.
    received_bytes: u64,
}

impl Stall {
    pub(super) fn new(timeout: Duration, now: Instant) -> Self {
        Self { timeout, check_at: now + timeout, received_bytes: 0 }
    }

    /// Restarts the timeout. `received_bytes` is the number of bytes received so far.
    pub(super) fn restart(&mut self, now: Instant, received_bytes: u64) {
        (self.check_at, self.received_bytes) = (now + self.timeout, received_bytes);
    }

    pub(super) fn check_at(&self) -> Instant {
        self.check_at
    }

    /// Checks for progress if the check is due. Returns true if the version is stalled.
    pub(super) fn handle_check(&mut self, now: Instant, received_bytes: u64) -> bool {
        if now < self.check_at {
            return false;
        }
        let is_stalled = received_bytes == self.received_bytes;
        self.restart(now, received_bytes);
        is_stalled
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
    fn progress_between_checks_is_no_stall() {
        let mut stall = Stall::new(Duration::from_secs(30), fixtures::now());
        let begun = stall.check_at();
        let after = |seconds| begun + Duration::from_secs(seconds);
        stall.restart(begun, 5);
        assert!(!stall.handle_check(after(29), 5), "the check is not due");
        assert!(!stall.handle_check(after(30), 6));
        assert!(!stall.handle_check(after(59), 6) && stall.handle_check(after(60), 6));
    }
}
