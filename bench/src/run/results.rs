//! What the rounds of a scene come down to.

use crate::{
    cpu,
    node::{
        latency::{Buckets, Latencies, LatencySummary},
        order::{Prepared, Received, Sent, Traffic},
    },
    stats::{PairedRatio, Summary},
};
use serde::Serialize;

/// One round, as all who took part told it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Sample {
    pub(super) prepared: Prepared,
    pub(super) sent: Sent,
    /// From each reader, in their order.
    pub(super) received: Vec<Received>,
}

/// All counted rounds of one scene.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Scenario {
    pub(super) name: String,
    /// The names of its readers.
    pub(super) readers: Vec<String>,
    /// Whether producer and readers have the same clock.
    pub(super) one_clock: bool,
    /// Whether rounds are streams of many versions.
    pub(super) is_stream: bool,
    pub(super) samples: Vec<Sample>,
}

/// The middle of the rounds, and how far the others are from it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Spread {
    pub(super) median: f64,
    /// The smallest.
    pub(super) low: f64,
    /// The largest.
    pub(super) high: f64,
}

/// A scene in the result file; `bench/README.md` says what each number means.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct SceneResult {
    pub(super) name: String,
    pub(super) rounds: usize,
    pub(super) tensors: u64,
    pub(super) payload_bytes: u64,
    pub(super) gb_per_s: Option<Spread>,
    pub(super) versions_per_s: Option<Spread>,
    pub(super) missed: u64,
    pub(super) cpu_s_per_gib: Option<f64>,
    pub(super) latency_us: Option<LatencySummary>,
    pub(super) latency_is: Option<&'static str>,
    pub(super) round_trip_us: Option<LatencySummary>,
    /// Against the first scene, from rounds that followed each other.
    pub(super) speed_ratio: Option<PairedRatio>,
    pub(super) producer: ProducerResult,
    pub(super) consumers: Vec<ConsumerResult>,
    pub(super) samples: Vec<RoundResult>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct ProducerResult {
    pub(super) cpu_s_per_gib: Option<Spread>,
    pub(super) chunks_hashed: u64,
    #[serde(flatten)]
    pub(super) traffic: Traffic,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct ConsumerResult {
    pub(super) name: String,
    pub(super) gb_per_s: Option<Spread>,
    pub(super) cpu_s_per_gib: Option<Spread>,
    pub(super) versions: u64,
    pub(super) missed: u64,
    pub(super) chunks: u64,
    pub(super) lanes: u32,
    pub(super) udp_payload_bytes: u16,
    pub(super) round_trip_us: f64,
    #[serde(flatten)]
    pub(super) traffic: Traffic,
}

/// A round, so that others can summarise it their own way.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct RoundResult {
    pub(super) seconds: f64,
    pub(super) producer_cpu_s: f64,
    pub(super) consumers: Vec<ConsumerRound>,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct ConsumerRound {
    pub(super) bytes: u64,
    pub(super) seconds: f64,
    pub(super) cpu_s: f64,
}

/// Publish until the consumer has it, by a clock that both share.
pub(crate) const ONE_WAY: &str = "publish to commit";

/// Without such a clock: until the producer has heard of it.
const ROUND_TRIP: &str = "publish to commit, and the way back of that news";

impl Sample {
    fn bytes(&self) -> u64 {
        self.received.iter().map(|received| received.bytes).sum()
    }

    /// What all readers together got, from the first publish until the producer knew of the last commit.
    pub(super) fn gb_per_s(&self) -> f64 {
        self.bytes() as f64 / self.sent.seconds / 1e9
    }

    fn cpu_s_per_gib(&self) -> f64 {
        let consumers: f64 = self.received.iter().map(|received| received.cpu_s).sum();
        cpu::per_gib(self.sent.cpu_s + consumers, self.bytes())
    }

    fn round(&self) -> RoundResult {
        let consumer = |r: &Received| ConsumerRound { bytes: r.bytes, seconds: r.seconds, cpu_s: r.cpu_s };
        RoundResult {
            seconds: self.sent.seconds,
            producer_cpu_s: self.sent.cpu_s,
            consumers: self.received.iter().map(consumer).collect(),
        }
    }
}

impl Scenario {
    /// What it comes down to; `first` is what it is compared with, if it is not that itself.
    pub(super) fn result(&self, first: Option<&Self>) -> SceneResult {
        let one_way = merged(self.samples.iter().flat_map(|s| &s.received).map(|r| &r.one_way));
        let one_way = one_way.filter(|_| self.one_clock);
        let round_trip = merged(self.samples.iter().map(|s| &s.sent.round_trips));
        let latency_is = match (&one_way, &round_trip) {
            (Some(_), _) => Some(ONE_WAY),
            (None, Some(_)) => Some(ROUND_TRIP),
            (None, None) => None,
        };
        let per_second = |s: &Sample| s.sent.versions as f64 / s.sent.seconds;
        SceneResult {
            name: self.name.clone(),
            rounds: self.samples.len(),
            tensors: self.samples.first().map_or(0, |s| s.prepared.tensors),
            payload_bytes: self.payload_bytes(),
            gb_per_s: self.spread(Sample::gb_per_s),
            versions_per_s: self.spread(per_second).filter(|_| self.is_stream),
            missed: self.samples.iter().flat_map(|s| &s.received).map(|r| r.missed).sum(),
            cpu_s_per_gib: self.spread(Sample::cpu_s_per_gib).map(|spread| spread.median),
            latency_us: one_way.or_else(|| round_trip.clone()),
            latency_is,
            round_trip_us: round_trip,
            speed_ratio: first.and_then(|first| self.ratio_to(first)),
            producer: self.producer(),
            consumers: (0..self.readers.len()).filter_map(|reader| self.consumer(reader)).collect(),
            samples: self.samples.iter().map(Sample::round).collect(),
        }
    }

    /// The size of the largest version.
    pub(super) fn payload_bytes(&self) -> u64 {
        self.samples.iter().map(|s| s.prepared.payload_bytes).max().unwrap_or(0)
    }

    fn producer(&self) -> ProducerResult {
        ProducerResult {
            cpu_s_per_gib: self.spread(|s| cpu::per_gib(s.sent.cpu_s, s.bytes())),
            chunks_hashed: self.samples.iter().map(|s| s.sent.chunks_hashed).sum(),
            traffic: self
                .samples
                .iter()
                .map(|s| s.sent.traffic)
                .fold(Traffic::default(), Traffic::and),
        }
    }

    fn consumer(&self, reader: usize) -> Option<ConsumerResult> {
        let rounds: Vec<(&Sent, &Received)> = self
            .samples
            .iter()
            .filter_map(|s| Some((&s.sent, s.received.get(reader)?)))
            .collect();
        let last = rounds.last()?.1;
        let spread = |value: &dyn Fn(&Sent, &Received) -> f64| {
            Spread::of(&rounds.iter().map(|(sent, received)| value(sent, received)).collect::<Vec<_>>())
        };
        let sum = |value: fn(&Received) -> u64| rounds.iter().map(|(_, received)| value(received)).sum();
        // A stream has the pace of its producer, so the producer's time is the consumer's.
        let seconds = |sent: &Sent, r: &Received| if self.is_stream { sent.seconds } else { r.seconds };
        Some(ConsumerResult {
            name: self.readers.get(reader)?.clone(),
            gb_per_s: spread(&|sent, r| r.bytes as f64 / seconds(sent, r) / 1e9),
            cpu_s_per_gib: spread(&|_, r| cpu::per_gib(r.cpu_s, r.bytes)),
            versions: sum(|r| r.versions),
            missed: sum(|r| r.missed),
            chunks: sum(|r| r.chunks),
            lanes: last.path.lanes,
            udp_payload_bytes: last.path.udp_payload_bytes,
            round_trip_us: last.path.round_trip_us,
            traffic: rounds.iter().map(|(_, r)| r.traffic).fold(Traffic::default(), Traffic::and),
        })
    }

    fn spread(&self, value: impl Fn(&Sample) -> f64) -> Option<Spread> {
        Spread::of(&self.samples.iter().map(value).collect::<Vec<_>>())
    }

    /// How fast it is beside `first`, round by round.
    fn ratio_to(&self, first: &Self) -> Option<PairedRatio> {
        let rates = |scenario: &Self| scenario.samples.iter().map(Sample::gb_per_s).collect::<Vec<_>>();
        let pairs: Vec<(f64, f64)> = std::iter::zip(rates(self), rates(first)).collect();
        PairedRatio::of(&pairs)
    }
}

impl Spread {
    /// Of values that can be numbers; nothing, if there are none.
    fn of(values: &[f64]) -> Option<Self> {
        let finite: Vec<f64> = values.iter().copied().filter(|value| value.is_finite()).collect();
        Summary::of(&finite).map(|Summary { median, min, max }| Self { median, low: min, high: max })
    }
}

fn merged<'a>(all: impl Iterator<Item = &'a Buckets>) -> Option<LatencySummary> {
    let mut latencies = Latencies::new();
    all.for_each(|buckets| latencies.add(buckets));
    latencies.summary()
}

#[cfg(test)]
pub(super) mod tests {
    use super::{
        super::claims::tests::{prepared, received, sent},
        *,
    };

    /// Two rounds to two readers: the first took `seconds`, the second twice as long.
    pub(crate) fn scenario(seconds: f64) -> Scenario {
        let sample = |seconds| Sample {
            prepared: prepared(),
            sent: sent(seconds),
            received: vec![received(seconds), received(seconds / 2.0)],
        };
        Scenario {
            name: "scene".into(),
            readers: vec!["a".into(), "b".into()],
            one_clock: true,
            is_stream: false,
            samples: vec![sample(seconds), sample(2.0 * seconds)],
        }
    }

    fn with_latencies(mut scenario: Scenario, one_way: &[u64], round_trips: &[u64]) -> Scenario {
        let buckets = |ns: &[u64]| {
            let mut latencies = Latencies::new();
            ns.iter().for_each(|ns| latencies.record(*ns));
            latencies.buckets()
        };
        for sample in &mut scenario.samples {
            sample.sent.round_trips = buckets(round_trips);
            sample.received.iter_mut().for_each(|r| r.one_way = buckets(one_way));
        }
        scenario
    }

    #[test]
    fn rates_are_of_all_readers_together_and_of_each() {
        let result = scenario(1.0).result(None);
        let gib = (1u64 << 30) as f64 / 1e9;
        let rate = result.gb_per_s.unwrap();
        assert_eq!((rate.low, rate.high, rate.median), (gib, 2.0 * gib, 1.5 * gib));
        assert_eq!(result.consumers[1].gb_per_s.unwrap().high, 2.0 * gib, "by its own time");
        assert_eq!(result.cpu_s_per_gib, Some((0.5 + 0.25 + 0.25) / 2.0));
        assert_eq!(result.producer.cpu_s_per_gib.unwrap().median, 0.25, "it sent two GiB");
        assert_eq!(result.producer.traffic.lost_packets, 2, "over both rounds");
        assert_eq!(result.samples.len(), 2);
    }

    #[test]
    fn scenes_are_compared_round_by_round() {
        let (slow, fast) = (scenario(2.0), scenario(1.0));
        let ratio = slow.result(Some(&fast)).speed_ratio.unwrap();
        assert_eq!((ratio.median, ratio.low, ratio.high), (0.5, 0.5, 0.5));
        assert_eq!(fast.result(None).speed_ratio, None);
    }

    #[test]
    fn one_way_times_need_one_clock() {
        let here = with_latencies(scenario(1.0), &[1000, 3000], &[5000]).result(None);
        assert_eq!((here.latency_is, here.latency_us.unwrap().count), (Some(ONE_WAY), 8));
        assert_eq!(here.round_trip_us.unwrap().count, 2);
        let apart = Scenario { one_clock: false, ..scenario(1.0) };
        let apart = with_latencies(apart, &[1000, 3000], &[5000]).result(None);
        assert_eq!((apart.latency_is, apart.latency_us.unwrap().count), (Some(ROUND_TRIP), 2));
        assert_eq!(scenario(1.0).result(None).latency_is, None);
    }

    #[test]
    fn nothing_measured_is_nothing_and_no_panic() {
        let none = Scenario { samples: vec![], ..scenario(1.0) }.result(None);
        assert_eq!((none.gb_per_s, none.consumers.len()), (None, 0));
        let mut empty = scenario(1.0);
        empty
            .samples
            .iter_mut()
            .for_each(|s| s.received.iter_mut().for_each(|r| r.bytes = 0));
        let text = serde_json::to_string(&empty.result(None)).unwrap();
        assert!(!text.contains("NaN"), "{text}");
    }
}
