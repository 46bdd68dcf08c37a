//! The subcommands, for `tensor-relay-bench` and for `tensor-relay bench`.

use crate::{
    codecs::{self, CodecsArgs},
    compare::{self, CompareArgs},
    contender::{ReceiveArgs, ServeArgs},
    deltas::{self, DeltasArgs},
    harness::SIDE,
    network::delay::{self, DELAY_BRIDGE, DelayArgs},
    process::{EXIT_ON_STDIN_EOF, Lifetime},
    program::Program,
    relay::{self, FollowArgs, Job},
    run::{self as running, RunArgs},
    stock_quinn,
    tcp::{self, Encryption},
};
use anyhow::{Context, Result, bail};
use clap::Subcommand;
use std::{net::SocketAddr, os::unix::process::CommandExt};
use tensor_relay_client::Ticket;
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
    /// Measures the compression ratio and the speed of each codec on your own tensors.
    #[command(after_help = codecs::EXAMPLES)]
    Codecs(CodecsArgs),
    /// Measures users' workloads, on this machine or across nodes.
    #[command(after_help = running::EXAMPLES)]
    Run(Box<RunArgs>),
    /// Runs the side whose arguments a `run` on another host sends, as JSON on standard input.
    #[command(name = SIDE, hide = true)]
    Side,
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
        /// The ticket that the server printed.
        #[arg(long)]
        ticket: Ticket,
        /// The options of every receiver.
        #[command(flatten)]
        args: ReceiveArgs,
        /// The number of lanes; 0 for automatic.
        #[arg(long, default_value_t = 1)]
        lanes: u32,
    },
    /// Publishes the versions of a job, each round when its receivers have subscribed.
    Publish {
        /// The options of every server.
        #[command(flatten)]
        args: ServeArgs,
        /// The job.
        #[arg(long)]
        job: Job,
    },
    /// Receives the versions of a job.
    Follow(FollowArgs),
}

/// The sides of bare quinn.
#[derive(Debug, Subcommand)]
pub enum StockQuinn {
    /// Holds the payload and sends it once a round.
    Serve(ServeArgs),
    /// Receives the payload once a round.
    Receive {
        /// The address of the server.
        #[arg(long)]
        connect: SocketAddr,
        /// The options of every receiver.
        #[command(flatten)]
        args: ReceiveArgs,
    },
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
        /// The address of the server.
        #[arg(long)]
        connect: SocketAddr,
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
        Command::Side => run_side(&this),
        Command::Relay(Relay::Serve { args, payload }) => {
            until_interrupted(relay::serve(args, payload)).await
        }
        Command::Relay(Relay::Receive { ticket, args, lanes }) => relay::receive(ticket, args, lanes).await,
        Command::Relay(Relay::Publish { args, job }) => relay::publish(args, job).await,
        Command::Relay(Relay::Follow(args)) => relay::follow(args).await,
        Command::StockQuinn(StockQuinn::Serve(args)) => stock_quinn::serve(args).await,
        Command::StockQuinn(StockQuinn::Receive { connect, args }) => {
            stock_quinn::receive(connect, args).await
        }
        Command::Codecs(args) => codecs::run(&args),
        Command::DelayBridge(args) => delay::run(args).await,
        Command::Tcp(Tcp::Serve { args, encryption }) => tcp::serve(args, encryption).await,
        Command::Tcp(Tcp::Receive { connect, args, encryption }) => {
            tcp::receive(connect, args, encryption).await
        }
    }
}

/// Replaces this process by the side whose arguments are the first line of standard input. The input stays open: the
/// side ends with it.
fn run_side(this: &Program) -> Result<()> {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    let arguments: Vec<String> = serde_json::from_str(&line).context("standard input has no arguments")?;
    let error = this.command().as_std_mut().arg(EXIT_ON_STDIN_EOF).args(arguments).exec();
    Err(error).context("cannot start this program again")
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
