//! [`SendWindow`]: the maximum of unacknowledged bytes of a lane.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// The rate that a window must allow, in bytes per microsecond: 20 Gbit/s per lane, more than one core encrypts.
const RATE: u64 = 2_500;

/// A window that follows bandwidth × delay.
///
/// A window that is too small leaves a long path idle; one that is too large lets a burst overflow the receiver's
/// socket buffer. The congestion controller finds the path's rate, which the window must not limit. So it is [`RATE`]
/// times the minimal round trip time of the path, within bounds; queues lengthen other round trips.
#[derive(Debug)]
pub(crate) struct SendWindow {
    least_bytes: u64,
    most_bytes: u64,
    now_bytes: AtomicU64,
}

impl SendWindow {
    /// A window from `least_bytes`, its initial size, to `most_bytes`.
    pub(crate) fn new(least_bytes: u32, most_bytes: u32) -> Self {
        let (least_bytes, most_bytes) = (least_bytes.into(), most_bytes.max(least_bytes).into());
        Self { least_bytes, most_bytes, now_bytes: AtomicU64::new(least_bytes) }
    }

    /// Updates the window by the path's minimal round trip time; returns its size in bytes if that changed.
    pub(crate) fn handle_round_trip(&self, least: Duration) -> Option<u64> {
        let bytes = self.bytes(u64::try_from(least.as_micros()).unwrap_or(u64::MAX));
        (self.now_bytes.swap(bytes, Ordering::Relaxed) != bytes).then_some(bytes)
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
    fn it_follows_the_round_trip() {
        let window = SendWindow::new(4 << 20, 64 << 20);
        assert_eq!(window.handle_round_trip(Duration::from_micros(100)), None, "the initial size");
        assert_eq!(window.handle_round_trip(Duration::from_millis(10)), Some(25_000_000), "another path");
        assert_eq!(window.handle_round_trip(Duration::from_millis(10)), None);
        assert_eq!(window.handle_round_trip(Duration::from_micros(100)), Some(4 * MIB));
    }

    #[test]
    fn it_stays_within_its_bounds() {
        let window = |rtt| SendWindow::new(4 << 20, 64 << 20).handle_round_trip(rtt);
        assert_eq!(window(Duration::ZERO), None);
        assert_eq!(window(Duration::from_secs(1)), Some(64 * MIB));
        assert_eq!(window(Duration::MAX), Some(64 * MIB));
        let fixed = SendWindow::new(8 << 20, 4 << 20);
        assert_eq!(fixed.handle_round_trip(Duration::from_secs(1)), None, "the lower bound applies");
    }
}
