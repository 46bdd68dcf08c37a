//! The time that a small message takes, one way.

use crate::contender::Small;
use anyhow::{Context, Result, ensure};
use nix::time::{ClockId, clock_gettime};

/// How long a small message is.
pub(crate) const MESSAGE_BYTES: usize = 4096;

/// A message that is begun now.
pub(crate) fn stamped() -> [u8; MESSAGE_BYTES] {
    let mut message = [0x5a; MESSAGE_BYTES];
    stamp(&mut message);
    message
}

/// Writes the time into the first bytes of `message`.
///
/// # Panics
/// When there are fewer than eight.
pub(crate) fn stamp(message: &mut [u8]) {
    message[..STAMP_BYTES].copy_from_slice(&now_ns().to_le_bytes());
}

/// What the messages took that have come.
#[derive(Debug)]
pub(crate) struct Latencies {
    ns: Vec<u64>,
}

impl Latencies {
    /// None yet, and room for `expected`.
    pub(crate) fn new(expected: u32) -> Self {
        Self { ns: Vec::with_capacity(expected as usize) }
    }

    /// Adds a message that has come just now.
    ///
    /// # Errors
    /// When it is none of ours.
    pub(crate) fn add(&mut self, message: &[u8]) -> Result<()> {
        let now_ns = now_ns();
        ensure!(
            message.len() == MESSAGE_BYTES,
            "a small message of {} bytes came instead of {MESSAGE_BYTES}",
            message.len()
        );
        let (stamp, _) = message.split_first_chunk().expect("the message is longer, see above");
        let begun_ns = u64::from_le_bytes(*stamp);
        let ns = now_ns
            .checked_sub(begun_ns)
            .context("a message was begun in the future: its sender is on another machine")?;
        self.ns.push(ns);
        Ok(())
    }

    /// All of them, in a few numbers; zeros if there are none.
    pub(crate) fn summary(mut self) -> Small {
        self.ns.sort_unstable();
        let at_most = |share: f64| {
            // The smallest value that so many are not above.
            let rank = (share * self.ns.len() as f64).ceil() as usize;
            self.ns.get(rank.max(1) - 1).map_or(0.0, |ns| *ns as f64 / 1e3)
        };
        Small {
            small: self.ns.len() as u32,
            p50_us: at_most(0.5),
            p99_us: at_most(0.99),
            min_us: at_most(0.0),
            max_us: at_most(1.0),
        }
    }
}

/// Nanoseconds since some moment that all processes of this machine share.
fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("Linux has this clock");
    now.tv_sec() as u64 * 1_000_000_000 + now.tv_nsec() as u64
}

const STAMP_BYTES: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_those_of_the_sorted_list() {
        let ns = (1..=200).rev().map(|us| us * 1000).collect();
        let small = Latencies { ns }.summary();
        assert_eq!(small, Small { small: 200, p50_us: 100.0, p99_us: 198.0, min_us: 1.0, max_us: 200.0 });
        assert_eq!(Latencies::new(9).summary().max_us, 0.0);
    }

    #[test]
    fn messages_tell_when_they_were_begun() {
        let mut latencies = Latencies::new(1);
        latencies.add(&stamped()).unwrap();
        assert!(latencies.summary().max_us < 1e9, "less than a quarter of an hour ago");
    }

    #[test]
    fn what_is_no_message_is_no_latency() {
        let mut latencies = Latencies::new(2);
        assert!(latencies.add(&[0; 9]).is_err());
        assert!(
            latencies
                .add(&[0xff; MESSAGE_BYTES])
                .unwrap_err()
                .to_string()
                .contains("another machine")
        );
    }
}
