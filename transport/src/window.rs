//! [`SendWindow`]: the maximum of unacknowledged bytes of a lane.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// The rate that a window must allow: 20 Gbit/s per lane, more than one core can encrypt.
const RATE_BYTES_PER_US: u64 = 2_500;

/// A send window sized by the bandwidth-delay product.
///
/// A window that is too small leaves a long path idle; one that is too large lets a burst overflow the receiver's
/// socket buffer. The congestion controller finds the path's rate, which the window must not limit. So the window is
/// [`RATE_BYTES_PER_US`] times the path's minimal round trip time, which excludes queueing delay, within bounds.
#[derive(Debug)]
pub(crate) struct SendWindow {
    min_bytes: u64,
    max_bytes: u64,
    current_bytes: AtomicU64,
}

impl SendWindow {
    /// A window from `min_bytes`, its initial size, to `max_bytes`.
    pub(crate) fn new(min_bytes: u32, max_bytes: u32) -> Self {
        let (min_bytes, max_bytes) = (min_bytes.into(), max_bytes.max(min_bytes).into());
        Self { min_bytes, max_bytes, current_bytes: AtomicU64::new(min_bytes) }
    }

    /// Updates the window by the path's minimal round trip time; returns the window's size in bytes if it changed.
    pub(crate) fn handle_round_trip(&self, min_rtt: Duration) -> Option<u64> {
        let bytes = self.bytes(u64::try_from(min_rtt.as_micros()).unwrap_or(u64::MAX));
        (self.current_bytes.swap(bytes, Ordering::Relaxed) != bytes).then_some(bytes)
    }

    fn bytes(&self, rtt_us: u64) -> u64 {
        rtt_us.saturating_mul(RATE_BYTES_PER_US).clamp(self.min_bytes, self.max_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn the_window_follows_the_round_trip_time() {
        let window = SendWindow::new(4 << 20, 64 << 20);
        assert_eq!(window.handle_round_trip(Duration::from_micros(100)), None, "the initial size");
        assert_eq!(window.handle_round_trip(Duration::from_millis(10)), Some(25_000_000), "another path");
        assert_eq!(window.handle_round_trip(Duration::from_millis(10)), None);
        assert_eq!(window.handle_round_trip(Duration::from_micros(100)), Some(4 * MIB));
    }

    #[test]
    fn the_window_stays_within_its_bounds() {
        let window = |rtt| SendWindow::new(4 << 20, 64 << 20).handle_round_trip(rtt);
        assert_eq!(window(Duration::ZERO), None);
        assert_eq!(window(Duration::from_secs(1)), Some(64 * MIB));
        assert_eq!(window(Duration::MAX), Some(64 * MIB));
        let fixed = SendWindow::new(8 << 20, 4 << 20);
        assert_eq!(fixed.handle_round_trip(Duration::from_secs(1)), None, "the lower bound applies");
    }
}
