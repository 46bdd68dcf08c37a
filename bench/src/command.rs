//! The subcommands, for `tensor-relay-bench` and for `tensor-relay bench`.

use crate::{
    codecs::{self, CodecsArgs},
    compare::{self, CompareArgs},
    contender::{ConnectArgs, ServeArgs},
    deltas::{self, DeltasArgs},
    harness::SIDE,
    network::delay::{self, DELAY_BRIDGE, DelayArgs},
    process::{EXIT_ON_STDIN_EOF, Lifetime},
    program::Program,
    relay::{self, PayloadArgs, SubscribeArgs},
    run::{self as running, RunArgs},
    stock_quinn, tcp,
};
use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use std::os::unix::process::CommandExt;
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
    Relay(Sides<PayloadArgs, SubscribeArgs>),
    /// One side of bare quinn. It accepts any certificate: for test networks only.
    #[command(subcommand, hide = true)]
    StockQuinn(Sides<ServeArgs, ConnectArgs>),
    /// One side of plain TCP, or of TLS over it.
    #[command(subcommand, hide = true)]
    Tcp(Sides<WithTls<ServeArgs>, WithTls<ConnectArgs>>),
    /// Forwards packets between two network devices with a delay.
    #[command(name = DELAY_BRIDGE, hide = true)]
    DelayBridge(DelayArgs),
}

/// The two sides of a contender.
#[derive(Debug, Subcommand)]
pub enum Sides<Serve: Args, Receive: Args> {
    /// Holds the payload and sends it once a round.
    Serve(Serve),
    /// Receives the payload once a round.
    Receive(Receive),
}

/// The options of a side that can encrypt.
#[derive(Debug, Args)]
pub struct WithTls<Side: Args> {
    /// The options of the side.
    #[command(flatten)]
    side: Side,
    /// Encrypts with TLS 1.3. Any certificate is accepted: for test networks only.
    #[arg(long)]
    tls: bool,
}

/// Runs `command`. `this` is the running program, which is started again for the sides of contenders.
///
/// # Errors
/// The error of the command, or an interrupt.
pub async fn run(command: Command, this: Program) -> Result<()> {
    match command {
        Command::Compare(args) => until_interrupted(compare::run(args, &this)).await,
        Command::Deltas(args) => until_interrupted(deltas::run(args, &this)).await,
        Command::Run(args) => until_interrupted(running::run(*args, &this)).await,
        Command::Side => run_side(&this),
        Command::Relay(Sides::Serve(args)) => until_interrupted(relay::serve(args)).await,
        Command::Relay(Sides::Receive(args)) => relay::receive(args).await,
        Command::StockQuinn(Sides::Serve(args)) => stock_quinn::serve(args).await,
        Command::StockQuinn(Sides::Receive(args)) => stock_quinn::receive(args).await,
        Command::Tcp(Sides::Serve(WithTls { side, tls })) => tcp::serve(side, tls).await,
        Command::Tcp(Sides::Receive(WithTls { side, tls })) => tcp::receive(side, tls).await,
        Command::Codecs(args) => codecs::run(&args),
        Command::DelayBridge(args) => delay::run(args).await,
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
