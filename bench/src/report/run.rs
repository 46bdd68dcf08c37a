//! A run of workloads as a sheet.

use super::sheet::{Bar, Chart, Kind, NOTHING, Row, Sheet, Table, ratio, spread};
use crate::{
    network::NetworkArgs,
    origin::Origin,
    run::ONE_WAY,
    stats::{PairedRatio, Summary, number},
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
    latency_is: Option<String>,
    speed_ratio: Option<PairedRatio>,
    /// Of a stream; zero of anything else.
    #[serde(default)]
    missed: u64,
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
        table: table(&run.results),
        charts: charts(&run.results),
        notes: vec![],
    }
}

/// All columns in which something was measured.
fn table(scenes: &[Scene]) -> Table {
    let is_empty = |cell: fn(&Scene) -> String| scenes.iter().all(|scene| cell(scene) == NOTHING);
    let columns: Vec<Column> = COLUMNS.into_iter().filter(|(_, cell)| !is_empty(*cell)).collect();
    let row =
        |scene: &Scene| Row { is_ours: false, cells: columns.iter().map(|(_, cell)| cell(scene)).collect() };
    Table { head: columns.iter().map(|(head, _)| *head).collect(), rows: scenes.iter().map(row).collect() }
}

fn measured(value: Option<f64>) -> String {
    value.map_or_else(|| NOTHING.into(), number)
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
            scene.latency().filter(|_| scene.is_one_way())
        }),
        chart("Publish to commit and back, microseconds, median to 99 %: less is better", |scene| {
            scene.latency().filter(|_| !scene.is_one_way())
        }),
    ];
    charts.into_iter().filter(|chart| !chart.bars.is_empty()).collect()
}

impl Scene {
    /// Whether its latency is without the way back of the news.
    fn is_one_way(&self) -> bool {
        self.latency_is.as_deref() == Some(ONE_WAY)
    }

    fn latency(&self) -> Option<Summary> {
        self.latency_us
            .map(|Latency { p50, p99, .. }| Summary { median: p50, min: p50, max: p99 })
    }
}

impl From<Spread> for Summary {
    fn from(Spread { median, low, high }: Spread) -> Self {
        Self { median, min: low, max: high }
    }
}

/// A head, and what stands under it for a scene.
type Column = (&'static str, fn(&Scene) -> String);

const COLUMNS: [Column; 9] = [
    ("scene", |scene| scene.name.clone()),
    ("GB/s", |scene| spread(scene.gb_per_s.map(Into::into))),
    ("speed ratio to the first", |scene| ratio(scene.speed_ratio)),
    ("versions/s", |scene| spread(scene.versions_per_s.map(Into::into))),
    ("missed", |scene| {
        scene
            .versions_per_s
            .map_or_else(|| NOTHING.into(), |_| scene.missed.to_string())
    }),
    ("CPU s/GiB", |scene| measured(scene.cpu_s_per_gib)),
    ("latency, µs", |scene| measured(scene.latency_us.map(|latency| latency.p50))),
    ("99 %, µs", |scene| measured(scene.latency_us.map(|latency| latency.p99))),
    ("most, µs", |scene| measured(scene.latency_us.map(|latency| latency.max))),
];

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
             "latency_us": {"p50": 90.0, "p99": 300.0, "p999": 400.0, "max": 500.0}, "latency_is": "publish to commit",
             "speed_ratio": null, "missed": 0},
            {"name": "fan-out 4", "gb_per_s": null, "cpu_s_per_gib": null, "latency_us": null, "missed": 0}
        ]
    }"#;

    #[test]
    fn scenes_are_rows() {
        let sheet = sheet(&serde_json::from_str(EXAMPLE).unwrap());
        assert_eq!(sheet.title, "Workload fan-out, over a virtual cable, 1472 bytes a packet");
        let [first, second] = &sheet.table.rows[..] else { panic!("two scenes") };
        assert_eq!(
            sheet.table.head,
            ["scene", "GB/s", "CPU s/GiB", "latency, µs", "99 %, µs", "most, µs"],
            "and no column in which nothing was measured"
        );
        assert_eq!(first.cells, ["fan-out 1", "1.50 (1.25 to 1.75)", "1.20", "90.0", "300", "500"]);
        assert_eq!(second.cells[1..], [NOTHING; 5]);
        assert_eq!(sheet.charts[1].bars[0].high, 300.0);
        assert_eq!(sheet.charts[0].bars.len(), 1, "what was not measured has no bar");
    }

    #[test]
    fn streams_miss_versions_and_scenes_are_compared() {
        let more = r#""missed": 7, "versions_per_s": {"median": 9.0, "low": 9.0, "high": 9.0},
            "speed_ratio": {"median": 0.5, "low": 0.5, "high": 0.5, "confidence": 0.9, "pairs": 5}}"#;
        let text = EXAMPLE.replace(r#""missed": 0}"#, more).replace(r#""speed_ratio": null, "#, "");
        let sheet = sheet(&serde_json::from_str(&text).unwrap());
        assert_eq!(sheet.table.head[2..5], ["speed ratio to the first", "versions/s", "missed"]);
        assert_eq!(sheet.table.rows[0].cells[2..5], ["0.500 (–, pairs: 5)", "9.00", "7"]);
    }

    #[test]
    fn charts_tell_what_latencies_are() {
        let titles = |text: &str| {
            let sheet = sheet(&serde_json::from_str(text).unwrap());
            sheet.charts.iter().map(|chart| chart.title).collect::<Vec<_>>()
        };
        assert!(titles(EXAMPLE)[1].starts_with("Publish to commit, "));
        let apart = EXAMPLE.replace("publish to commit", "publish to commit, and the way back of that news");
        assert!(titles(&apart)[1].starts_with("Publish to commit and back, "));
    }

    #[test]
    fn nodes_are_a_network_too() {
        let text = EXAMPLE
            .replace(r#"{"local": {"namespaces": true, "mtu": 1472}}"#, r#"{"nodes": {"consumers": 3}}"#);
        let sheet = sheet(&serde_json::from_str(&text).unwrap());
        assert!(sheet.title.ends_with("a network of nodes, with 3 consumers"), "{}", sheet.title);
    }
}
