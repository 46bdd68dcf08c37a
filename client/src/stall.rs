//! When to look whether a version still moves.

use std::time::Duration;
use tokio::time::Instant;

/// Notices when nothing moved from one look to the next.
#[derive(Debug)]
pub(crate) struct Stall {
    timeout: Duration,
    look_at: Instant,
    seen: u64,
}

impl Stall {
    pub(crate) fn new(timeout: Duration) -> Self {
        Self { timeout, look_at: Instant::now(), seen: 0 }
    }

    /// Begins anew, with `moved` bytes so far.
    pub(crate) fn begin(&mut self, now: Instant, moved: u64) {
        (self.look_at, self.seen) = (now + self.timeout, moved);
    }

    pub(crate) fn look_at(&self) -> Instant {
        self.look_at
    }

    /// Looks, if it is time; returns whether nothing moved since the last look.
    pub(crate) fn handle_look(&mut self, now: Instant, moved: u64) -> bool {
        if now < self.look_at {
            return false;
        }
        let is_stalled = moved == self.seen;
        self.begin(now, moved);
        is_stalled
    }

    pub(crate) fn timeout_ms(&self) -> u128 {
        self.timeout.as_millis()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_moves_is_not_stalled() {
        let mut stall = Stall::new(Duration::from_secs(30));
        let begun = stall.look_at();
        let after = |seconds| begun + Duration::from_secs(seconds);
        stall.begin(begun, 5);
        assert!(!stall.handle_look(after(29), 5), "it is not time");
        assert!(!stall.handle_look(after(30), 6));
        assert!(!stall.handle_look(after(59), 6) && stall.handle_look(after(60), 6));
    }
}
