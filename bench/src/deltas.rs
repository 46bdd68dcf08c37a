//! `bench deltas`: measures successive versions that differ a little, sent as deltas and whole.
//!
//! A producer publishes each version when the version before was committed; a subscriber in mode `every` receives it.
//! Runs with and without deltas alternate, in processes of their own. The first two versions of each run are always
//! sent whole, since a client copies its base from the second one, and are not counted.

use crate::{
    cells::Cells,
    harness::{Comparison, Contender, Over, RunSettings, Runs},
    network::NetworkArgs,
    program::Program,
    relay::{Content, Hold, Job, StepsArgs, Work},
    stats::PairedRatio,
    table::{Row, Table},
};
use anyhow::Result;
use serde_json::json;
use std::{path::PathBuf, time::Duration};

/// The options of `deltas`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct DeltasArgs {
    /// The versions.
    #[command(flatten)]
    pub steps: StepsArgs,
    /// The number of pairs of neighbouring runs, with deltas and without. Six or more give confidence intervals.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub pairs: u32,
    /// The network between both ends.
    #[command(flatten)]
    pub network: NetworkArgs,
    /// Also writes everything that was measured to this file.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  deltas --namespaces --mtu 1472 --rate 1Gbit                   one element in a hundred changes
  deltas --size 1GiB --changed 0.1 --versions 20
  deltas --steps checkpoints/ --namespaces --rate 1Gbit --pairs 20
                                                                safetensors files, in order of their names

The goals, with --steps of a real fine-tuning at 1 Gbit/s: a version is sent as at most 1/50 of its bytes at a learning rate
of 1e-6, as at most 1/20 at 1e-5, and committed at least 20 times sooner than whole. Both ends keep bases without limit: the
effect of memory budgets is not measured.";

/// The deadline of a version.
const VERSION_TIMEOUT: Duration = Duration::from_secs(600);

/// The number of versions at the beginning of a run that are always sent whole, and not counted.
const WHOLE_VERSIONS: u32 = 2;

/// The names of the two contenders.
const WHOLE: &str = "whole";
const DELTA: &str = "delta";

/// Measures versions as deltas and whole, and prints tables. `this` is the running program, which is started for each
/// end.
///
/// # Errors
/// When the network cannot be created, files cannot be read or written, or an end fails.
pub async fn run(args: DeltasArgs, this: &Program) -> Result<()> {
    let DeltasArgs { steps, pairs, network, json } = args;
    let work = Work::Steps(steps.clone());
    let job = Job { work, hold: Hold::Stage, every: true, receivers: 1, has_slow: false };
    let contender = |name, options: &[&str]| Contender::of_job(name, this, &job, options);
    let comparison = Comparison {
        kind: "deltas",
        title: "Versions that differ a little".into(),
        about: ABOUT.into(),
        contenders: vec![contender(WHOLE, &["--whole"])?, contender(DELTA, &[])?],
        settings: RunSettings {
            bytes: None,
            mtu: network.mtu,
            data: Content::Noise,
            warm_up: WHOLE_VERSIONS,
            rounds: steps.count()?.saturating_sub(WHOLE_VERSIONS),
            small: 0,
            round_timeout: VERSION_TIMEOUT,
        },
        pairs,
        over: Over::Local(network),
        options: json!({ "steps": steps }),
        json: json.as_deref(),
    };
    comparison.run(this, |runs| vec![versions_table(runs)]).await
}

/// A table with two rows for each version, whole and as a delta, of the medians over all runs.
fn versions_table(runs: &Runs) -> Table {
    let rounds = |contender: &'static str, at: usize| {
        let runs = runs.runs.iter().filter(move |run| run.contender == contender);
        runs.filter_map(move |run| run.rounds.get(at)).collect::<Vec<_>>()
    };
    let rows = |at: usize| {
        let row = |contender: &'static str| {
            let version = (at as u32 + WHOLE_VERSIONS + 1).to_string();
            Row::of(
                Cells::of([("version", version), ("contender", contender.to_owned())]),
                rounds(contender, at),
            )
        };
        let ms = |round: &Cells<f64>| round.get(COMMIT).copied();
        let pairs = rounds(WHOLE, at).into_iter().zip(rounds(DELTA, at));
        let pairs = pairs.filter_map(|(whole, delta)| Some((ms(whole)?, ms(delta)?)));
        let mut delta = row(DELTA);
        delta.ratios = Cells::default().and(COMMIT, PairedRatio::of(&pairs.collect::<Vec<_>>()));
        [row(WHOLE), delta]
    };
    let versions = runs.runs.iter().map(|run| run.rounds.len()).max().unwrap_or(0);
    Table::new("Each version", (0..versions).flat_map(rows))
}

/// The name of the number of milliseconds from a version's publish until the subscriber has it.
const COMMIT: &str = "publish_to_commit_ms";

const ABOUT: &str = "\
Medians over runs (minimum to maximum) of medians over versions, without the first two, which are sent whole. Encoding and \
decoding are the summed times of all worker threads. Ratios are whole / delta, of neighbouring runs, with the confidence \
interval of their median; that of publish to commit says how many times sooner a version is committed as deltas.";
