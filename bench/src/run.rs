//! `bench run`: measures users' workloads, on one machine or across several.
//!
//! This process is the driver. It moves no tensors: the producer and the consumers are processes of their own, started
//! by the driver, or by [nodes](crate::node) on other machines. Each round is prepared, then its workers begin
//! together. All bytes that a measured consumer received are checked: with a hash after the measured time, or, in a
//! stream of versions, one by one on arrival.

mod address;
mod barrier;
mod checks;
mod document;
mod driver;
mod progress;
mod results;
mod worker_handle;
mod workers;
mod workload;

pub use address::{NodeAddress, NodeAddressError};
pub use workload::{ContentArg, Workload, WorkloadArgs};

use crate::{
    network::{Network, NetworkArgs, Side},
    node::{Hold, TOKEN_VARIABLE, Token, WORKER},
    program::Program,
};
use anyhow::{Context, Result, ensure};
use document::NetworkFacts;
use driver::{Driver, Settings};
use std::{path::PathBuf, time::Duration};
use worker_handle::WorkerHandle;
use workers::Workers;

/// The options of `run`.
#[derive(Debug, Clone, clap::Args)]
pub struct RunArgs {
    /// The workload.
    #[command(flatten)]
    pub workload: WorkloadArgs,
    /// The number of consumers on this machine. Default: 1; 4 for `fan-out`, 2 for `slow-reader`.
    #[arg(long, conflicts_with = "consumer", value_parser = clap::value_parser!(u16).range(1..=CONSUMERS_MAX))]
    pub consumers: Option<u16>,
    /// The number of counted rounds of each scene. One more of each comes first, to warm up.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=ROUNDS_MAX))]
    pub rounds: u32,
    /// The number of lanes of each consumer: more lanes use more cores.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=LANES_MAX))]
    pub lanes: u32,
    /// Where the tensors lie while they are published.
    #[arg(long, value_enum, default_value_t)]
    pub hold: Hold,
    /// The network, if all workers are on this machine. Its MTU also applies between nodes.
    #[command(flatten)]
    pub network: NetworkArgs,
    /// The node of the producer, HOST or HOST:PORT, where `bench node` runs.
    #[arg(long, value_name = "NODE", requires_all = ["consumer", "token"], conflicts_with = "namespaces")]
    pub producer: Option<NodeAddress>,
    /// The nodes of the consumers; a node that is named twice runs two consumers.
    #[arg(long, value_name = "NODE", num_args = 1.., requires = "producer")]
    pub consumer: Vec<NodeAddress>,
    /// The host at which consumers reach the producer, if it is not that of --producer.
    #[arg(long, value_name = "HOST", requires = "producer")]
    pub serve_at: Option<NodeAddress>,
    /// The token of the nodes, which `bench node` printed or was given.
    #[arg(long, env = TOKEN_VARIABLE, hide_env_values = true)]
    pub token: Option<Token>,
    /// The deadline of each step, in seconds. Default: a minute; ten minutes to prepare a round; to run it, a minute
    /// more than the bytes of all consumers take at 10 MB/s, and for `versions` another two times --seconds.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub deadline: Option<u64>,
    /// Also writes everything that was measured to this file.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// The examples at the end of the command's help.
pub const EXAMPLES: &str = "\
Examples:
  run --workload state-dict --model gpt2           a model on this machine's loopback
  run --workload fan-out --namespaces --mtu 1472   one and four consumers over a virtual Ethernet; needs root
  run --workload latency --json latency.json       the time from publish to commit of versions of 4 KiB

Across machines: `node` on each, with one token for all in TENSOR_RELAY_BENCH_TOKEN, and then
  run --producer host-a --consumer host-b host-c";

/// The maximum number of consumers.
const CONSUMERS_MAX: i64 = 64;
const ROUNDS_MAX: i64 = 10_000;
const LANES_MAX: i64 = 16;

/// Measures the workload, and prints its tables.
///
/// # Errors
/// When options contradict each other; when the network cannot be set up, or the results cannot be written; when a
/// worker fails, reports impossible numbers or misses a deadline. Then the error names the worker, and all workers are
/// ended.
pub async fn run(args: RunArgs, this: &Program) -> Result<()> {
    let consumers = match args.producer {
        Some(_) => args.consumer.len(),
        None => args
            .consumers
            .map_or_else(|| args.workload.workload.default_consumers(), usize::from),
    };
    ensure!(consumers <= CONSUMERS_MAX as usize, "{consumers} consumers are more than {CONSUMERS_MAX}");
    let plan = args.workload.plan(consumers)?;
    let workload = args.workload.workload;
    let has_effect = args.hold == Hold::Stage || workload.can_borrow();
    ensure!(has_effect, "--hold borrow has no effect for `{}`", workload.name());
    // `_local` is kept until the end: dropping it removes its namespaces.
    let (workers, network, _local) = match &args.producer {
        Some(producer) => {
            let network = NetworkFacts::Nodes { consumers };
            (connect_to_nodes(&args, producer).await?, network, None)
        }
        None => {
            let local = Network::new(&args.network, this).await?;
            (start_workers(&local, this, consumers)?, NetworkFacts::Local(args.network.clone()), Some(local))
        }
    };
    let settings = Settings {
        name: args.workload.workload.name(),
        plan,
        rounds: args.rounds,
        hold: args.hold,
        udp_payload_max: args.network.mtu,
        lanes: args.lanes,
        serve_at: args.serve_at.or(args.producer),
        deadline: args.deadline.map(Duration::from_secs),
    };
    let results = Driver::new(workers, settings).measure(network).await?;
    print!("{results}");
    results.write(args.json.as_deref())
}

/// Starts all workers on this machine: the producer, then the consumers.
fn start_workers(network: &Network, this: &Program, consumers: usize) -> Result<Workers> {
    let (events, received) = Workers::event_queue();
    let mut producer = network.command(Side::Serving, this);
    producer.arg(WORKER).arg(format!("--data={}:0", network.server_ip()));
    let mut handles = vec![WorkerHandle::start("producer".into(), producer, 0, events.clone())?];
    for number in 1..=consumers {
        let mut consumer = network.command(Side::Receiving, this);
        consumer.arg(WORKER);
        handles.push(WorkerHandle::start(format!("consumer {number}"), consumer, number, events.clone())?);
    }
    Ok(Workers::new(handles, received))
}

/// Connects to the nodes of all workers: the producer's, then the consumers'.
async fn connect_to_nodes(args: &RunArgs, producer: &NodeAddress) -> Result<Workers> {
    let token = args.token.as_ref().context("nodes require a token: give --token")?;
    let (events, received) = Workers::event_queue();
    let mut handles = vec![WorkerHandle::connect("producer", producer, token, 0, events.clone()).await?];
    for (number, address) in (1..).zip(&args.consumer) {
        let role = format!("consumer {number}");
        handles.push(WorkerHandle::connect(&role, address, token, number, events.clone()).await?);
    }
    Ok(Workers::new(handles, received))
}
