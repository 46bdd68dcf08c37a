//! The rate at which large versions arrive.

use std::time::Duration;
use tokio::time::Instant;

/// The duration of one measurement.
const MEASUREMENT_DURATION: Duration = Duration::from_secs(1);

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

/// Measures one rate, after a warm-up.
#[derive(Debug)]
pub(crate) struct Measurement {
    warm_up: Duration,
    measured: Duration,
    bytes: u64,
}

impl Measurement {
    pub(crate) fn new() -> Self {
        Self { warm_up: WARM_UP_DURATION, measured: Duration::ZERO, bytes: 0 }
    }

    /// A measurement without a warm-up, for a connection at full speed.
    pub(crate) fn without_warm_up() -> Self {
        Self { warm_up: Duration::ZERO, ..Self::new() }
    }

    /// Adds a step; returns the rate in bytes per second once it is measured.
    pub(crate) fn add(&mut self, step: Step) -> Option<f64> {
        if !self.warm_up.is_zero() {
            self.warm_up = self.warm_up.saturating_sub(step.elapsed);
            return None;
        }
        self.measured += step.elapsed;
        self.bytes += step.bytes;
        (self.measured >= MEASUREMENT_DURATION).then(|| self.bytes as f64 / self.measured.as_secs_f64())
    }
}
