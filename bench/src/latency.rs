//! The one-way latency of small messages.

use crate::{clock::monotonic_ns, contender::SmallMessages};
use anyhow::{Context, Result, ensure};

/// The length of a small message.
pub(crate) const MESSAGE_BYTES: usize = 4096;

/// The number of messages to send: a tenth of `counted` to warm up, then `counted`.
pub(crate) fn message_count(counted: u32) -> u32 {
    counted.saturating_add(warm_up(counted))
}

fn warm_up(counted: u32) -> u32 {
    counted.div_ceil(WARM_UP_DIVISOR)
}

/// Writes the time at which its sending began into the first bytes of `message`.
///
/// # Panics
/// When `message` is shorter than eight bytes.
pub(crate) fn stamp(message: &mut [u8], begun_ns: u64) {
    message[..STAMP_BYTES].copy_from_slice(&begun_ns.to_le_bytes());
}

/// A message that contains the current time.
pub(crate) fn stamped() -> [u8; MESSAGE_BYTES] {
    let mut message = [0x5a; MESSAGE_BYTES];
    stamp(&mut message, monotonic_ns());
    message
}

/// A list of the latencies of the messages so far.
#[derive(Debug)]
pub(crate) struct Latencies {
    /// The number of warm-up messages that are yet to arrive.
    warm_up_left: u32,
    ns: Vec<u64>,
}

impl Latencies {
    /// An empty list for `counted` counted messages, preceded by their warm-up messages.
    pub(crate) fn new(counted: u32) -> Self {
        Self { warm_up_left: warm_up(counted), ns: Vec::with_capacity(counted as usize) }
    }

    /// Adds the latency of a message that has just arrived; those of warm-up messages are ignored.
    ///
    /// # Errors
    /// When the length is wrong, or the time of the message is in the future.
    pub(crate) fn add(&mut self, message: &[u8]) -> Result<()> {
        let now_ns = monotonic_ns();
        ensure!(
            message.len() == MESSAGE_BYTES,
            "a small message of {} bytes came instead of {MESSAGE_BYTES}",
            message.len()
        );
        let (stamp, _) = message.split_first_chunk().expect("the message is longer than a stamp");
        let begun_ns = u64::from_le_bytes(*stamp);
        let ns = now_ns
            .checked_sub(begun_ns)
            .context("a message was sent in the future: its sender is on another machine")?;
        self.record(ns);
        Ok(())
    }

    /// Adds a latency.
    pub(crate) fn record(&mut self, ns: u64) {
        match self.warm_up_left {
            0 => self.ns.push(ns),
            _ => self.warm_up_left -= 1,
        }
    }

    /// The latency in microseconds that at least `percent` % do not exceed, by nearest rank as in
    /// `bench/peers/contender.py`; `None` if there are none.
    pub(crate) fn percentile_us(&mut self, percent: f64) -> Option<f64> {
        self.ns.sort_unstable(); // Fast when it is in order already.
        let rank = (percent * self.ns.len() as f64 / 100.0).ceil() as usize;
        self.ns.get(rank.max(1) - 1).map(|ns| *ns as f64 / 1e3)
    }

    /// The percentiles; zeros if there are no messages.
    pub(crate) fn summary(mut self) -> SmallMessages {
        let mut percentile = |percent| self.percentile_us(percent).unwrap_or(0.0);
        let [min_us, p50_us, p99_us, max_us] = [0.0, 50.0, 99.0, 100.0].map(&mut percentile);
        SmallMessages { small: self.ns.len() as u32, p50_us, p99_us, min_us, max_us }
    }
}

const STAMP_BYTES: usize = 8;

/// One warm-up message is sent for this number of counted ones.
const WARM_UP_DIVISOR: u32 = 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_ranks() {
        let ns = (1..=200).rev().map(|us| us * 1000).collect();
        let small = Latencies { warm_up_left: 0, ns }.summary();
        assert_eq!(
            small,
            SmallMessages { small: 200, p50_us: 100.0, p99_us: 198.0, min_us: 1.0, max_us: 200.0 }
        );
        assert_eq!(Latencies::new(9).summary().max_us, 0.0);
    }

    #[test]
    fn messages_contain_the_time_of_sending() {
        let mut latencies = Latencies::new(1);
        for _ in 0..message_count(1) {
            latencies.add(&stamped()).unwrap();
        }
        let small = latencies.summary();
        assert!(small.small == 1 && small.max_us < 1e9, "less than 1000 s ago: {small:?}");
    }

    #[test]
    fn a_tenth_as_many_messages_warm_up() {
        assert_eq!([0, 1, 10, 11, 1000].map(message_count), [0, 2, 11, 13, 1100]);
        let mut latencies = Latencies::new(20);
        for _ in 0..message_count(20) {
            latencies.add(&stamped()).unwrap();
        }
        assert_eq!(latencies.summary().small, 20);
    }

    #[test]
    fn invalid_messages_are_refused() {
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
