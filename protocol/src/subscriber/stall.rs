//! The stall deadline of a version.

use std::time::{Duration, Instant};

/// Detects that no byte was received between two checks.
#[derive(Debug)]
pub(super) struct Stall {
    timeout: Duration,
    /// The time of the next check.
    check_at: Instant,
    /// The number of bytes received until the last check.
    received_bytes: u64,
}

impl Stall {
    pub(super) fn new(timeout: Duration, now: Instant) -> Self {
        Self { timeout, check_at: now + timeout, received_bytes: 0 }
    }

    /// Restarts the timeout, after `received_bytes` received so far.
    pub(super) fn begin(&mut self, now: Instant, received_bytes: u64) {
        (self.check_at, self.received_bytes) = (now + self.timeout, received_bytes);
    }

    pub(super) fn check_at(&self) -> Instant {
        self.check_at
    }

    /// Checks for progress if the check is due. Returns whether no byte was received since the last check.
    pub(super) fn handle_check(&mut self, now: Instant, received_bytes: u64) -> bool {
        if now < self.check_at {
            return false;
        }
        let is_stalled = received_bytes == self.received_bytes;
        self.begin(now, received_bytes);
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
        stall.begin(begun, 5);
        assert!(!stall.handle_check(after(29), 5), "the check is not due");
        assert!(!stall.handle_check(after(30), 6));
        assert!(!stall.handle_check(after(59), 6) && stall.handle_check(after(60), 6));
    }
}
