//! `bench run`: workloads of users, on one machine or across several.
//!
//! This process is the driver. It moves no tensors: a producer and its consumers are processes of their own, started here,
//! or by [nodes](crate::node) on other machines. Every round is prepared, then all begin together, and every byte that
//! arrived is compared with what was published, when the clock no longer runs.

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
    network::{End, Network, NetworkArgs},
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
    /// The number of counted rounds. One more of each kind comes first, to warm up.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=ROUNDS_MAX))]
    pub rounds: u32,
    /// Over how many lanes each consumer receives: more use more cores.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=LANES_MAX))]
    pub lanes: u32,
    /// The memory of the tensors while they are published.
    #[arg(long, value_enum, default_value_t)]
    pub hold: Hold,
    /// The network on this machine.
    #[command(flatten)]
    pub network: NetworkArgs,
    /// The node that publishes, HOST or HOST:PORT; `bench node` runs there.
    #[arg(long, value_name = "NODE", requires_all = ["consumer", "token"], conflicts_with = "namespaces")]
    pub producer: Option<NodeAddress>,
    /// The nodes that subscribe; one that is named twice has two consumers.
    #[arg(long, value_name = "NODE", num_args = 1.., requires = "producer")]
    pub consumer: Vec<NodeAddress>,
    /// The producer's address for consumers, if not that of --producer.
    #[arg(long, value_name = "HOST", requires = "producer")]
    pub serve_at: Option<NodeAddress>,
    /// The token of the nodes: what `bench node` printed, or was given.
    #[arg(long, env = TOKEN_VARIABLE, hide_env_values = true)]
    pub token: Option<Token>,
    /// The deadline of each step, in seconds. Default: ten minutes to
    /// prepare a round; a minute to move it, and what a very slow network needs for the size.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub deadline: Option<u64>,
    /// Also writes everything that was measured to this file.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// The end of the command's help.
pub const EXAMPLES: &str = "\
Examples:
  run --workload state-dict --model gpt2           a model on this machine's loopback
  run --workload fan-out --namespaces --mtu 1472   one to four over an Ethernet made here; needs root
  run --workload latency --json latency.json       the time from publish to commit of 4 KiB

Across machines: `node` on each, with one token for all in TENSOR_RELAY_BENCH_TOKEN, and then
  run --producer host-a --consumer host-b host-c";

/// As many as one machine has use for.
const CONSUMERS_MAX: i64 = 64;
const ROUNDS_MAX: i64 = 10_000;
const LANES_MAX: i64 = 16;

/// Measures, and prints a table.
///
/// # Errors
/// When the words do not go together; and when a worker dies, lies or is late, which is named. All others are then ended.
pub async fn run(args: RunArgs, this: &Program) -> Result<()> {
    let consumers = match args.producer {
        Some(_) => args.consumer.len(),
        None => args.consumers.map_or_else(|| args.workload.workload.consumers(), usize::from),
    };
    ensure!(consumers <= CONSUMERS_MAX as usize, "{consumers} consumers are more than {CONSUMERS_MAX}");
    let plan = args.workload.plan(consumers)?;
    // Kept to the end: the namespaces go with it.
    let (workers, network, _made) = match &args.producer {
        Some(producer) => {
            let network = NetworkFacts::Nodes { consumers };
            (at_nodes(&args, producer).await?, network, None)
        }
        None => {
            let made = Network::new(&args.network, this).await?;
            (here(&made, this, consumers)?, NetworkFacts::Local(args.network.clone()), Some(made))
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

/// Starts all workers on this machine: the producer, and then the consumers.
fn here(network: &Network, this: &Program, consumers: usize) -> Result<Workers> {
    let (events, received) = Workers::event_queue();
    let mut producer = network.command(End::Serving, this);
    producer.arg(WORKER).arg(format!("--data={}:0", network.server_ip()));
    let mut handles = vec![WorkerHandle::start("producer".into(), producer, 0, events.clone())?];
    for number in 1..=consumers {
        let mut consumer = network.command(End::Receiving, this);
        consumer.arg(WORKER);
        handles.push(WorkerHandle::start(format!("consumer {number}"), consumer, number, events.clone())?);
    }
    Ok(Workers::new(handles, received))
}

/// Finds all nodes, in the same order.
async fn at_nodes(args: &RunArgs, producer: &NodeAddress) -> Result<Workers> {
    let token = args.token.as_ref().context("nodes ask for a token: give --token")?;
    let (events, received) = Workers::event_queue();
    let mut handles = vec![WorkerHandle::connect("producer", producer, token, 0, events.clone()).await?];
    for (number, address) in (1..).zip(&args.consumer) {
        let role = format!("consumer {number}");
        handles.push(WorkerHandle::connect(&role, address, token, number, events.clone()).await?);
    }
    Ok(Workers::new(handles, received))
}
