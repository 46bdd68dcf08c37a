//! What was measured: the file that `--json` writes and `report` reads.

use super::{CompareArgs, roster::Contender};
use crate::{
    contender::Small,
    network::NetworkArgs,
    origin::Origin,
    relay::Data,
    stats::{PairedRatio, Summary},
};
use anyhow::Result;
use serde::{Deserialize, Serialize};
use std::fmt;

/// All runs of all contenders, and what follows from them.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Comparison {
    /// [`Comparison::KIND`]: what tells this file from others.
    pub kind: String,
    /// [`Comparison::VERSION`].
    pub version: u32,
    /// Where the numbers come from.
    #[serde(flatten)]
    pub origin: Origin,
    /// What lay between the sides.
    pub network: NetworkArgs,
    /// How much each round moved.
    pub size_bytes: u64,
    /// What the bytes of tensor-relay were.
    #[serde(default)]
    pub data: Data,
    /// Who was compared, the one that the others are compared with first.
    pub contenders: Vec<Measured>,
    /// Each run, in the order of measuring.
    pub runs: Vec<Run>,
    /// The first, divided by each of the others.
    pub ratios: Vec<Ratio>,
}

/// What is known of one contender.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Measured {
    /// Its name.
    pub name: String,
    /// Whether it is tensor-relay, in whatever circumstances.
    #[serde(default)]
    pub is_ours: bool,
    /// Whether bytes travelled encrypted.
    pub encrypted: bool,
    /// Whether it received into `reused` or `fresh` memory.
    pub receives_into: String,
    /// What a reader should know.
    pub note: String,
    /// 10^9 bytes per second: of the medians of its runs.
    pub gb_per_s: Option<Summary>,
    /// CPU seconds of both sides for each GiB: of the medians of its runs.
    pub cpu_s_per_gib: Option<Summary>,
    /// What half of the small messages took at most, in microseconds.
    pub small_p50_us: Option<Summary>,
    /// What 99 of 100 took at most.
    pub small_p99_us: Option<Summary>,
    /// Why it was left out from then on, if it was.
    pub failure: Option<String>,
}

/// What one pair of processes did.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Run {
    /// Who they belonged to.
    #[serde(default)]
    pub contender: String,
    /// The number of its pair, from 0.
    #[serde(default)]
    pub pair: u32,
    /// Who ran right before or after it, to be compared with it.
    #[serde(default)]
    pub beside: Option<String>,
    /// Its small messages, if there were any.
    pub small: Option<Small>,
    /// The rounds that count.
    pub rounds: Vec<Round>,
}

/// One round of one run.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Round {
    /// 10^9 bytes per second.
    pub gb_per_s: f64,
    /// CPU seconds of both sides for each GiB.
    pub cpu_s_per_gib: f64,
    /// How many chunks the serving side looked at to choose a codec, if it does so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub looks: Option<u64>,
}

/// One contender divided by another.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Ratio {
    /// What is divided.
    pub of: String,
    /// What it is divided by.
    pub to: String,
    /// Of their speeds: above 1 where the first is faster.
    pub gb_per_s: Option<PairedRatio>,
    /// Of their CPU time: below 1 where the first takes less.
    pub cpu_s_per_gib: Option<PairedRatio>,
    /// Of their latencies in the middle: below 1 where the first takes less.
    pub small_p50_us: Option<PairedRatio>,
}

impl Comparison {
    /// What [`Comparison::kind`] is.
    pub const KIND: &str = "compare";

    /// The version of the file. Fields may be added without a new one.
    pub const VERSION: u32 = 1;

    /// Nothing measured yet.
    pub(super) fn new(args: &CompareArgs, contenders: &[Contender]) -> Self {
        Self {
            kind: Self::KIND.into(),
            version: Self::VERSION,
            origin: Origin::here(),
            network: args.network.clone(),
            size_bytes: args.size,
            data: args.data,
            contenders: contenders.iter().map(Measured::nothing).collect(),
            runs: vec![],
            ratios: vec![],
        }
    }

    /// Adds what came of the run of the contender called `name` in the pair of that number, `beside` another.
    pub(super) fn add(&mut self, name: &str, pair: u32, beside: Option<&str>, run: Result<Run>) {
        match run {
            Ok(run) => {
                let beside = beside.map(str::to_owned);
                self.runs.push(Run { contender: name.into(), pair, beside, ..run });
            }
            Err(error) => {
                let failed = self.contenders.iter_mut().find(|contender| contender.name == name);
                if let Some(contender) = failed {
                    contender.failure = Some(format!("{error:#}"));
                }
            }
        }
    }

    /// Whether a run of the contender called `name` failed.
    pub(super) fn has_failed(&self, name: &str) -> bool {
        self.contenders
            .iter()
            .any(|contender| contender.name == name && contender.failure.is_some())
    }

    /// The ratio whose pairs and confidence are those of all; nothing where they differ.
    pub(crate) fn common_ratio(&self) -> Option<PairedRatio> {
        let mut all = self.ratios.iter().filter_map(|ratio| ratio.gb_per_s);
        let first = all.next()?;
        all.all(|other| other.pairs == first.pairs).then_some(first)
    }

    /// Makes medians and ratios of the runs.
    pub(super) fn summarise(&mut self) {
        let Self { contenders, runs, ratios, .. } = self;
        let summary = |name: &str, value: Value| {
            let its = runs.iter().filter(|run| run.contender == name);
            Summary::of(&its.filter_map(value).collect::<Vec<_>>())
        };
        for contender in &mut *contenders {
            let name = &contender.name;
            contender.gb_per_s = summary(name, Run::gb_per_s);
            contender.cpu_s_per_gib = summary(name, Run::cpu_s_per_gib);
            contender.small_p50_us = summary(name, Run::small_p50_us);
            contender.small_p99_us = summary(name, Run::small_p99_us);
        }
        let Some((first, others)) = contenders.split_first() else { return };
        let ratio = |other: &Measured| Ratio {
            of: first.name.clone(),
            to: other.name.clone(),
            gb_per_s: paired(runs, &first.name, &other.name, Run::gb_per_s),
            cpu_s_per_gib: paired(runs, &first.name, &other.name, Run::cpu_s_per_gib),
            small_p50_us: paired(runs, &first.name, &other.name, Run::small_p50_us),
        };
        *ratios = others.iter().map(ratio).collect();
    }
}

impl Measured {
    fn nothing(contender: &Contender) -> Self {
        Self {
            name: contender.name.clone(),
            is_ours: contender.is_ours,
            encrypted: contender.encrypted,
            receives_into: contender.receives_into.clone(),
            note: contender.note.clone(),
            gb_per_s: None,
            cpu_s_per_gib: None,
            small_p50_us: None,
            small_p99_us: None,
            failure: None,
        }
    }
}

impl Run {
    fn gb_per_s(&self) -> Option<f64> {
        self.median(|round| round.gb_per_s)
    }

    fn cpu_s_per_gib(&self) -> Option<f64> {
        self.median(|round| round.cpu_s_per_gib)
    }

    fn small_p50_us(&self) -> Option<f64> {
        self.small.map(|small| small.p50_us)
    }

    fn small_p99_us(&self) -> Option<f64> {
        self.small.map(|small| small.p99_us)
    }

    fn median(&self, value: impl Fn(&Round) -> f64) -> Option<f64> {
        let values: Vec<f64> = self.rounds.iter().map(value).collect();
        Summary::of(&values).map(|summary| summary.median)
    }
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = |value: Option<f64>| value.unwrap_or(f64::NAN);
        write!(f, "{:.3} GB/s, ", number(self.gb_per_s()))?;
        write!(f, "{:.3} CPU s/GiB", number(self.cpu_s_per_gib()))?;
        match self.small {
            Some(small) => write!(f, ", 4 KiB in {:.0} us (99 %: {:.0} us)", small.p50_us, small.p99_us),
            None => Ok(()),
        }
    }
}

/// One number of a run, if it has it.
type Value = fn(&Run) -> Option<f64>;

/// A / B, of the runs that are neighbours.
fn paired(runs: &[Run], a: &str, b: &str, value: Value) -> Option<PairedRatio> {
    let pair = |run: &Run| {
        let neighbour = beside(runs, b, a).find(|other| other.pair == run.pair)?;
        Some((value(run)?, value(neighbour)?))
    };
    PairedRatio::of(&beside(runs, a, b).filter_map(pair).collect::<Vec<_>>())
}

/// The runs of `name` that were neighbours of runs of `other`.
fn beside<'a>(runs: &'a [Run], name: &'a str, other: &'a str) -> impl Iterator<Item = &'a Run> {
    let is_one = move |run: &&Run| run.contender == name && run.beside.as_deref() == Some(other);
    runs.iter().filter(is_one)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::{compare::roster::Roster, program::Program};
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: CompareArgs,
    }

    /// Six pairs of `tensor-relay`, twice as fast, and `tcp`; `tcp-tls` fails after the first, beside which `tensor-relay`
    /// was slow.
    pub(crate) fn example() -> Comparison {
        let names = ["tensor-relay", "tcp", "tcp-tls"];
        let words = ["compare"].into_iter().chain(names).chain(["--size=64MiB"]);
        let Cli { args } = Cli::parse_from(words);
        let roster = Roster::of_this(&Program::new("bench", &[]), None);
        let mut comparison = Comparison::new(&args, &roster.pick(&args.names).unwrap());
        for pair in 0..6 {
            comparison.add("tensor-relay", pair, Some("tcp"), Ok(run([4.0, 1.0, 9.0], 100.0)));
            comparison.add("tcp", pair, Some("tensor-relay"), Ok(run([2.0, 2.0, 2.0], 50.0)));
        }
        comparison.add("tensor-relay", 0, Some("tcp-tls"), Ok(run([3.0; 3], 100.0)));
        comparison.add("tcp-tls", 0, Some("tensor-relay"), Ok(run([1.0; 3], 80.0)));
        comparison.add("tcp-tls", 1, Some("tensor-relay"), Err(anyhow::anyhow!("it ended early")));
        comparison.summarise();
        comparison
    }

    fn run(speeds: [f64; 3], p50_us: f64) -> Run {
        let round = |gb_per_s| Round { gb_per_s, cpu_s_per_gib: 1.0 / gb_per_s, looks: Some(16) };
        let small = Small { small: 9, p50_us, p99_us: 2.0 * p50_us, min_us: 1.0, max_us: 999.0 };
        Run { rounds: speeds.map(round).into(), small: Some(small), ..Run::default() }
    }

    #[test]
    fn the_first_is_divided_by_the_others() {
        let comparison = example();
        let [tcp, tls] = &comparison.ratios[..] else { panic!("two others") };
        let speed = tcp.gb_per_s.unwrap();
        assert_eq!((speed.median, speed.pairs), (2.0, 6), "medians over rounds, then pairs");
        assert_eq!(tcp.cpu_s_per_gib.unwrap().median, 0.5);
        assert_eq!(tcp.small_p50_us.unwrap().median, 2.0);
        let speed = tls.gb_per_s.unwrap();
        assert_eq!((speed.median, speed.pairs), (3.0, 1), "only with its neighbour, before it failed");
        assert_eq!(comparison.contenders[2].failure.as_deref(), Some("it ended early"));
    }

    #[test]
    fn the_file_is_read_as_it_was_written() {
        let comparison = example();
        let text = serde_json::to_string(&comparison).unwrap();
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&value["kind"], &value["version"]), (&"compare".into(), &1.into()));
        assert!(value["kernel"].is_string() && value["date"].is_string(), "{text}");
        let again: Comparison = serde_json::from_str(&text).unwrap();
        assert_eq!(serde_json::to_string(&again).unwrap(), text);
    }
}
