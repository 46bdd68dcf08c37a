//! [`RetryPolicy`]: decides when clients have to prove their address before the handshake. Pure.

use std::time::Instant;

/// The number of open lanes beyond which every address is validated: forged addresses must not fill the server.
const OPEN_MAX: usize = 256;

/// The maximum rate of handshakes from unvalidated addresses; beyond it, clients get Retry.
///
/// A handshake costs the server a signature and a key exchange, half a millisecond of a processor or less, so forged
/// ones take at most 6 % of one. If a thousand workers connect at once, 872 of them need one more round trip.
pub const HANDSHAKES_PER_SECOND: u32 = 128;

const RATE_PER_SECOND: f64 = HANDSHAKES_PER_SECOND as f64;

/// Decides which clients are answered with Retry (RFC 9000 §8.1.2) instead of a handshake: those with an unvalidated
/// address, while many lanes are open or many such clients arrive.
///
/// Addresses can be forged, so arrivals are counted together. They are counted instead of open connections, because a
/// handshake that fails at once leaves none. Each arrival adds one to a level that falls at the rate: during a flood
/// and up to a second after it, all arrivals get Retry.
#[derive(Debug, Default)]
pub(super) struct RetryPolicy {
    level: f64,
    updated: Option<Instant>,
}

impl RetryPolicy {
    /// Counts an arrival at `now` from an unvalidated address, with `open` lanes. Returns whether it has to prove its
    /// address.
    pub(super) fn handle_unvalidated(&mut self, now: Instant, open: usize) -> bool {
        let since = self
            .updated
            .map_or(0.0, |updated| now.saturating_duration_since(updated).as_secs_f64());
        self.updated = Some(now);
        self.level = (self.level - since * RATE_PER_SECOND).max(0.0) + 1.0;
        self.level = self.level.min(2.0 * RATE_PER_SECOND);
        open > OPEN_MAX || self.level > RATE_PER_SECOND
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// The number of `count` clients, arriving `apart` from one another, that have to prove their address.
    fn retried(policy: &mut RetryPolicy, now: &mut Instant, count: u32, apart: Duration) -> u32 {
        let arrivals = (0..count).map(|_| {
            *now += apart;
            u32::from(policy.handle_unvalidated(*now, 0))
        });
        arrivals.sum()
    }

    #[test]
    fn the_first_of_a_burst_pass() {
        let (mut policy, mut now) = (RetryPolicy::default(), Instant::now());
        assert_eq!(retried(&mut policy, &mut now, 1_000, Duration::ZERO), 1_000 - 128);
    }

    #[test]
    fn none_of_a_flood_pass_while_it_lasts() {
        let (mut policy, mut now) = (RetryPolicy::default(), Instant::now());
        let apart = Duration::from_millis(1);
        retried(&mut policy, &mut now, 1_000, apart);
        assert_eq!(retried(&mut policy, &mut now, 100_000, apart), 100_000);
        now += Duration::from_secs(1);
        assert_eq!(retried(&mut policy, &mut now, 100, Duration::from_millis(10)), 0, "the flood has ended");
    }

    #[test]
    fn below_the_rate_all_pass_until_many_lanes_are_open() {
        let (mut policy, mut now) = (RetryPolicy::default(), Instant::now());
        assert_eq!(retried(&mut policy, &mut now, 10_000, Duration::from_millis(8)), 0);
        assert!(!policy.handle_unvalidated(now + Duration::from_secs(1), OPEN_MAX));
        assert!(policy.handle_unvalidated(now + Duration::from_secs(2), OPEN_MAX + 1));
    }
}
