//! The rate at which large versions arrive.

use std::time::Duration;
use tokio::time::Instant;

/// The minimum duration of one measurement.
const MEASUREMENT_DURATION: Duration = Duration::from_secs(1);

/// The maximum time that a measurement waits for a chunk, to begin or to end with it. On a slow path, chunks are
/// seconds apart.
const ARRIVAL_TIMEOUT: Duration = Duration::from_secs(5);

/// The unmeasured time in which a connection reaches full speed.
const WARM_UP_DURATION: Duration = Duration::from_millis(500);

/// A sample of the receive counters at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sample {
    /// The index of the current period with a large version in transfer; `None` between such periods.
    pub(crate) period: Option<u64>,
    /// The number of lanes.
    pub(crate) lanes: u32,
    /// The decoded length of the chunks received on this connection so far. Not the encoded length, because the
    /// encoding may change at any time.
    pub(crate) verified_bytes: u64,
}

/// The bytes that arrived between two samples of one period.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) elapsed: Duration,
    pub(crate) bytes: u64,
    /// The number of lanes, if both samples have the same.
    pub(crate) lanes: Option<u32>,
}

/// Computes steps from samples, without the time between large versions.
#[derive(Debug, Default)]
pub(crate) struct Steps(Option<(Instant, Sample)>);

impl Steps {
    /// The step since the last sample, if both are of one period.
    pub(crate) fn next(&mut self, now: Instant, sample: Sample) -> Option<Step> {
        let (before, earlier) = self.0.replace((now, sample))?;
        let is_one_period = sample.period.is_some() && sample.period == earlier.period;
        is_one_period.then(|| Step {
            elapsed: now.saturating_duration_since(before),
            bytes: sample.verified_bytes.saturating_sub(earlier.verified_bytes),
            lanes: (sample.lanes == earlier.lanes).then_some(sample.lanes),
        })
    }
}

/// Measures one rate, after a warm-up, from the arrival of one chunk to that of another. Versions that end before a
/// second sample add nothing to it.
#[derive(Debug)]
pub(crate) struct Measurement {
    warm_up: Duration,
    /// Whether a chunk has arrived since the warm-up, or none has for [`ARRIVAL_TIMEOUT`].
    has_begun: bool,
    measured: Duration,
    bytes: u64,
}

impl Measurement {
    pub(crate) fn new() -> Self {
        Self { warm_up: WARM_UP_DURATION, has_begun: false, measured: Duration::ZERO, bytes: 0 }
    }

    /// A measurement that follows another one.
    pub(crate) fn following() -> Self {
        Self { warm_up: Duration::ZERO, has_begun: true, ..Self::new() }
    }

    /// Adds a step; returns the rate in bytes per second once it is measured.
    pub(crate) fn add(&mut self, step: Step) -> Option<f64> {
        if !self.warm_up.is_zero() {
            self.warm_up = self.warm_up.saturating_sub(step.elapsed);
            return None;
        }
        self.measured += step.elapsed;
        if !self.has_begun {
            self.has_begun = step.bytes > 0 || self.measured >= ARRIVAL_TIMEOUT;
            self.measured = if self.has_begun { Duration::ZERO } else { self.measured };
            return None;
        }
        self.bytes += step.bytes;
        let has_arrived = self.measured >= MEASUREMENT_DURATION && step.bytes > 0;
        let is_over = has_arrived || self.measured >= ARRIVAL_TIMEOUT;
        is_over.then(|| self.bytes as f64 / self.measured.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Measures where a chunk of `bytes` arrives every `interval` steps of 100 ms; returns the first two rates.
    fn rates(bytes: u64, interval: usize) -> [f64; 2] {
        let mut measurement = Measurement::new();
        let mut steps = (1_usize..).map(|step| Step {
            elapsed: Duration::from_millis(100),
            bytes: if step.is_multiple_of(interval) { bytes } else { 0 },
            lanes: Some(1),
        });
        let first = steps.find_map(|step| measurement.add(step)).unwrap();
        measurement = Measurement::following();
        [first, steps.find_map(|step| measurement.add(step)).unwrap()]
    }

    #[test]
    fn a_rate_is_measured_between_chunks() {
        for interval in [1, 7, 13, 40] {
            for rate in rates(1_000_000, interval) {
                let expected = 1e7 / interval as f64;
                assert!((rate - expected).abs() < 1.0, "{rate} instead of {expected}");
            }
        }
        assert_eq!(rates(1_000_000, 1_000), [0.0, 0.0], "none arrived in time");
    }
}
