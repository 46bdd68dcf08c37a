//! The subcommands, for `tensor-relay-bench` and for `tensor-relay bench`.

use crate::{
    codecs::{self, CodecsArgs},
    compare::{self, CompareArgs},
    contender::{ReceiveArgs, ServeArgs},
    deltas::{self, DeltasArgs, StepsArgs},
    network::delay::{self, DELAY_BRIDGE, DelayArgs},
    node::{self, NodeArgs, WorkerArgs},
    process::Lifetime,
    program::Program,
    relay,
    report::{self, ReportArgs},
    run::{self as running, RunArgs},
    stock_quinn::{self, Congestion},
    tcp::{self, Encryption},
};
use anyhow::{Context, Result, bail};
use clap::Subcommand;
use tokio::signal::unix::{SignalKind, signal};

/// A subcommand, and the options of all subcommands.
#[derive(Debug, clap::Args)]
pub struct BenchArgs {
    /// The subcommand.
    #[command(subcommand)]
    pub command: Command,
    /// The lifetime of the process.
    #[command(flatten)]
    pub lifetime: Lifetime,
}

/// The commands of the harness, and the roles in which it starts itself.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Moves the same bytes with tensor-relay and with other programs, in alternating pairs, and compares the rates.
    #[command(alias = "raw")]
    Compare(CompareArgs),
    /// Measures successive versions that differ a little: as deltas against the version before, and whole.
    Deltas(DeltasArgs),
    /// Turns the result files of `run`, `compare` and `deltas` into a page with plots, or into tables.
    Report(ReportArgs),
    /// Measures the compression ratio and the speed of each codec on your own tensors.
    #[command(after_help = codecs::EXAMPLES)]
    Codecs(CodecsArgs),
    /// Measures users' workloads, on this machine or across nodes.
    #[command(after_help = running::EXAMPLES)]
    Run(Box<RunArgs>),
    /// Waits for a `run` on another host, as its producer or a consumer. A token authenticates the driver, but orders
    /// are not encrypted: for trusted networks only.
    Node(NodeArgs),
    /// Runs the producer or a consumer of a `run`, as ordered on standard input.
    #[command(hide = true)]
    Worker(WorkerArgs),
    /// One side of tensor-relay.
    #[command(subcommand, hide = true)]
    Relay(Relay),
    /// One side of bare quinn. It accepts any certificate: for test networks only.
    #[command(subcommand, hide = true)]
    StockQuinn(StockQuinn),
    /// One side of plain TCP, or of TLS over it, which accepts any certificate: for test networks only.
    #[command(subcommand, hide = true)]
    Tcp(Tcp),
    /// Forwards packets between two network devices with a delay.
    #[command(name = DELAY_BRIDGE, hide = true)]
    DelayBridge(DelayArgs),
}

/// The sides of tensor-relay.
#[derive(Debug, Subcommand)]
pub enum Relay {
    /// Holds the payload and publishes it for each round.
    Serve {
        /// The options of every server.
        #[command(flatten)]
        args: ServeArgs,
        /// The payload.
        #[command(flatten)]
        payload: relay::PayloadArgs,
    },
    /// Receives the payload once a round.
    Receive {
        /// The options of every receiver.
        #[command(flatten)]
        args: ReceiveArgs,
        /// The number of lanes; 0 for automatic.
        #[arg(long, default_value_t = 1)]
        lanes: u32,
    },
    /// Publishes one version after the other.
    Publish {
        /// The options of every server.
        #[command(flatten)]
        args: ServeArgs,
        /// The versions to publish.
        #[command(flatten)]
        steps: StepsArgs,
    },
    /// Receives every version.
    Follow {
        /// The options of every receiver.
        #[command(flatten)]
        args: ReceiveArgs,
        /// Keeps no base, so that versions are sent whole.
        #[arg(long)]
        whole: bool,
    },
}

/// The sides of bare quinn.
#[derive(Debug, Subcommand)]
pub enum StockQuinn {
    /// Holds the payload and sends it once a round.
    Serve {
        /// The options of every server.
        #[command(flatten)]
        args: ServeArgs,
        /// The congestion controller of the sender.
        #[arg(long, value_enum, default_value_t)]
        congestion: Congestion,
    },
    /// Receives the payload once a round.
    Receive(ReceiveArgs),
}

/// The sides of TCP.
#[derive(Debug, Subcommand)]
pub enum Tcp {
    /// Holds the payload and sends it once a round.
    Serve {
        /// The options of every server.
        #[command(flatten)]
        args: ServeArgs,
        /// Whether to encrypt.
        #[command(flatten)]
        encryption: Encryption,
    },
    /// Receives the payload once a round.
    Receive {
        /// The options of every receiver.
        #[command(flatten)]
        args: ReceiveArgs,
        /// Whether to encrypt; the same as the serving side's.
        #[command(flatten)]
        encryption: Encryption,
    },
}

/// Runs the command in `args`. `this` is the running program, which is started again for the sides of contenders.
///
/// # Errors
/// The error of the command, or an interrupt.
pub async fn run(args: BenchArgs, this: Program) -> Result<()> {
    args.lifetime.begin();
    match args.command {
        Command::Compare(args) => until_interrupted(compare::run(args, &this)).await,
        Command::Deltas(args) => until_interrupted(deltas::run(args, &this)).await,
        Command::Run(args) => until_interrupted(running::run(*args, &this)).await,
        Command::Node(args) => until_interrupted(node::run(args, &this)).await,
        Command::Worker(args) => node::worker::run(args).await,
        Command::Relay(Relay::Serve { args, payload }) => {
            until_interrupted(relay::serve(args, payload)).await
        }
        Command::Relay(Relay::Receive { args, lanes }) => relay::receive(args, lanes).await,
        Command::Relay(Relay::Publish { args, steps }) => deltas::publish(args, steps).await,
        Command::Relay(Relay::Follow { args, whole }) => deltas::follow(args, whole).await,
        Command::StockQuinn(StockQuinn::Serve { args, congestion }) => {
            stock_quinn::serve(args, congestion).await
        }
        Command::StockQuinn(StockQuinn::Receive(args)) => stock_quinn::receive(args).await,
        Command::Report(args) => report::run(&args),
        Command::Codecs(args) => codecs::run(&args),
        Command::DelayBridge(args) => delay::run(args).await,
        Command::Tcp(Tcp::Serve { args, encryption }) => tcp::serve(args, encryption).await,
        Command::Tcp(Tcp::Receive { args, encryption }) => tcp::receive(args, encryption).await,
    }
}

/// Runs `work` until it ends. SIGINT and SIGTERM drop it, which ends the processes that it started.
///
/// # Errors
/// The error of `work`, an interrupt, or a failure to listen for signals.
pub async fn until_interrupted<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    let context = "cannot listen for signals";
    let mut interrupt = signal(SignalKind::interrupt()).context(context)?;
    let mut terminate = signal(SignalKind::terminate()).context(context)?;
    tokio::select! {
        result = work => result,
        _ = interrupt.recv() => bail!("interrupted"),
        _ = terminate.recv() => bail!("interrupted"),
    }
}
