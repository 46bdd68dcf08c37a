//! The runs of a comparison, and their statistics.

use super::contenders::Contender;
use crate::{
    cells::Cells,
    contender::SmallMessages,
    origin::Origin,
    stats::{PairedRatio, Summary},
    table::{Row, Table},
};
use anyhow::Result;
use serde::Serialize;
use std::fmt;

/// All runs of all contenders.
#[derive(Debug, Serialize)]
pub(crate) struct Runs {
    /// The contenders; the others are compared with the first.
    #[serde(skip)]
    contenders: Vec<Contender>,
    /// In the order of measuring.
    pub(crate) runs: Vec<Run>,
    /// The contenders that failed and do not run again, with the reasons.
    pub(crate) failures: Cells<String>,
}

/// The result of one run of a contender.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct Run {
    /// The contender's name.
    pub(crate) contender: String,
    /// The number of its pair, from 0.
    pub(super) pair: u32,
    /// The name of the contender that it is compared with, which ran right before or after it.
    pub(super) beside: Option<String>,
    /// The latencies of small messages, if any were sent.
    pub(super) small: Option<SmallMessages>,
    /// The rate of the first round, which is not counted: some memory is untouched, and windows still grow.
    pub(super) first_gb_per_s: Option<f64>,
    /// The counted rounds.
    pub(crate) rounds: Vec<Cells<f64>>,
    /// The same rounds as each process measured them, of contenders whose processes do.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) processes: Vec<ProcessRounds>,
}

/// The counted rounds of one process.
#[derive(Debug, Clone, Serialize)]
pub(super) struct ProcessRounds {
    /// `producer`, or `consumer` with a number.
    pub(super) process: String,
    /// The machine on which it runs.
    pub(super) machine: Option<Origin>,
    pub(super) rounds: Vec<Cells<f64>>,
}

impl Runs {
    /// An empty list of runs of `contenders`.
    pub(super) fn new(contenders: &[Contender]) -> Self {
        Self { contenders: contenders.to_vec(), runs: vec![], failures: Cells::default() }
    }

    /// Adds the result of a run of the contender called `name`, in pair number `pair`, `beside` another contender.
    pub(super) fn add(&mut self, name: &str, pair: u32, beside: Option<&str>, run: Result<Run>) {
        match run {
            Ok(run) => {
                let beside = beside.map(str::to_owned);
                self.runs.push(Run { contender: name.into(), pair, beside, ..run });
            }
            Err(error) => self.failures.0.extend([(name.to_owned(), format!("{error:#}"))]),
        }
    }

    /// Whether a run of the contender called `name` failed.
    pub(super) fn has_failed(&self, name: &str) -> bool {
        self.failures.get(name).is_some()
    }

    /// A table with a row for each contender, and one with a row for each process, if processes have numbers of their
    /// own.
    pub(super) fn tables(&self) -> Vec<Table> {
        let first = self.contenders.first().map_or("", |contender| contender.name.as_str());
        let row = |contender: &Contender| {
            let name = contender.name.as_str();
            let encrypted = if contender.encrypted { "yes" } else { "no" };
            let setting =
                [("contender", name), ("encrypted", encrypted), ("memory", &contender.receives_into)];
            let runs: Vec<&Run> = self.runs.iter().filter(|run| run.contender == name).collect();
            let samples = match &runs[..] {
                [only] => only.samples(),
                runs => runs.iter().map(|run| run.medians()).collect(),
            };
            let mut row = Row::of(Cells::of(setting.map(|(name, value)| (name, value.to_owned()))), &samples);
            if name != first {
                let ratio = |metric: &&str| Some(((*metric).to_owned(), self.ratio(first, name, metric)?));
                row.ratios = Cells(COMPARED.iter().filter_map(ratio).collect());
            }
            row
        };
        let all = Table::new("All runs", self.contenders.iter().map(row));
        let mut processes = Table::new("Each process", []);
        for run in &self.runs {
            for ProcessRounds { process, rounds, .. } in &run.processes {
                let setting = Cells::of([("process", process.clone()), ("contender", run.contender.clone())]);
                rounds.iter().for_each(|round| processes.add(&setting, round));
            }
        }
        vec![all, processes]
    }

    /// Remarks on the contenders, and failures.
    pub(super) fn notes(&self) -> Vec<String> {
        let noted = self.contenders.iter().filter(|contender| !contender.note.is_empty());
        let noted = noted.map(|contender| format!("{}: {}", contender.name, contender.note));
        let failed = self.failures.0.iter().map(|(name, reason)| format!("{name} failed: {reason}"));
        noted.chain(failed).collect()
    }

    /// The ratio of contender `a`'s value of `metric` to that of `b`, over pairs of neighbouring runs.
    pub(crate) fn ratio(&self, a: &str, b: &str, metric: &str) -> Option<PairedRatio> {
        let beside = |name, other| {
            self.runs
                .iter()
                .filter(move |run| run.contender == name && run.beside.as_deref() == Some(other))
        };
        let pair = |run: &Run| {
            let neighbour = beside(b, a).find(|other| other.pair == run.pair)?;
            Some((*run.medians().get(metric)?, *neighbour.medians().get(metric)?))
        };
        PairedRatio::of(&beside(a, b).filter_map(pair).collect::<Vec<_>>())
    }
}

impl Run {
    /// The median of each number over the counted rounds, and the numbers of the first round and of small messages.
    fn medians(&self) -> Cells<f64> {
        let rounds = Row::of(Cells::default(), &self.rounds).measured.0;
        let medians = rounds.into_iter().map(|(name, Summary { median, .. })| (name, median));
        self.with_own_numbers(Cells(medians.collect()))
    }

    /// The counted rounds, of which the first also has the numbers of the first round and of small messages.
    fn samples(&self) -> Vec<Cells<f64>> {
        let mut samples = self.rounds.clone();
        if let Some(first) = samples.first_mut() {
            *first = self.with_own_numbers(first.clone());
        }
        samples
    }

    fn with_own_numbers(&self, cells: Cells<f64>) -> Cells<f64> {
        let later_gb_per_s = cells.get("gb_per_s").copied();
        let first_by_later = self.first_gb_per_s.zip(later_gb_per_s).map(|(first, later)| first / later);
        cells
            .and("first_gb_per_s", self.first_gb_per_s)
            .and("first_by_later", first_by_later)
            .and("small_p50_us", self.small.map(|small| small.p50_us))
            .and("small_p99_us", self.small.map(|small| small.p99_us))
    }
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers = self.medians().0.into_iter().map(|(name, value)| format!("{name} {value:.3}"));
        f.write_str(&numbers.collect::<Vec<_>>().join(", "))
    }
}

/// The metrics for which ratios are computed.
const COMPARED: [&str; 5] =
    ["gb_per_s", "cpu_s_per_gib", "first_gb_per_s", "small_p50_us", "publish_to_commit_ms"];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{harness::contenders::Contenders, program::Program};

    /// Six pairs of `tensor-relay` and `tcp`, which is half as fast; one pair of a slower `tensor-relay` and `tcp-tls`,
    /// after which `tcp-tls` fails.
    fn example() -> Runs {
        let contenders = Contenders::of_this(&Program::new("bench", &[]), None);
        let names = ["tensor-relay", "tcp", "tcp-tls"].map(str::to_owned);
        let mut runs = Runs::new(&contenders.pick(&names).unwrap());
        for pair in 0..6 {
            runs.add("tensor-relay", pair, Some("tcp"), Ok(run([4.0, 1.0, 9.0], 100.0)));
            runs.add("tcp", pair, Some("tensor-relay"), Ok(run([2.0, 2.0, 2.0], 50.0)));
        }
        runs.add("tensor-relay", 0, Some("tcp-tls"), Ok(run([3.0; 3], 100.0)));
        runs.add("tcp-tls", 0, Some("tensor-relay"), Ok(run([1.0; 3], 80.0)));
        runs.add("tcp-tls", 1, Some("tensor-relay"), Err(anyhow::anyhow!("it ended early")));
        runs
    }

    fn run(speeds: [f64; 3], p50_us: f64) -> Run {
        let round = |speed| Cells::of([("gb_per_s", speed), ("cpu_s_per_gib", 1.0 / speed)]);
        let small = SmallMessages { small: 9, p50_us, p99_us: 2.0 * p50_us, min_us: 1.0, max_us: 999.0 };
        Run { rounds: speeds.map(round).into(), small: Some(small), ..Run::default() }
    }

    #[test]
    fn ratios_divide_the_first_contender_by_the_others() {
        let Table { rows, .. } = example().tables().remove(0);
        let [first, tcp, tls] = &rows[..] else { panic!("three contenders") };
        assert!(first.ratios.0.is_empty(), "the first has no ratio to itself");
        assert_eq!(first.measured.get("gb_per_s").unwrap().median, 4.0);
        assert_eq!(first.measured.get("small_p99_us").unwrap().median, 200.0);
        let speed = tcp.ratios.get("gb_per_s").unwrap();
        assert_eq!((speed.median, speed.pairs), (2.0, 6), "medians over rounds, then pairs");
        assert_eq!(tcp.ratios.get("cpu_s_per_gib").unwrap().median, 0.5);
        assert_eq!(tcp.ratios.get("small_p50_us").unwrap().median, 2.0);
        let speed = tls.ratios.get("gb_per_s").unwrap();
        assert_eq!(
            (speed.median, speed.pairs),
            (3.0, 1),
            "the only pair that was complete before tcp-tls failed"
        );
        assert_eq!(example().notes(), ["tcp-tls failed: it ended early"]);
    }

    #[test]
    fn the_rounds_of_an_only_run_are_its_samples() {
        let contenders = Contenders::of_this(&Program::new("bench", &[]), None);
        let mut runs = Runs::new(&contenders.pick(&["tensor-relay".into()]).unwrap());
        let rounds = vec![Cells::of([("cpu_s_per_gib", 1.0)]), Cells::of([("cpu_s_per_gib", 3.0)])];
        let process = ProcessRounds { process: "producer".into(), machine: None, rounds };
        runs.add("tensor-relay", 0, None, Ok(Run { processes: vec![process], ..run([1.0, 2.0, 9.0], 5.0) }));
        let [all, processes] = &runs.tables()[..] else { panic!("two tables") };
        assert_eq!((all.rows[0].samples, processes.rows[0].samples), (3, 2));
        assert_eq!(all.rows[0].measured.get("gb_per_s").unwrap().max, 9.0);
        assert_eq!(all.rows[0].measured.get("small_p50_us").unwrap().median, 5.0);
        assert_eq!(processes.rows[0].measured.get("cpu_s_per_gib").unwrap().median, 2.0);
    }
}
