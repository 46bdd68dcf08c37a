//! A run of workloads as a sheet.

use super::sheet::{Bar, Chart, Kind, NOTHING, Row, Sheet, Table, spread};
use crate::{
    network::NetworkArgs,
    origin::Origin,
    stats::{Summary, number},
};
use serde::Deserialize;

/// What the kind of such a file is called.
pub(super) const KIND: &str = "run";

/// Which version of the file is understood.
pub(super) const VERSION: u32 = 1;

/// The file, as far as the report shows it: it says much more.
#[derive(Debug, Deserialize)]
pub(super) struct Run {
    #[serde(flatten)]
    origin: Origin,
    network: Network,
    workload: Workload,
    results: Vec<Scene>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Network {
    /// Made on one machine.
    Local(NetworkArgs),
    /// Whatever is between so many consumers and their producer.
    Nodes { consumers: usize },
}

#[derive(Debug, Deserialize)]
struct Workload {
    name: String,
    rounds: u32,
}

/// One scene of the workload.
#[derive(Debug, Deserialize)]
struct Scene {
    name: String,
    gb_per_s: Option<Spread>,
    versions_per_s: Option<Spread>,
    cpu_s_per_gib: Option<f64>,
    latency_us: Option<Latency>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
struct Spread {
    median: f64,
    low: f64,
    high: f64,
}

#[derive(Debug, Clone, Copy, Deserialize)]
struct Latency {
    p50: f64,
    p99: f64,
    max: f64,
}

/// What `run` says.
pub(super) fn sheet(run: &Run) -> Sheet {
    let network = match &run.network {
        Network::Local(network) => network.to_string(),
        Network::Nodes { consumers } => format!("a network of nodes, with {consumers} consumers"),
    };
    let Workload { name, rounds } = &run.workload;
    Sheet {
        title: format!("Workload {name}, over {network}"),
        setting: format!("tensor-relay alone; medians over {rounds} rounds, least to most in brackets."),
        origin: run.origin.clone(),
        table: Table { head: HEAD.to_vec(), rows: run.results.iter().map(row).collect() },
        charts: charts(&run.results),
        notes: vec![],
    }
}

fn row(scene: &Scene) -> Row {
    let latency = |of: fn(Latency) -> f64| scene.latency_us.map(of).map_or_else(|| NOTHING.into(), number);
    Row {
        is_ours: false,
        cells: vec![
            scene.name.clone(),
            spread(scene.gb_per_s.map(Into::into)),
            spread(scene.versions_per_s.map(Into::into)),
            scene.cpu_s_per_gib.map_or_else(|| NOTHING.into(), number),
            latency(|latency| latency.p50),
            latency(|latency| latency.p99),
            latency(|latency| latency.max),
        ],
    }
}

fn charts(scenes: &[Scene]) -> Vec<Chart> {
    let chart = |title, value: fn(&Scene) -> Option<Summary>| Chart {
        title,
        bars: scenes
            .iter()
            .filter_map(|scene| Bar::of(&scene.name, Kind::Ours, value(scene)))
            .collect(),
    };
    let charts = [
        chart("GB/s: more is better", |scene| scene.gb_per_s.map(Into::into)),
        chart("Publish to commit, microseconds, median to 99 %: less is better", |scene| {
            scene
                .latency_us
                .map(|Latency { p50, p99, .. }| Summary { median: p50, min: p50, max: p99 })
        }),
    ];
    charts.into_iter().filter(|chart| !chart.bars.is_empty()).collect()
}

impl From<Spread> for Summary {
    fn from(Spread { median, low, high }: Spread) -> Self {
        Self { median, min: low, max: high }
    }
}

const HEAD: [&str; 7] = ["scene", "GB/s", "versions/s", "CPU s/GiB", "latency, µs", "99 %, µs", "most, µs"];

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A file with more in it than the report shows.
    pub(in crate::report) const EXAMPLE: &str = r#"{
        "kind": "run", "version": 1, "date": "2026-11-21", "kernel": "6.18", "cpu": "A CPU", "cores": 2, "commit": "abc",
        "network": {"local": {"namespaces": true, "mtu": 1472}},
        "workload": {"name": "fan-out", "rounds": 5, "mode": "latest"},
        "machines": [],
        "results": [
            {"name": "fan-out 1", "gb_per_s": {"median": 1.5, "low": 1.25, "high": 1.75}, "cpu_s_per_gib": 1.2,
             "latency_us": {"p50": 90.0, "p99": 300.0, "p999": 400.0, "max": 500.0}},
            {"name": "fan-out 4", "gb_per_s": null, "cpu_s_per_gib": null, "latency_us": null}
        ]
    }"#;

    #[test]
    fn scenes_are_rows() {
        let sheet = sheet(&serde_json::from_str(EXAMPLE).unwrap());
        assert_eq!(sheet.title, "Workload fan-out, over a virtual cable, 1472 bytes a packet");
        let [first, second] = &sheet.table.rows[..] else { panic!("two scenes") };
        assert_eq!(first.cells, ["fan-out 1", "1.50 (1.25 to 1.75)", NOTHING, "1.20", "90.0", "300", "500"]);
        assert_eq!(second.cells[1..], [NOTHING; 6]);
        assert_eq!(sheet.charts[1].bars[0].high, 300.0);
        assert_eq!(sheet.charts[0].bars.len(), 1, "what was not measured has no bar");
    }

    #[test]
    fn nodes_are_a_network_too() {
        let text = EXAMPLE
            .replace(r#"{"local": {"namespaces": true, "mtu": 1472}}"#, r#"{"nodes": {"consumers": 3}}"#);
        let sheet = sheet(&serde_json::from_str(&text).unwrap());
        assert!(sheet.title.ends_with("a network of nodes, with 3 consumers"), "{}", sheet.title);
    }
}
