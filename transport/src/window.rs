//! How much a lane may have sent that is not acknowledged yet.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// The rate that windows are made for: 20 Gbit/s a lane, beyond what one core encrypts. In bytes per microsecond.
const RATE: u64 = 2_500;

/// A window that follows bandwidth × delay.
///
/// Too small, it leaves a long path idle; too large, it lets a burst overflow the receiver's socket buffer. What
/// the path carries is the congestion controller's to find out; the window only has to be no obstacle. So it is what
/// [`RATE`] fills in one round trip, within bounds: the least round trip seen counts, since a queue makes later ones longer.
#[derive(Debug)]
pub(crate) struct SendWindow {
    least_bytes: u64,
    most_bytes: u64,
    rtt_us: AtomicU64,
}

impl SendWindow {
    /// A window of `least_bytes`, until a round trip was seen, to `most_bytes`.
    pub(crate) fn new(least_bytes: u32, most_bytes: u32) -> Self {
        let (least_bytes, most_bytes) = (least_bytes.into(), most_bytes.max(least_bytes).into());
        Self { least_bytes, most_bytes, rtt_us: AtomicU64::new(u64::MAX) }
    }

    /// Takes a round trip time, and returns the window in bytes when that changes it.
    pub(crate) fn handle_round_trip(&self, rtt: Duration) -> Option<u64> {
        let rtt_us = u64::try_from(rtt.as_micros()).unwrap_or(u64::MAX);
        let before_us = self.rtt_us.fetch_min(rtt_us, Ordering::Relaxed);
        (rtt_us < before_us).then(|| self.bytes(rtt_us))
    }

    fn bytes(&self, rtt_us: u64) -> u64 {
        rtt_us.saturating_mul(RATE).clamp(self.least_bytes, self.most_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn it_follows_the_least_round_trip() {
        let window = SendWindow::new(4 << 20, 64 << 20);
        assert_eq!(window.handle_round_trip(Duration::from_millis(10)), Some(25_000_000));
        assert_eq!(window.handle_round_trip(Duration::from_millis(50)), None, "a queue grew");
        assert_eq!(window.handle_round_trip(Duration::from_micros(100)), Some(4 * MIB));
        assert_eq!(window.handle_round_trip(Duration::from_micros(100)), None);
    }

    #[test]
    fn it_stays_within_its_bounds() {
        let window = |rtt| SendWindow::new(4 << 20, 64 << 20).handle_round_trip(rtt);
        assert_eq!(window(Duration::ZERO), Some(4 * MIB));
        assert_eq!(window(Duration::from_secs(1)), Some(64 * MIB));
        assert_eq!(window(Duration::MAX), None, "no clock measures that");
        let fixed = SendWindow::new(8 << 20, 4 << 20);
        assert_eq!(fixed.handle_round_trip(Duration::from_secs(1)), Some(8 * MIB), "the least binds");
    }
}
