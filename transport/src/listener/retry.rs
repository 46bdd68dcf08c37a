//! When clients have to prove their address before the handshake. Pure.

use std::time::Instant;

/// The most open lanes before clients have to prove their address: forged addresses do not fill the server.
const OPEN_MAX: usize = 256;

/// How many clients a second may do the handshake without having proven their address.
///
/// A handshake costs the server a signature and a key exchange, half a millisecond of a processor or less, so forged ones
/// take 6 % of one at the most. A thousand workers that connect at once cost 872 of them one round trip more.
const RATE_PER_SECOND: f64 = 128.0;

/// Which clients are answered with Retry (RFC 9000 §8.1.2) and not with a handshake: those whose address is not proven, while
/// many lanes are open or many such clients arrive.
///
/// Addresses can be forged, so they are counted together. What they cost has to be bounded by their arrival alone: a
/// handshake that is made to fail at once leaves no open connection behind. Each arrival adds one to a level that falls by
/// the rate, whatever becomes of it; so all of a flood get Retry, for as long as it lasts and up to a second after it.
#[derive(Debug, Default)]
pub(super) struct RetryPolicy {
    level: f64,
    updated: Option<Instant>,
}

impl RetryPolicy {
    /// Counts a client that arrives at `now` without a proof of its address, while `open` lanes are. Returns whether it has
    /// to bring one.
    pub(super) fn handle_unproven(&mut self, now: Instant, open: usize) -> bool {
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

    /// Of `count` clients that arrive `apart` from one another, how many have to prove their address.
    fn retried(policy: &mut RetryPolicy, now: &mut Instant, count: u32, apart: Duration) -> u32 {
        let arrivals = (0..count).map(|_| {
            *now += apart;
            u32::from(policy.handle_unproven(*now, 0))
        });
        arrivals.sum()
    }

    #[test]
    fn of_a_burst_the_first_pass() {
        let (mut policy, mut now) = (RetryPolicy::default(), Instant::now());
        assert_eq!(retried(&mut policy, &mut now, 1_000, Duration::ZERO), 1_000 - 128);
    }

    #[test]
    fn of_a_flood_none_pass_for_as_long_as_it_lasts() {
        let (mut policy, mut now) = (RetryPolicy::default(), Instant::now());
        let apart = Duration::from_millis(1);
        retried(&mut policy, &mut now, 1_000, apart);
        assert_eq!(retried(&mut policy, &mut now, 100_000, apart), 100_000);
        now += Duration::from_secs(1);
        assert_eq!(retried(&mut policy, &mut now, 100, Duration::from_millis(10)), 0, "it is over");
    }

    #[test]
    fn below_the_rate_all_pass_until_many_lanes_are_open() {
        let (mut policy, mut now) = (RetryPolicy::default(), Instant::now());
        assert_eq!(retried(&mut policy, &mut now, 10_000, Duration::from_millis(8)), 0);
        assert!(!policy.handle_unproven(now + Duration::from_secs(1), OPEN_MAX));
        assert!(policy.handle_unproven(now + Duration::from_secs(2), OPEN_MAX + 1));
    }
}
