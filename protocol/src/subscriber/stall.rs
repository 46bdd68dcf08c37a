//! The stall deadline of a version.

use std::time::{Duration, Instant};

/// Detects that nothing moved between two checks.
#[derive(Debug)]
pub(super) struct Stall {
    timeout: Duration,
    look_at: Instant,
    seen: u64,
}

impl Stall {
    pub(super) fn new(timeout: Duration, now: Instant) -> Self {
        Self { timeout, look_at: now + timeout, seen: 0 }
    }

    /// Starts anew, with `moved` bytes so far.
    pub(super) fn begin(&mut self, now: Instant, moved: u64) {
        (self.look_at, self.seen) = (now + self.timeout, moved);
    }

    pub(super) fn look_at(&self) -> Instant {
        self.look_at
    }

    /// Checks, if it is time; returns whether nothing moved since the last check.
    pub(super) fn handle_look(&mut self, now: Instant, moved: u64) -> bool {
        if now < self.look_at {
            return false;
        }
        let is_stalled = moved == self.seen;
        self.begin(now, moved);
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
    fn what_moves_is_not_stalled() {
        let mut stall = Stall::new(Duration::from_secs(30), fixtures::now());
        let begun = stall.look_at();
        let after = |seconds| begun + Duration::from_secs(seconds);
        stall.begin(begun, 5);
        assert!(!stall.handle_look(after(29), 5), "it is not time");
        assert!(!stall.handle_look(after(30), 6));
        assert!(!stall.handle_look(after(59), 6) && stall.handle_look(after(60), 6));
    }
}
