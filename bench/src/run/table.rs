//! The result as a person reads it.

use super::{
    document::{Document, MemoryFacts, NetworkFacts},
    results::{ConsumerResult, SceneResult, Spread},
};
use crate::{node::latency::LatencySummary, size};
use std::fmt;

impl fmt::Display for Document {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rounds = self.workload.rounds;
        writeln!(f, "{} over {}, {rounds} rounds, {}", self.workload.name, self.network, self.origin.cpu)?;
        for scene in &self.results {
            write!(f, "\n{scene}")?;
        }
        writeln!(f)?;
        for memory in &self.memory {
            writeln!(f, "{memory}")?;
        }
        Ok(())
    }
}

impl fmt::Display for NetworkFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local(network) => network.fmt(f),
            Self::Nodes { consumers: 1 } => write!(f, "the network between two nodes"),
            Self::Nodes { consumers } => write!(f, "the network between a node and {consumers} consumers"),
        }
    }
}

impl fmt::Display for SceneResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, tensors, payload_bytes, .. } = self;
        let noun = if *tensors == 1 { "tensor" } else { "tensors" };
        writeln!(
            f,
            "{name}: {tensors} {noun}, {} a version; median (lowest to highest)",
            size::text(*payload_bytes)
        )?;
        writeln!(
            f,
            "  {:<28} {:<26} {:<26} {:>6} {:>9} {:>16}",
            "", "GB/s", "CPU s/GiB", "MTU", "rtt", "packets lost"
        )?;
        writeln!(f, "  {:<28} {:<26} {}", "all together", cell(self.gb_per_s), number(self.cpu_s_per_gib))?;
        let producer = &self.producer;
        let lost = format!("{} of {}", producer.traffic.lost_packets, producer.traffic.sent_packets);
        writeln!(
            f,
            "  {:<28} {:<26} {:<26} {:>6} {:>9} {lost:>16}",
            "producer",
            "",
            cell(producer.cpu_s_per_gib),
            "",
            ""
        )?;
        for consumer in &self.consumers {
            writeln!(f, "  {consumer}")?;
        }
        if let Some(ratio) = &self.speed_ratio {
            writeln!(f, "  speed, against the first: {ratio}")?;
        }
        if let Some(rate) = self.versions_per_s {
            writeln!(f, "  versions a second: {}; missed: {}", cell(Some(rate)), self.missed)?;
        }
        if let (Some(latency), Some(what)) = (&self.latency_us, self.latency_is) {
            writeln!(f, "  {what}: {latency}")?;
        }
        match &self.round_trip_us {
            Some(round_trip) if self.latency_us.as_ref() != Some(round_trip) => {
                writeln!(f, "  and the way back: {round_trip}")
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Display for ConsumerResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (speed, cpu) = (cell(self.gb_per_s), cell(self.cpu_s_per_gib));
        let round_trip = format!("{:.0} µs", self.round_trip_us);
        write!(f, "{:<28} {speed:<26} {cpu:<26} {:>6} {round_trip:>9}", self.name, self.udp_payload_bytes)
    }
}

impl fmt::Display for LatencySummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { count, p50, p90, p99, p999, max, .. } = self;
        write!(
            f,
            "p50 {p50:.0} µs, p90 {p90:.0}, p99 {p99:.0}, p99.9 {p999:.0}, max {max:.0} ({count} versions)"
        )
    }
}

impl fmt::Display for MemoryFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.peak_resident_bytes, self.beyond_tensors_bytes) {
            (Some(peak), Some(beyond)) => {
                let mib = |bytes: u64| bytes >> 20;
                write!(
                    f,
                    "memory of {}: {} MiB at most, {} MiB beyond a version",
                    self.worker,
                    mib(peak),
                    mib(beyond)
                )
            }
            _ => write!(f, "memory of {}: its kernel does not tell", self.worker),
        }
    }
}

fn cell(spread: Option<Spread>) -> String {
    let text = |Spread { median, low, high }| format!("{median:.3} ({low:.3} to {high:.3})");
    spread.map_or_else(|| "-".into(), text)
}

fn number(value: Option<f64>) -> String {
    value.map_or_else(|| "-".into(), |value| format!("{value:.3}"))
}

#[cfg(test)]
mod tests {
    use super::{super::results::tests::scenario, *};

    #[test]
    fn a_scene_is_a_small_table() {
        let mut result = scenario(1.0).result(Some(&scenario(2.0)));
        result.latency_us = None;
        let text = result.to_string();
        assert!(text.starts_with("scene: 2 tensors, 1 GiB a version"), "{text}");
        assert!(text.contains("1.611 (1.074 to 2.147)"), "{text}");
        assert!(text.contains("2 of 200"), "{text}");
        assert!(text.contains("against the first: 2.000"), "{text}");
        assert_eq!(text.lines().count(), 7, "{text}");
    }

    #[test]
    fn what_is_not_known_is_not_made_up() {
        let memory = MemoryFacts::new("producer", None, &[]);
        assert_eq!(memory.to_string(), "memory of producer: its kernel does not tell");
        assert_eq!((cell(None), number(None)), ("-".into(), "-".into()));
    }
}
