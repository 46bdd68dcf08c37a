//! [`RetryPolicy`]: decides when clients have to validate their address before the handshake. No I/O.

use std::time::Instant;

/// The number of open lanes above which every address must be validated: forged addresses must not fill the server.
const OPEN_MAX: usize = 256;

/// The maximum rate of handshakes from unvalidated addresses. Above it, clients receive Retry.
///
/// A handshake costs the server a signature and a key exchange, at most half a millisecond of CPU time. So handshakes
/// from forged addresses take at most 7 % of a processor. If a thousand clients connect simultaneously, 872 of them
/// need another round trip.
pub const HANDSHAKES_PER_SECOND: u32 = 128;

const RATE_PER_SECOND: f64 = HANDSHAKES_PER_SECOND as f64;

/// Decides which clients receive Retry (RFC 9000 §8.1.2) instead of a handshake: those with an unvalidated address,
/// while many lanes are open or many such clients connect.
///
/// A leaky bucket counts connection attempts from all addresses together, since addresses can be forged. It does not
/// count open connections, since a failed handshake leaves none. Once a flood has filled the bucket, all attempts
/// receive Retry, until at most a second after the flood.
#[derive(Debug, Default)]
pub(super) struct RetryPolicy {
    /// The fill level of the bucket, in connection attempts.
    level: f64,
    updated: Option<Instant>,
}

impl RetryPolicy {
    /// Counts a connection attempt at `now` from an unvalidated address, with `open` lanes. Returns whether to send
    /// Retry.
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

    /// The number of Retries for `count` clients that connect at intervals of `apart`.
    fn retries(policy: &mut RetryPolicy, now: &mut Instant, count: u32, apart: Duration) -> u32 {
        let arrivals = (0..count).map(|_| {
            *now += apart;
            u32::from(policy.handle_unvalidated(*now, 0))
        });
        arrivals.sum()
    }

    #[test]
    fn the_first_clients_of_a_burst_pass() {
        let (mut policy, mut now) = (RetryPolicy::default(), Instant::now());
        assert_eq!(retries(&mut policy, &mut now, 1_000, Duration::ZERO), 1_000 - 128);
    }

    #[test]
    fn a_flood_receives_retry_while_it_lasts() {
        let (mut policy, mut now) = (RetryPolicy::default(), Instant::now());
        let apart = Duration::from_millis(1);
        retries(&mut policy, &mut now, 1_000, apart);
        assert_eq!(retries(&mut policy, &mut now, 100_000, apart), 100_000);
        now += Duration::from_secs(1);
        assert_eq!(retries(&mut policy, &mut now, 100, Duration::from_millis(10)), 0, "the flood has ended");
    }

    #[test]
    fn below_the_rate_all_clients_pass_until_many_lanes_are_open() {
        let (mut policy, mut now) = (RetryPolicy::default(), Instant::now());
        assert_eq!(retries(&mut policy, &mut now, 10_000, Duration::from_millis(8)), 0);
        assert!(!policy.handle_unvalidated(now + Duration::from_secs(1), OPEN_MAX));
        assert!(policy.handle_unvalidated(now + Duration::from_secs(2), OPEN_MAX + 1));
    }
}
