//! `bench run`: measures users' workloads with tensor-relay, on one machine or across several.
//!
//! A workload is a job of one producer and its consumers, each a process of its own, started by the harness, here
//! or on other hosts. A workload with two scenes compares two jobs. All bytes that a measured
//! consumer received are checked: with a hash after the measured time, or, in a stream of versions, one by one on
//! arrival.

mod workload;

pub use crate::harness::ServeAt;
pub use workload::{ContentArg, Workload, WorkloadArgs};

use crate::{
    harness::{Comparison, Contender, Hosts, Over, RunSettings},
    network::NetworkArgs,
    program::Program,
    relay::{Content, Form, Hold, Load, Work},
};
use anyhow::{Context, Result, ensure};
use serde_json::json;
use std::{path::PathBuf, time::Duration};
use workload::Scene;

/// The options of `run`.
#[derive(Debug, Clone, clap::Args)]
pub struct RunArgs {
    /// The workload.
    #[command(flatten)]
    pub workload: WorkloadArgs,
    /// The number of consumers on this machine. Default: 1; 4 for `fan-out`, 2 for `slow-reader`.
    #[arg(long, conflicts_with = "consumer", value_parser = clap::value_parser!(u32).range(1..=i64::from(CONSUMERS_MAX)))]
    pub consumers: Option<u32>,
    /// The number of counted rounds, after one to warm up. Of `fan-out` and `slow-reader` the number of runs of each
    /// scene: they alternate, and each counts one round, after one to warm up.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=ROUNDS_MAX))]
    pub rounds: u32,
    /// The number of lanes of each consumer: more lanes use more cores.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=LANES_MAX))]
    pub lanes: u32,
    /// Where the tensors lie while they are published.
    #[arg(long, value_enum, default_value_t)]
    pub hold: Hold,
    /// The network, if all workers are on this machine. Its MTU also applies between hosts.
    #[command(flatten)]
    pub network: NetworkArgs,
    /// The command that runs the benchmark's subcommands on the producer's host, e.g. "ssh host-a tensor-relay bench".
    #[arg(long, value_name = "COMMAND", requires_all = ["consumer", "serve_at"], conflicts_with = "namespaces")]
    pub producer: Option<Program>,
    /// The same for the host of each consumer.
    #[arg(long, value_name = "COMMAND", num_args = 1.., requires = "producer")]
    pub consumer: Vec<Program>,
    /// The HOST or HOST:PORT at which consumers reach the producer. Without a port, the system chooses one.
    #[arg(long, value_name = "HOST[:PORT]", requires = "producer")]
    pub serve_at: Option<ServeAt>,
    /// The deadline of each round in seconds, with its preparation. Default: eleven minutes more than the bytes of all
    /// consumers take at 10 MB/s, and for `versions` another two times --seconds; an hour for a file.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub deadline: Option<u64>,
    /// Also writes everything that was measured to this file.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// The examples at the end of the command's help.
pub const EXAMPLES: &str = "\
Examples:
  run --workload state-dict                        a model on this machine's loopback
  run --workload fan-out --namespaces --mtu 1472   one and four consumers over a virtual Ethernet; needs root
  run --workload latency --json latency.json       the time from publish to commit of versions of 4 KiB

Across machines, with this program on each:
  run --producer 'ssh host-a tensor-relay bench' --serve-at host-a --consumer 'ssh host-b tensor-relay bench'";

/// The maximum number of consumers.
const CONSUMERS_MAX: u32 = 64;
const ROUNDS_MAX: i64 = 10_000;
const LANES_MAX: i64 = 16;

/// Measures the workload, and prints its tables.
///
/// # Errors
/// When options contradict each other; when the network cannot be set up, or the results cannot be written; when a
/// process fails, reports impossible numbers or misses a deadline. Then the error names the process, and all are ended.
pub async fn run(args: RunArgs, this: &Program) -> Result<()> {
    let consumers = match args.producer {
        Some(_) => u32::try_from(args.consumer.len())?,
        None => args.consumers.unwrap_or_else(|| args.workload.workload.default_consumers()),
    };
    ensure!(consumers <= CONSUMERS_MAX, "{consumers} consumers are more than {CONSUMERS_MAX}");
    let scenes = args.workload.scenes(consumers, args.hold)?;
    let (name, work) = (args.workload.workload.name(), scenes[0].job.work.clone());
    let lanes = format!("--lanes={}", args.lanes);
    let contender = |scene: &Scene| Contender::of_job(&scene.name, this, &scene.job, &[&lanes]);
    // Two scenes alternate round by round, because a machine's speed drifts.
    let (pairs, rounds) = if scenes.len() > 1 { (args.rounds, 1) } else { (1, args.rounds) };
    let deadline_s = args.deadline.unwrap_or_else(|| args.workload.deadline_s(consumers));
    let comparison = Comparison {
        kind: "run",
        title: format!("Workload {name}"),
        about: format!(
            "tensor-relay alone; medians over {} rounds (minimum to maximum).{}",
            args.rounds,
            if scenes.len() > 1 { RATIOS } else { "" }
        ),
        contenders: scenes.iter().map(contender).collect::<Result<_>>()?,
        settings: RunSettings {
            bytes: None,
            mtu: args.network.mtu,
            data: Content::Noise,
            warm_up: 1,
            rounds,
            small: 0,
            round_timeout: Duration::from_secs(deadline_s),
        },
        pairs,
        over: match args.producer {
            None => Over::Local(args.network),
            Some(producer) => Over::Hosts(Hosts {
                producer,
                consumers: args.consumer,
                serve_at: args.serve_at.context("another host's address is needed: give --serve-at")?,
            }),
        },
        options: json!({
            "workload": name,
            "work": without_folder(work),
            "mode": if args.workload.every { "every" } else { "latest" },
            "hold": args.hold,
            "lanes": args.lanes,
        }),
        json: args.json.as_deref(),
    };
    comparison.run(this, |_| vec![]).await
}

const RATIOS: &str = " \
A ratio divides the first scene by the row's, for neighbouring rounds; the table shows the median ratio and its confidence \
interval.";

/// `work` for the result file, with only the name of its file, because the folder may be private.
fn without_folder(work: Work) -> Work {
    match work {
        Work::Version(Load { form: Form::File { path }, content }) => {
            let path = path.file_name().map(Into::into).unwrap_or_default();
            Work::Version(Load { form: Form::File { path }, content })
        }
        other => other,
    }
}
