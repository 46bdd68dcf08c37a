//! Metric families, and their encoding.

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, NoLabelSet, text},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
    registry::{Registry, Unit},
};
use std::fmt;

/// The prefix of every metric name.
const PREFIX: &str = "tensor_relay";

/// The labels of a sample.
pub(super) type Labels = Vec<(&'static str, String)>;

/// A metric family.
#[derive(Debug, Clone)]
pub(crate) struct Family {
    /// The name without prefix and unit.
    name: &'static str,
    /// The help text: a sentence without its full stop.
    help: &'static str,
    unit: Option<Unit>,
    samples: Samples,
}

#[derive(Debug, Clone)]
enum Samples {
    /// Values that never decrease.
    Counter(Vec<(Labels, f64)>),
    Gauge(Vec<(Labels, f64)>),
    /// The count of each bucket, by its upper bound.
    Histogram {
        buckets: Vec<(f64, u64)>,
        sum: f64,
    },
}

impl Family {
    /// A family of counters.
    pub(super) fn counters(name: &'static str, help: &'static str, samples: Vec<(Labels, f64)>) -> Self {
        Self { name, help, unit: None, samples: Samples::Counter(samples) }
    }

    pub(super) fn counter(name: &'static str, help: &'static str, value: f64) -> Self {
        Self::counters(name, help, vec![(vec![], value)])
    }

    /// A family of gauges.
    pub(super) fn gauges(name: &'static str, help: &'static str, samples: Vec<(Labels, f64)>) -> Self {
        Self { name, help, unit: None, samples: Samples::Gauge(samples) }
    }

    pub(super) fn gauge(name: &'static str, help: &'static str, value: f64) -> Self {
        Self::gauges(name, help, vec![(vec![], value)])
    }

    /// A histogram of durations, in seconds.
    pub(super) fn histogram(
        name: &'static str,
        help: &'static str,
        buckets: Vec<(f64, u64)>,
        sum: f64,
    ) -> Self {
        Self { name, help, unit: Some(Unit::Seconds), samples: Samples::Histogram { buckets, sum } }
    }

    pub(super) fn in_bytes(self) -> Self {
        Self { unit: Some(Unit::Bytes), ..self }
    }

    pub(super) fn in_seconds(self) -> Self {
        Self { unit: Some(Unit::Seconds), ..self }
    }
}

/// Encodes `families` in the text format of OpenMetrics 1.0.
///
/// # Errors
/// Never in practice: writing to a string cannot fail.
pub(super) fn encode(families: Vec<Family>) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix(PREFIX);
    registry.register_collector(Box::new(FamilyCollector(families)));
    let mut text = String::new();
    text::encode(&mut text, &registry)?;
    Ok(text)
}

#[derive(Debug)]
struct FamilyCollector(Vec<Family>);

impl Collector for FamilyCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        // A family without samples is omitted, with its metadata.
        for family in self.0.iter().filter(|family| !family.samples.is_empty()) {
            let (unit, kind) = (family.unit.as_ref(), family.samples.kind());
            let metrics = encoder.encode_descriptor(family.name, family.help, unit, kind)?;
            family.samples.encode(metrics)?;
        }
        Ok(())
    }
}

impl Samples {
    fn is_empty(&self) -> bool {
        match self {
            Self::Counter(samples) | Self::Gauge(samples) => samples.is_empty(),
            Self::Histogram { .. } => false,
        }
    }

    fn kind(&self) -> MetricType {
        match self {
            Self::Counter(_) => MetricType::Counter,
            Self::Gauge(_) => MetricType::Gauge,
            Self::Histogram { .. } => MetricType::Histogram,
        }
    }

    fn encode(&self, mut metrics: MetricEncoder<'_>) -> fmt::Result {
        match self {
            Self::Counter(samples) => encode_each(metrics, samples, |value| ConstCounter::new(*value)),
            Self::Gauge(samples) => encode_each(metrics, samples, |value| ConstGauge::new(*value)),
            Self::Histogram { buckets, sum } => {
                let count = buckets.iter().map(|(_, count)| count).sum();
                metrics.encode_histogram::<NoLabelSet>(*sum, count, buckets, None)
            }
        }
    }
}

fn encode_each<M: EncodeMetric>(
    mut metrics: MetricEncoder<'_>,
    samples: &[(Labels, f64)],
    metric: impl Fn(&f64) -> M,
) -> fmt::Result {
    for (labels, value) in samples {
        match labels.is_empty() {
            true => return metric(value).encode(metrics),
            false => {
                let labels = escaped(labels);
                metric(value).encode(metrics.encode_family(&labels)?)?;
            }
        }
    }
    Ok(())
}

/// Escapes the values of labels, which the library writes unescaped.
fn escaped(labels: &Labels) -> Labels {
    let escape = |value: &str| value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    labels.iter().map(|(name, value)| (*name, escape(value))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_are_written_as_open_metrics() {
        let labels = |name: &str| vec![("topic", name.to_owned())];
        let families = vec![
            Family::counters("sent", "Bytes sent", vec![(labels("a"), 1.0), (labels("b\"c"), 2.0)])
                .in_bytes(),
            Family::gauge("sessions", "Sessions", 3.0),
            Family::gauges("none", "Nothing", vec![]),
            Family::histogram("chunk", "Chunks", vec![(0.1, 2), (f64::MAX, 1)], 7.5),
        ];
        let expected = "\
# HELP tensor_relay_sent_bytes Bytes sent
# TYPE tensor_relay_sent_bytes counter
# UNIT tensor_relay_sent_bytes bytes
tensor_relay_sent_bytes_total{topic=\"a\"} 1.0
tensor_relay_sent_bytes_total{topic=\"b\\\"c\"} 2.0
# HELP tensor_relay_sessions Sessions
# TYPE tensor_relay_sessions gauge
tensor_relay_sessions 3.0
# HELP tensor_relay_chunk_seconds Chunks
# TYPE tensor_relay_chunk_seconds histogram
# UNIT tensor_relay_chunk_seconds seconds
tensor_relay_chunk_seconds_sum 7.5
tensor_relay_chunk_seconds_count 3
tensor_relay_chunk_seconds_bucket{le=\"0.1\"} 2
tensor_relay_chunk_seconds_bucket{le=\"+Inf\"} 3
# EOF
";
        assert_eq!(encode(families).unwrap(), expected);
    }
}
