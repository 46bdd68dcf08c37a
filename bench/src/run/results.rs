//! The tables of a run, from the reports of all rounds.

use crate::{
    cells::Cells,
    cpu,
    node::{
        latency::{Buckets, LatencyHistogram},
        order::{Prepared, Received, Sent, Traffic},
    },
    size,
    stats::PairedRatio,
    table::{Row, Table},
};
use serde::Serialize;

/// The reports of one round.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Sample {
    pub(super) scene: String,
    pub(super) prepared: Prepared,
    pub(super) sent: Sent,
    /// The reports of the readers, in their order.
    pub(super) received: Vec<Received>,
}

/// The counted rounds of one scene.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct MeasuredScene {
    pub(super) name: String,
    /// The names of the readers.
    pub(super) readers: Vec<String>,
    /// Whether the producer and all readers share a clock.
    pub(super) one_clock: bool,
    /// Whether rounds are streams of many versions.
    pub(super) is_stream: bool,
    pub(super) samples: Vec<Sample>,
}

/// The name of the one-way latency: from before a version is staged until the consumer has it, by the clock that
/// producer and consumer share.
const ONE_WAY: &str = "publish to commit";

/// The name of the round-trip latency: from before a version is staged until the producer has received the commits of
/// all consumers.
const ROUND_TRIP: &str = "publish until the producer knows of the commit";

/// Summarises `measured_scenes`: all workers together, each worker, and the latencies of versions.
pub(super) fn tables(measured_scenes: &[MeasuredScene]) -> Vec<Table> {
    let scenes = measured_scenes.iter().map(|scene| scene.row(measured_scenes.first()));
    vec![
        Table::new("All together", scenes),
        Table::new("Each worker", measured_scenes.iter().flat_map(MeasuredScene::workers)),
        Table::new("Latency", measured_scenes.iter().flat_map(MeasuredScene::latencies)),
    ]
}

impl Sample {
    fn bytes(&self) -> u64 {
        self.received.iter().map(|received| received.bytes).sum()
    }

    /// The rate of all readers together, from the first publish until the producer received the last commit.
    pub(super) fn gb_per_s(&self) -> f64 {
        self.bytes() as f64 / self.sent.seconds / 1e9
    }

    fn all_workers(&self, is_stream: bool) -> Cells<f64> {
        let consumers_cpu_s: f64 = self.received.iter().map(|received| received.cpu_s).sum();
        let missed: u64 = self.received.iter().map(|received| received.missed).sum();
        let versions_per_s = self.sent.versions as f64 / self.sent.seconds;
        let cpu_s_per_gib = cpu::per_gib(self.sent.cpu_s + consumers_cpu_s, self.bytes());
        Cells::of([("gb_per_s", self.gb_per_s()), ("cpu_s_per_gib", cpu_s_per_gib)])
            .and("versions_per_s", is_stream.then_some(versions_per_s))
            .and("missed", is_stream.then_some(missed as f64))
    }

    fn producer(&self) -> Cells<f64> {
        with_traffic([("cpu_s_per_gib", cpu::per_gib(self.sent.cpu_s, self.bytes()))], self.sent.traffic)
    }

    fn consumer(&self, reader: usize, is_stream: bool) -> Option<Cells<f64>> {
        let received = self.received.get(reader)?;
        // A stream is paced by the producer, so its rate is measured by the producer's time.
        let seconds = if is_stream { self.sent.seconds } else { received.seconds };
        let cells = [
            ("gb_per_s", received.bytes as f64 / seconds / 1e9),
            ("cpu_s_per_gib", cpu::per_gib(received.cpu_s, received.bytes)),
            ("udp_payload_bytes", received.path.udp_payload_bytes.into()),
            ("round_trip_us", received.path.round_trip_us),
        ];
        Some(with_traffic(cells, received.traffic))
    }
}

fn with_traffic<const N: usize>(cells: [(&str, f64); N], traffic: Traffic) -> Cells<f64> {
    Cells::of(cells)
        .and("sent_packets", Some(traffic.sent_packets as f64))
        .and("lost_packets", Some(traffic.lost_packets as f64))
}

impl MeasuredScene {
    /// The row of all workers together, with the ratio of its rate to that of `first`, unless this is `first`.
    fn row(&self, first: Option<&Self>) -> Row {
        let largest = self
            .samples
            .iter()
            .map(|sample| &sample.prepared)
            .max_by_key(|p| p.payload_bytes);
        let (tensors, bytes) = largest.map_or((0, 0), |p| (p.tensors, p.payload_bytes));
        let setting = [("scene", self.name.clone()), ("tensors", tensors.to_string())];
        let setting = Cells::of(setting).and("version", Some(size::text(bytes)));
        let samples: Vec<_> = self.samples.iter().map(|sample| sample.all_workers(self.is_stream)).collect();
        let mut row = Row::of(setting, &samples);
        if let Some(first) = first.filter(|first| first.name != self.name) {
            let rates = |scene: &Self| scene.samples.iter().map(Sample::gb_per_s).collect::<Vec<_>>();
            let pairs: Vec<(f64, f64)> = std::iter::zip(rates(self), rates(first)).collect();
            row.ratios = Cells::default().and("gb_per_s", PairedRatio::of(&pairs));
        }
        row
    }

    /// A row for each reader and one for the producer.
    fn workers(&self) -> Vec<Row> {
        let row = |worker: &str, cells: Vec<Cells<f64>>| {
            let setting = [("worker", worker.to_owned()), ("scene", self.name.clone())];
            Row::of(Cells::of(setting), &cells)
        };
        let reader_row = |(reader, name): (usize, &String)| {
            let cells = self.samples.iter().filter_map(|sample| sample.consumer(reader, self.is_stream));
            row(name, cells.collect())
        };
        let readers: Vec<Row> = self.readers.iter().enumerate().map(reader_row).collect();
        let producer = row("producer", self.samples.iter().map(Sample::producer).collect());
        readers.into_iter().chain([producer]).collect()
    }

    /// The latencies of all rounds together; the one-way latency only if the producer and all readers share a clock.
    fn latencies(&self) -> Vec<Row> {
        let one_way = self
            .samples
            .iter()
            .filter(|_| self.one_clock)
            .flat_map(|sample| &sample.received);
        let one_way = merged_latencies(one_way.map(|received| &received.one_way));
        let round_trip = merged_latencies(self.samples.iter().map(|sample| &sample.sent.round_trips));
        let row = |(what, latency): (&str, Option<Cells<f64>>)| {
            let setting = Cells::of([("latency", format!("{}, {what}", self.name))]);
            latency.map(|latency| Row::of(setting, [&latency]))
        };
        [(ONE_WAY, one_way), (ROUND_TRIP, round_trip)]
            .into_iter()
            .filter_map(row)
            .collect()
    }
}

fn merged_latencies<'a>(all: impl Iterator<Item = &'a Buckets>) -> Option<Cells<f64>> {
    let mut latencies = LatencyHistogram::new();
    all.for_each(|buckets| latencies.add(buckets));
    latencies.summary()
}

#[cfg(test)]
mod tests {
    use super::{
        super::checks::tests::{prepared, received, sent},
        *,
    };

    /// A scene of two rounds with two readers: the first round took `seconds`, the second twice as long.
    fn measured_scene(name: &str, seconds: f64) -> MeasuredScene {
        let sample = |seconds| Sample {
            scene: name.into(),
            prepared: prepared(),
            sent: sent(seconds),
            received: vec![received(seconds), received(seconds / 2.0)],
        };
        MeasuredScene {
            name: name.into(),
            readers: vec!["a".into(), "b".into()],
            one_clock: true,
            is_stream: false,
            samples: vec![sample(seconds), sample(2.0 * seconds)],
        }
    }

    fn with_latencies(mut scene: MeasuredScene, one_way: &[u64], round_trips: &[u64]) -> MeasuredScene {
        let buckets = |ns: &[u64]| {
            let mut latencies = LatencyHistogram::new();
            ns.iter().for_each(|ns| latencies.record(*ns));
            latencies.buckets()
        };
        for sample in &mut scene.samples {
            sample.sent.round_trips = buckets(round_trips);
            sample.received.iter_mut().for_each(|r| r.one_way = buckets(one_way));
        }
        scene
    }

    #[test]
    fn rates_are_computed_for_all_readers_and_for_each() {
        let [scenes, workers, latencies] = &tables(&[measured_scene("scene", 1.0)])[..] else {
            panic!("three")
        };
        let gib = (1u64 << 30) as f64 / 1e9;
        let of = |row: &Row, name| *row.measured.get(name).unwrap();
        let rate = of(&scenes.rows[0], "gb_per_s");
        assert_eq!((rate.min, rate.max, rate.median), (gib, 2.0 * gib, 1.5 * gib));
        assert_eq!(of(&scenes.rows[0], "cpu_s_per_gib").median, (0.5 + 0.25 + 0.25) / 2.0);
        assert_eq!(scenes.rows[0].samples, 2);
        let [_, b, producer] = &workers.rows[..] else { panic!("two readers and a producer") };
        assert_eq!(of(b, "gb_per_s").max, 2.0 * gib, "by its own time");
        assert_eq!(of(producer, "cpu_s_per_gib").median, 0.25, "it sent two GiB");
        assert_eq!(of(producer, "lost_packets").median, 1.0);
        assert!(latencies.rows.is_empty());
    }

    #[test]
    fn scenes_are_compared_round_by_round() {
        let tables = tables(&[measured_scene("fast", 1.0), measured_scene("slow", 2.0)]);
        let ratio = tables[0].rows[1].ratios.get("gb_per_s").unwrap();
        assert_eq!((ratio.median, ratio.low, ratio.high), (0.5, 0.5, 0.5));
        assert!(tables[0].rows[0].ratios.0.is_empty());
    }

    #[test]
    fn one_way_latencies_require_a_common_clock() {
        let counts = |scene: MeasuredScene| -> Vec<f64> {
            scene
                .latencies()
                .iter()
                .map(|row| row.measured.get("count").unwrap().median)
                .collect()
        };
        let here = with_latencies(measured_scene("scene", 1.0), &[1000, 3000], &[5000]);
        let apart = MeasuredScene { one_clock: false, ..here.clone() };
        assert_eq!((counts(here), counts(apart)), (vec![8.0, 2.0], vec![2.0]));
    }

    #[test]
    fn empty_rounds_have_no_numbers() {
        let mut empty = measured_scene("scene", 1.0);
        for sample in &mut empty.samples {
            sample.received.iter_mut().for_each(|received| received.bytes = 0);
        }
        let none = MeasuredScene { samples: vec![], ..empty.clone() };
        let text = serde_json::to_string(&tables(&[empty, none])).unwrap();
        assert!(!text.contains("null"), "{text}");
    }
}
