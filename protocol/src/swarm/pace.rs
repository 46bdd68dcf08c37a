//! [`Pace`] and [`Usual`]: how fast chunks come, measured by when they came.

use std::time::{Duration, Instant};

/// The time in which an old measurement loses its weight.
const MEMORY: Duration = Duration::from_secs(1);

/// The weight of one more duration in the usual one.
const WEIGHT: f64 = 0.125;

/// A duration counts as at most so many times the usual one, so that one slow chunk changes little.
const OUTLIER: f64 = 4.0;

/// The rate at which one source delivers, of late.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Pace {
    /// Chunks a second.
    rate: f64,
    at: Option<Instant>,
}

impl Pace {
    /// Records that a chunk came.
    pub(super) fn handle_delivered(&mut self, now: Instant) {
        self.rate = self.rate(now) + 1.0 / MEMORY.as_secs_f64();
        self.at = Some(now);
    }

    /// The rate, in chunks a second.
    pub(super) fn rate(&self, now: Instant) -> f64 {
        let Some(at) = self.at else { return 0.0 };
        let age = now.saturating_duration_since(at).as_secs_f64() / MEMORY.as_secs_f64();
        self.rate * (-age).exp()
    }
}

/// The usual time from a chunk's order, or the beginning of its push, to its arrival.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Usual(Option<Duration>);

impl Usual {
    /// Records the time that one chunk took.
    pub(super) fn note(&mut self, took: Duration) {
        let usual = self.0.unwrap_or(took);
        let took = took.min(usual.mul_f64(OUTLIER));
        self.0 = Some(usual.mul_f64(1.0 - WEIGHT) + took.mul_f64(WEIGHT));
    }

    /// The usual time; `None` before the first chunk.
    pub(super) fn get(&self) -> Option<Duration> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::subscriber::fixtures;

    #[test]
    fn the_rate_follows_deliveries_and_fades() {
        let (mut pace, began) = (Pace::default(), fixtures::now());
        assert_eq!(pace.rate(began), 0.0);
        let at = |tenths: u32| began + Duration::from_millis(100) * tenths;
        (1..=50).for_each(|tenth| pace.handle_delivered(at(tenth)));
        assert!((9.0..12.0).contains(&pace.rate(at(50))), "{pace:?}");
        assert!(pace.rate(at(80)) < 1.0);
    }

    #[test]
    fn one_slow_chunk_changes_the_usual_time_little() {
        let mut usual = Usual::default();
        assert_eq!(usual.get(), None);
        (0..50).for_each(|_| usual.note(Duration::from_millis(100)));
        usual.note(Duration::from_secs(100));
        assert!(usual.get() < Some(Duration::from_millis(140)), "{usual:?}");
        (0..50).for_each(|_| usual.note(Duration::from_millis(300)));
        assert!(usual.get() > Some(Duration::from_millis(290)), "{usual:?}");
    }
}
