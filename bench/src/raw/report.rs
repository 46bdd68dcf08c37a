//! What was measured, as a table and as JSON.

use super::RawArgs;
use crate::{
    network::NetworkArgs,
    stats::{PairedRatio, Summary},
};
use serde::Serialize;
use std::fmt;

/// One round of one run.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Round {
    /// 10^9 bytes per second.
    pub(super) gb_per_s: f64,
    /// CPU seconds of both sides for each GiB.
    pub(super) cpu_s_per_gib: f64,
}

/// The rounds that one pair of processes did.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct Run {
    pub(super) rounds: Vec<Round>,
}

impl Run {
    fn median(&self, value: Value) -> f64 {
        let values: Vec<f64> = self.rounds.iter().map(value).collect();
        Summary::of(&values).map_or(f64::NAN, |summary| summary.median)
    }
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (speed, cpu) = (self.median(GB_PER_S), self.median(CPU_S_PER_GIB));
        write!(f, "{speed:.3} GB/s, {cpu:.3} CPU s/GiB")
    }
}

/// All runs of all contenders.
pub(super) struct Report {
    setting: Setting,
    contenders: Vec<(&'static str, Vec<Run>)>,
}

/// What the numbers depend on, beside the machine.
#[derive(Debug, Clone, Serialize)]
struct Setting {
    size_bytes: u64,
    rounds: u32,
    #[serde(flatten)]
    network: NetworkArgs,
}

/// The file that `--json` writes.
#[derive(Serialize)]
pub(super) struct Summarised<'a> {
    #[serde(flatten)]
    setting: Setting,
    contenders: Vec<ContenderSummary<'a>>,
    /// A / B, of GB/s.
    speed_ratio: Option<PairedRatio>,
    /// A / B, of CPU seconds.
    cpu_ratio: Option<PairedRatio>,
}

#[derive(Serialize)]
struct ContenderSummary<'a> {
    name: &'static str,
    gb_per_s: Option<Summary>,
    cpu_s_per_gib: Option<Summary>,
    runs: &'a [Run],
}

impl Report {
    /// An empty report on contenders with these `names`, A first.
    pub(super) fn new(args: &RawArgs, names: impl Iterator<Item = &'static str>) -> Self {
        Self {
            setting: Setting { size_bytes: args.size, rounds: args.rounds, network: args.network.clone() },
            contenders: names.map(|name| (name, vec![])).collect(),
        }
    }

    /// Adds a run of the contender at `index`; those of one pair must be added in turn.
    pub(super) fn add(&mut self, index: usize, run: Run) {
        self.contenders[index].1.push(run);
    }

    /// Everything, with medians over runs of medians over rounds.
    pub(super) fn summarised(&self) -> Summarised<'_> {
        let summary = |runs: &[Run], value: Value| Summary::of(&medians(runs, value));
        let contenders = self.contenders.iter().map(|(name, runs)| ContenderSummary {
            name,
            gb_per_s: summary(runs, GB_PER_S),
            cpu_s_per_gib: summary(runs, CPU_S_PER_GIB),
            runs,
        });
        Summarised {
            setting: self.setting.clone(),
            contenders: contenders.collect(),
            speed_ratio: self.ratio(GB_PER_S),
            cpu_ratio: self.ratio(CPU_S_PER_GIB),
        }
    }

    /// A / B, if there are two.
    fn ratio(&self, value: Value) -> Option<PairedRatio> {
        let [(_, a), (_, b)] = &self.contenders[..] else {
            return None;
        };
        let pairs: Vec<_> = std::iter::zip(medians(a, value), medians(b, value)).collect();
        PairedRatio::of(&pairs)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Setting { size_bytes, rounds, network } = &self.setting;
        let mib = *size_bytes as f64 / f64::from(1 << 20);
        let summarised = self.summarised();
        writeln!(f, "{mib} MiB over {network}, median of {rounds} rounds a run")?;
        writeln!(f, "{:<14} {:<26} CPU s/GiB, both sides", "contender", "GB/s (min to max)")?;
        for contender in &summarised.contenders {
            let (speed, cpu) = (cell(contender.gb_per_s), cell(contender.cpu_s_per_gib));
            writeln!(f, "{:<14} {speed:<26} {cpu}", contender.name)?;
        }
        if let ([a, b], Some(speed), Some(cpu)) =
            (&summarised.contenders[..], summarised.speed_ratio, summarised.cpu_ratio)
        {
            writeln!(f, "{} / {}, GB/s: {speed}", a.name, b.name)?;
            writeln!(f, "{} / {}, CPU:  {cpu}", a.name, b.name)?;
        }
        Ok(())
    }
}

/// One number of a round.
type Value = fn(&Round) -> f64;
const GB_PER_S: Value = |round| round.gb_per_s;
const CPU_S_PER_GIB: Value = |round| round.cpu_s_per_gib;

fn medians(runs: &[Run], value: Value) -> Vec<f64> {
    runs.iter().map(|run| run.median(value)).collect()
}

fn cell(summary: Option<Summary>) -> String {
    let text = |Summary { median, min, max }| format!("{median:.3} ({min:.3} to {max:.3})");
    summary.map_or_else(|| "nothing measured".into(), text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: RawArgs,
    }

    fn run(speeds: [f64; 3]) -> Run {
        let round = |gb_per_s| Round { gb_per_s, cpu_s_per_gib: 1.0 / gb_per_s };
        Run { rounds: speeds.map(round).into() }
    }

    #[test]
    fn a_table_and_a_file() {
        let Cli { args } = Cli::parse_from(["raw", "--size=64MiB"]);
        let mut report = Report::new(&args, ["a", "b"].into_iter());
        for _ in 0..6 {
            report.add(0, run([4.0, 1.0, 9.0]));
            report.add(1, run([2.0, 2.0, 2.0]));
        }
        let table = report.to_string();
        assert!(table.contains("a / b, GB/s: 2.000 (2.000 to 2.000, 96.9 % of 6 pairs)"), "{table}");
        assert!(table.contains("0.250 (0.250 to 0.250)"), "{table}");
        let json = serde_json::to_value(report.summarised()).unwrap();
        assert_eq!(json["speed_ratio"]["median"], 2.0);
        assert_eq!(json["size_bytes"], 64 << 20);
        assert_eq!(json["contenders"][1]["runs"][5]["rounds"][0]["gb_per_s"], 2.0);
    }

    #[test]
    fn one_alone_has_no_ratio() {
        let Cli { args } = Cli::parse_from(["raw"]);
        let mut report = Report::new(&args, ["b"].into_iter());
        report.add(0, run([2.0, 2.0, 2.0]));
        assert!(report.summarised().speed_ratio.is_none());
        assert_eq!(report.to_string().lines().count(), 3, "a setting, a head and a row");
    }
}
