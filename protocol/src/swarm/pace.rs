//! [`Pace`] and [`Usual`]: how fast chunks come, measured by when they came.

use std::time::{Duration, Instant};

/// The time in which an old measurement loses its weight.
const MEMORY: Duration = Duration::from_secs(1);

/// The weight of one more duration in the usual one.
const WEIGHT: f64 = 0.125;

/// The weight of one more deviation from the usual duration in the usual deviation.
const DEVIATION_WEIGHT: f64 = 0.25;

/// A duration is exceptional if it is so many usual deviations longer than the usual one, as in the retransmission timeout
/// of TCP (RFC 6298).
const DEVIATIONS: u32 = 4;

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
pub(super) struct Usual {
    /// `None` before the first chunk.
    mean: Option<Duration>,
    deviation: Duration,
}

impl Usual {
    /// Records the time that one chunk took.
    pub(super) fn note(&mut self, took: Duration) {
        let Some(usual) = self.mean else {
            (self.mean, self.deviation) = (Some(took), took / 2);
            return;
        };
        let took = took.min(usual.mul_f64(OUTLIER));
        self.deviation = mix(self.deviation, usual.abs_diff(took), DEVIATION_WEIGHT);
        self.mean = Some(mix(usual, took, WEIGHT));
    }

    /// The usual time; `None` before the first chunk.
    pub(super) fn get(&self) -> Option<Duration> {
        self.mean
    }

    /// The time beyond which a chunk takes exceptionally long: at least twice the usual one, and more if the times differ
    /// much. `None` before the first chunk.
    pub(super) fn exceptional(&self) -> Option<Duration> {
        self.mean.map(|usual| usual + usual.max(self.deviation * DEVIATIONS))
    }
}

/// A mean that a newer value enters with this weight.
fn mix(mean: Duration, newer: Duration, weight: f64) -> Duration {
    mean.mul_f64(1.0 - weight) + newer.mul_f64(weight)
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

    #[test]
    fn what_is_exceptional_depends_on_how_much_times_differ() {
        let (mut steady, mut varied) = (Usual::default(), Usual::default());
        assert_eq!(steady.exceptional(), None);
        for times in 0..50 {
            steady.note(Duration::from_millis(100));
            varied.note(Duration::from_millis(if times % 4 == 0 { 310 } else { 30 }));
        }
        let millis = |usual: &Usual| usual.exceptional().unwrap().as_millis();
        assert!((200..210).contains(&millis(&steady)), "{steady:?}");
        assert!((400..700).contains(&millis(&varied)), "{varied:?}");
    }
}
