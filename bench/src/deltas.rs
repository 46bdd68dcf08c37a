//! Versions that differ a little, one after the other: what they cost as deltas, beside what they cost whole.
//!
//! A producer publishes each version when the one before was committed; a subscriber in mode `every` takes it. Both ways are
//! measured in turn, in processes of their own. The first two versions of each run come whole in either, and do not count.

mod ends;
mod steps;
mod table;

pub use ends::{FollowArgs, PublishArgs, follow, publish};
pub use steps::StepsArgs;

use crate::{
    network::{End, Network, NetworkArgs},
    origin::Origin,
    program::Program,
    side::Side,
    size,
    stats::{PairedRatio, Summary},
};
use anyhow::{Context, Result};
use ends::{Publishing, Version};
use serde::Serialize;
use std::{ffi::OsString, path::PathBuf, time::Duration};
use table::Table;

/// What is published, and how often.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct DeltasArgs {
    /// What the versions are.
    #[command(flatten)]
    pub steps: StepsArgs,
    /// How often both ways are measured, one beside the other. From six pairs on there is an interval.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub pairs: u32,
    /// What lies between the two ends.
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

What is asked of it, with --steps of a real fine-tuning at 1 Gbit/s: a version comes as at most 1/50 of its bytes at a
learning rate of 1e-6, as at most 1/20 at 1e-5, and is committed at least 20 times sooner than whole. Both ends keep as many
bases as they are asked to: no budget of memory is measured here.";

/// How long a version may take.
const VERSION_MAX: Duration = Duration::from_secs(600);

/// How versions travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Way {
    Delta,
    Whole,
}

/// The result file.
#[derive(Debug, Serialize)]
struct Document<'a> {
    bench: &'static str,
    #[serde(flatten)]
    origin: Origin,
    network: &'a NetworkArgs,
    steps: &'a StepsArgs,
    runs: &'a [Run],
    /// How many times sooner a version is committed as deltas than whole.
    sooner: Option<PairedRatio>,
}

/// One run: every version but the first two.
#[derive(Debug, Serialize)]
struct Run {
    way: Way,
    versions: Vec<Version>,
}

/// How many versions come whole, before the subscriber has a copy of one.
const WHOLE: u32 = 2;

/// Measures both ways, and prints a table. `this` is the program that runs, to be started for each end.
///
/// # Errors
/// When the network cannot be made, files cannot be read or written, or an end fails.
pub async fn run(args: DeltasArgs, this: &Program) -> Result<()> {
    eprintln!("{}", args.network);
    let network = Network::new(&args.network, this).await?;
    let mut runs = Vec::new();
    for pair in 0..args.pairs {
        let order = if pair % 2 == 0 { [Way::Delta, Way::Whole] } else { [Way::Whole, Way::Delta] };
        for way in order {
            let run = measure(&args, way, this, &network).await?;
            eprintln!("{} of {}: {}", pair + 1, args.pairs, run.line());
            runs.push(run);
        }
    }
    print!("{}", Table(&runs));
    if let Some(path) = &args.json {
        let document = Document {
            bench: "deltas",
            origin: Origin::here(),
            network: &args.network,
            steps: &args.steps,
            runs: &runs,
            sooner: Table(&runs).sooner(),
        };
        let text = serde_json::to_string_pretty(&document)?;
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// Starts both ends, and hears of every version.
async fn measure(args: &DeltasArgs, way: Way, this: &Program, network: &Network) -> Result<Run> {
    let words = |word: &str| vec![OsString::from(word), format!("--mtu={}", args.network.mtu).into()];
    let mut publish = words("deltas-publish");
    publish.push(format!("--listen={}:0", network.server_ip()).into());
    publish.extend(args.steps.words());
    let mut producer = Side::start("the producer".into(), network.command(End::Serving, this), &publish)?;
    let publishing: Publishing = producer.line(VERSION_MAX).await?;
    let mut follow = words("deltas-follow");
    follow.push(format!("--ticket={}", publishing.ticket).into());
    follow.push(format!("--versions={}", publishing.versions).into());
    if way == Way::Whole {
        follow.push("--whole".into());
    }
    let mut subscriber =
        Side::start("the subscriber".into(), network.command(End::Receiving, this), &follow)?;
    let mut versions = Vec::new();
    for version in 1..=publishing.versions {
        let came = subscriber.line(VERSION_MAX).await?;
        let made = producer.line(VERSION_MAX).await?;
        if version > WHOLE {
            versions.push(Version { came, made });
        }
    }
    subscriber.end().await;
    producer.end().await;
    Ok(Run { way, versions })
}

impl Run {
    /// The middle of what `value` says of its versions.
    fn median(&self, value: impl Fn(&Version) -> f64) -> f64 {
        let values: Vec<f64> = self.versions.iter().map(value).collect();
        Summary::of(&values).map_or(f64::NAN, |summary| summary.median)
    }

    fn seconds(&self) -> f64 {
        self.median(|version| version.came.seconds)
    }

    /// How many times smaller a version is on the wire than its payload.
    fn ratio(&self) -> f64 {
        self.median(|Version { came, .. }| came.payload_bytes as f64 / came.wire_bytes.max(1) as f64)
    }

    fn wire_bytes(&self) -> f64 {
        self.median(|version| version.came.wire_bytes as f64)
    }

    fn line(&self) -> String {
        let Self { way, .. } = self;
        let (wire, ms) = (size::text(self.wire_bytes() as u64), self.seconds() * 1e3);
        format!("{way:?}: {wire} a version, 1/{:.1} of it, committed after {ms:.1} ms", self.ratio())
    }
}
