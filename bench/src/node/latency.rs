//! A histogram of latencies.

use crate::cells::Cells;
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// A histogram of durations in nanoseconds, with a resolution of one percent and a fixed number of buckets. Durations
/// above a minute count as a minute.
#[derive(Debug, Clone)]
pub(crate) struct LatencyHistogram(Histogram<u64>);

/// The non-empty buckets of a histogram, as sent in reports and written to result files: pairs of the upper bound in
/// nanoseconds and the number of durations between the bound of the bucket before and this one.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Buckets(Vec<(u64, u64)>);

const LATENCY_MAX_NS: u64 = 60_000_000_000;

/// The number of significant decimal digits.
const PRECISION: u8 = 2;

impl LatencyHistogram {
    pub(crate) fn new() -> Self {
        Self(Histogram::new_with_bounds(1, LATENCY_MAX_NS, PRECISION).expect("these bounds are in order"))
    }

    /// Adds a duration.
    pub(crate) fn record(&mut self, ns: u64) {
        self.0.saturating_record(ns);
    }

    /// Adds the durations of another histogram. They may come from another host, so any numbers are accepted.
    pub(crate) fn add(&mut self, buckets: &Buckets) {
        for (ns, count) in &buckets.0 {
            self.0.saturating_record_n(*ns, *count);
        }
    }

    pub(crate) fn buckets(&self) -> Buckets {
        let recorded = self.0.iter_recorded();
        Buckets(
            recorded
                .map(|bucket| (bucket.value_iterated_to(), bucket.count_since_last_iteration()))
                .collect(),
        )
    }

    /// The number of durations, their minimum, percentiles and maximum; `None` if there are none.
    pub(crate) fn summary(&self) -> Option<Cells<f64>> {
        let us = |ns: u64| ns as f64 / 1e3;
        let at = |share| us(self.0.value_at_quantile(share));
        let summary = || {
            Cells::of([
                ("count", self.0.len() as f64),
                ("min_us", us(self.0.min())),
                ("p50_us", at(0.5)),
                ("p90_us", at(0.9)),
                ("p99_us", at(0.99)),
                ("p999_us", at(0.999)),
                ("max_us", us(self.0.max())),
            ])
        };
        (!self.0.is_empty()).then(summary)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::LINE_MAX_BYTES;
    use proptest::prelude::*;

    #[test]
    fn percentiles_are_within_a_percent() {
        let mut latencies = LatencyHistogram::new();
        (1..=1000).for_each(|us| latencies.record(us * 1000));
        let summary = latencies.summary().unwrap();
        let [count, min, p50, p99, max] =
            ["count", "min_us", "p50_us", "p99_us", "max_us"].map(|name| *summary.get(name).unwrap());
        let near = |found: f64, expected: f64| (found / expected - 1.0).abs() < 0.011;
        assert_eq!(count, 1000.0);
        assert!(near(min, 1.0) && near(p50, 500.0) && near(p99, 990.0) && near(max, 1000.0));
        assert_eq!(LatencyHistogram::new().summary(), None);
    }

    /// Goal: the longest report of a histogram fits a line. Method: a duration in every bucket.
    #[test]
    fn the_fullest_histogram_fits_a_line() {
        let mut latencies = LatencyHistogram::new();
        let mut ns = 1;
        while ns < LATENCY_MAX_NS {
            latencies.record(ns);
            ns = latencies.0.next_non_equivalent(ns);
        }
        let mut full = latencies.buckets();
        full.0.iter_mut().for_each(|(_, count)| *count = 1_000_000);
        let bytes = serde_json::to_vec(&full).unwrap().len();
        assert!(bytes < LINE_MAX_BYTES / 2, "{bytes} bytes");
    }

    proptest! {
        /// Buckets survive the wire, and hostile ones cannot cause a panic.
        #[test]
        fn buckets_survive_the_wire(values in prop::collection::vec(any::<u64>(), 0..200), hostile in any::<Vec<(u64, u64)>>()) {
            let mut latencies = LatencyHistogram::new();
            values.iter().for_each(|ns| latencies.record(*ns));
            let mut copy = LatencyHistogram::new();
            copy.add(&latencies.buckets());
            prop_assert_eq!(copy.buckets(), latencies.buckets());
            copy.add(&Buckets(hostile));
            copy.summary();
        }
    }
}
