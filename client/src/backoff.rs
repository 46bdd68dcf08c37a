//! Backoff: growing, randomised waits between attempts to connect.

use std::time::Duration;

/// The first wait, in milliseconds, before its random reduction: after a short outage the client reconnects almost
/// immediately.
const DELAY_MIN_MS: u64 = 100;

/// The longest wait, in milliseconds, before its random reduction: a restarted server is found within seconds.
const DELAY_MAX_MS: u64 = 5_000;

/// The longest wait for a peer, in milliseconds: a version needs none of them, and most that fail stay unreachable.
const PEER_DELAY_MAX_MS: u64 = 60_000;

/// The waits between attempts to reach a server.
#[derive(Debug)]
pub(crate) struct Backoff {
    next_ms: u64,
    max_ms: u64,
}

impl Backoff {
    pub(crate) fn new() -> Self {
        Self { next_ms: DELAY_MIN_MS, max_ms: DELAY_MAX_MS }
    }

    /// The waits between attempts to reach a peer, which grow longer.
    pub(crate) fn of_peer() -> Self {
        Self { max_ms: PEER_DELAY_MAX_MS, ..Self::new() }
    }

    /// Begins anew: the server was of use.
    pub(crate) fn reset(&mut self) {
        self.next_ms = DELAY_MIN_MS;
    }

    /// The next wait. `chance` in 0..=1 spreads the wait over its upper half, so that the clients of one server do not
    /// all reconnect at the same moment.
    pub(crate) fn next(&mut self, chance: f64) -> Duration {
        let wait_ms = self.next_ms;
        self.next_ms = (wait_ms * 2).min(self.max_ms);
        Duration::from_millis(wait_ms).mul_f64(0.5 + chance.clamp(0.0, 1.0) / 2.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_a_bound_and_are_spread() {
        let mut backoff = Backoff::new();
        let longest: Vec<u128> = (0..8).map(|_| backoff.next(1.0).as_millis()).collect();
        assert_eq!(longest, [100, 200, 400, 800, 1600, 3200, 5000, 5000]);
        assert_eq!(backoff.next(0.0).as_millis(), 2500);
        backoff.reset();
        assert_eq!(backoff.next(1.0).as_millis(), 100);
        let mut backoff = Backoff::of_peer();
        let waits: Vec<u64> = (0..12).map(|_| backoff.next(1.0).as_secs()).collect();
        assert_eq!(waits.last(), Some(&60));
    }
}
