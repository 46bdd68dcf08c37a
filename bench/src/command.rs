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

/// All of them, and what holds for each.
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
    /// Moves the same bytes through tensor-relay and through others, side by side, and compares.
    #[command(alias = "raw")]
    Compare(CompareArgs),
    /// Measures versions that differ a little, one after the other: as deltas against the one before, and whole.
    Deltas(DeltasArgs),
    /// Makes a page with plots, and tables, of the files that the others write.
    Report(ReportArgs),
    /// Measures what each codec makes of your own tensors, and how fast.
    #[command(after_help = codecs::EXAMPLES)]
    Codecs(CodecsArgs),
    /// Measures what users do with tensor-relay: on this machine, or across the nodes that it is given.
    #[command(after_help = running::EXAMPLES)]
    Run(Box<RunArgs>),
    /// Waits for work as one end of a `run`. It keeps strangers out by a token, and encrypts no orders: for networks that
    /// are trusted.
    Node(NodeArgs),
    /// The process that works for a `run`.
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
    /// What carries packets between two ends, and takes its time.
    #[command(name = DELAY_BRIDGE, hide = true)]
    DelayBridge(DelayArgs),
}

/// The sides of tensor-relay.
#[derive(Debug, Subcommand)]
pub enum Relay {
    /// Holds bytes and sends them.
    Serve {
        /// The options of every server.
        #[command(flatten)]
        args: ServeArgs,
        /// The bytes that it holds.
        #[command(flatten)]
        payload: relay::PayloadArgs,
    },
    /// Receives them, several times.
    Receive {
        /// The options of every receiver.
        #[command(flatten)]
        args: ReceiveArgs,
        /// Over how many lanes.
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
    /// Receives all of them.
    Follow {
        /// The options of every receiver.
        #[command(flatten)]
        args: ReceiveArgs,
        /// Keeps no copy, so that versions come whole.
        #[arg(long)]
        whole: bool,
    },
}

/// The sides of bare quinn.
#[derive(Debug, Subcommand)]
pub enum StockQuinn {
    /// Holds bytes and sends them.
    Serve {
        /// The options of every server.
        #[command(flatten)]
        args: ServeArgs,
        /// The congestion controller, which is the sender's to choose.
        #[arg(long, value_enum, default_value_t)]
        congestion: Congestion,
    },
    /// Receives them, several times.
    Receive(ReceiveArgs),
}

/// The sides of TCP.
#[derive(Debug, Subcommand)]
pub enum Tcp {
    /// Holds bytes and sends them.
    Serve {
        /// The options of every server.
        #[command(flatten)]
        args: ServeArgs,
        /// Plain or not.
        #[command(flatten)]
        encryption: Encryption,
    },
    /// Receives them, several times.
    Receive {
        /// The options of every receiver.
        #[command(flatten)]
        args: ReceiveArgs,
        /// Plain or not; the same as the serving side's.
        #[command(flatten)]
        encryption: Encryption,
    },
}

/// Does what `args` say. `this` is the program that runs, to be started again for the sides.
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

/// Does `work` until a signal says to stop, so that what the harness started is dropped and thereby ended.
///
/// # Errors
/// The error of `work`, or an interrupt.
pub async fn until_interrupted<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    let context = "cannot listen for signals";
    let mut interrupt = signal(SignalKind::interrupt()).context(context)?;
    let mut terminate = signal(SignalKind::terminate()).context(context)?;
    tokio::select! {
        done = work => done,
        _ = interrupt.recv() => bail!("interrupted"),
        _ = terminate.recv() => bail!("interrupted"),
    }
}
