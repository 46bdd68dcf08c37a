//! The rate at which large versions arrive.

use std::time::Duration;
use tensor_relay_protocol::Pauses;
use tokio::time::Instant;

/// The minimum duration of one measurement.
const MEASUREMENT_DURATION: Duration = Duration::from_secs(1);

/// The minimum duration of a [glance](Measurement::glance) at one.
const GLANCE_DURATION: Duration = Duration::from_millis(200);

/// The maximum time that a measurement waits for bytes, to begin or to end with them. A path may be interrupted.
const ARRIVAL_TIMEOUT: Duration = Duration::from_secs(5);

/// The unmeasured time in which a connection reaches full speed.
pub(crate) const WARM_UP_DURATION: Duration = Duration::from_millis(500);

/// A period with a large version in transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Period {
    /// From 1.
    pub(crate) index: u64,
    /// The size of the version.
    pub(crate) bytes: u64,
}

/// A sample of the receive counters at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Sample {
    /// The current period; `None` between periods.
    pub(crate) period: Option<Period>,
    /// The number of lanes.
    pub(crate) lanes: u32,
    /// Whether that number is final.
    pub(crate) has_settled: bool,
    /// The decoded length of what arrived on this connection so far. Not the encoded length, because the encoding may
    /// change at any time.
    pub(crate) arrived_bytes: u64,
    /// The processor time that this process has used so far.
    pub(crate) processor_time: Duration,
}

/// What happened between two samples of one period.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) elapsed: Duration,
    pub(crate) bytes: u64,
    pub(crate) processor_time: Duration,
    /// The number of lanes, if both samples have the same.
    pub(crate) lanes: Option<u32>,
}

/// Computes steps from samples, without the time between large versions.
#[derive(Debug, Clone, Default)]
pub(crate) struct Steps(Option<(Instant, Sample)>);

impl Steps {
    /// The step since the last sample, if both are of one period.
    pub(crate) fn next(&mut self, now: Instant, sample: Sample) -> Option<Step> {
        let (before, earlier) = self.0.replace((now, sample))?;
        let is_one_period = sample.period.is_some() && sample.period == earlier.period;
        is_one_period.then(|| Step {
            elapsed: now.saturating_duration_since(before),
            bytes: sample.arrived_bytes.saturating_sub(earlier.arrived_bytes),
            processor_time: sample.processor_time.saturating_sub(earlier.processor_time),
            lanes: (sample.lanes == earlier.lanes).then_some(sample.lanes),
        })
    }
}

/// A measured rate.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Rate {
    pub(crate) bytes_per_s: f64,
    /// The processors that this process used.
    pub(crate) processors: f64,
}

impl Rate {
    /// The share of each of so many lanes.
    pub(crate) fn each(self, lanes: u32) -> Self {
        let lanes = f64::from(lanes);
        Self { bytes_per_s: self.bytes_per_s / lanes, processors: self.processors / lanes }
    }

    /// How many times as much processor time a byte took as with `other`. Not a number where none was measured.
    pub(crate) fn cost_by(self, other: Self) -> f64 {
        (self.processors / self.bytes_per_s) / (other.processors / other.bytes_per_s)
    }
}

/// Measures one rate, after a warm-up, from one arrival of bytes to another. Versions that end before a second sample
/// add nothing to it.
#[derive(Debug, Clone)]
pub(crate) struct Measurement {
    warm_up: Duration,
    /// Whether bytes have arrived since the warm-up, or none have for [`ARRIVAL_TIMEOUT`].
    has_begun: bool,
    measured: Duration,
    processor_time: Duration,
    bytes: u64,
}

impl Measurement {
    /// A measurement after a `warm_up`.
    pub(crate) fn after(warm_up: Duration) -> Self {
        Self { warm_up, has_begun: false, ..Self::following() }
    }

    /// A measurement that follows another one.
    pub(crate) fn following() -> Self {
        let (warm_up, measured, processor_time) = Default::default();
        Self { warm_up, has_begun: true, measured, processor_time, bytes: 0 }
    }

    /// Adds a step; returns the rate once it is measured.
    pub(crate) fn add(&mut self, step: Step) -> Option<Rate> {
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
        self.processor_time += step.processor_time;
        let has_arrived = self.measured >= MEASUREMENT_DURATION && step.bytes > 0;
        let is_over = has_arrived || self.measured >= ARRIVAL_TIMEOUT;
        is_over.then(|| self.rate())
    }

    /// The rate so far, of at least [`GLANCE_DURATION`]: enough to see a large difference.
    pub(crate) fn glance(&self) -> Option<Rate> {
        (self.has_begun && self.bytes > 0 && self.measured >= GLANCE_DURATION).then(|| self.rate())
    }

    fn rate(&self) -> Rate {
        let seconds = self.measured.as_secs_f64();
        Rate {
            bytes_per_s: self.bytes as f64 / seconds,
            processors: self.processor_time.as_secs_f64() / seconds,
        }
    }
}

/// The pauses between trials that need large versions: most paths do not change, so later ones are long.
pub(crate) fn pauses(first: Duration) -> Pauses {
    Pauses { first: micros(first), growth: 4, max: micros(Duration::from_secs(3_600)) }
}

/// A duration in the unit of the client's trials.
pub(crate) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Measures where `bytes` arrive every `interval` steps of 100 ms; returns the first two rates.
    fn rates(bytes: u64, interval: usize) -> [f64; 2] {
        let mut measurement = Measurement::after(WARM_UP_DURATION);
        let mut steps = (1_usize..).map(|step| Step {
            elapsed: Duration::from_millis(100),
            bytes: if step.is_multiple_of(interval) { bytes } else { 0 },
            processor_time: Duration::from_millis(50),
            lanes: Some(1),
        });
        let first = steps.find_map(|step| measurement.add(step)).unwrap();
        measurement = Measurement::following();
        let second = steps.find_map(|step| measurement.add(step)).unwrap();
        assert_eq!([first.processors, second.processors], [0.5; 2]);
        [first.bytes_per_s, second.bytes_per_s]
    }

    #[test]
    fn a_rate_is_measured_between_arrivals() {
        for interval in [1, 7, 13, 40] {
            for rate in rates(1_000_000, interval) {
                let expected = 1e7 / interval as f64;
                assert!((rate - expected).abs() < 1.0, "{rate} instead of {expected}");
            }
        }
        assert_eq!(rates(1_000_000, 1_000), [0.0, 0.0], "none arrived in time");
    }
}
