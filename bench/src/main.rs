//! `tensor-relay-bench`: measures tensor-relay beside its rivals.

#![forbid(unsafe_code)]

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand};
#[cfg(feature = "gpu")]
use tensor_relay_bench::gpu;
use tensor_relay_bench::{
    contender::{ReceiveArgs, ServeArgs},
    raw, relay,
    stock_quinn::{self, Congestion},
};
use tokio::signal::unix::{SignalKind, signal};

/// Measures tensor-relay beside its rivals.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Ends when standard input closes: how the harness's processes end with it.
    #[arg(long, hide = true)]
    end_with_stdin: bool,
}

#[derive(Subcommand)]
enum Command {
    /// Compares raw speed, in pairs.
    Raw(raw::RawArgs),
    /// Measures a GPU's way through tensor-relay, all of it, and writes it down.
    #[cfg(feature = "gpu")]
    Gpu(gpu::GpuArgs),
    /// One part of that, in a process that `gpu` started.
    #[cfg(feature = "gpu")]
    #[command(hide = true)]
    GpuPart {
        part: gpu::Part,
        #[command(flatten)]
        job: gpu::Job,
    },
    /// One side of tensor-relay.
    #[command(subcommand)]
    Relay(Relay),
    /// One side of bare quinn. It accepts any certificate: for test networks only.
    #[command(subcommand)]
    StockQuinn(StockQuinn),
}

#[derive(Subcommand)]
enum Relay {
    /// Holds bytes and sends them.
    Serve {
        #[command(flatten)]
        args: ServeArgs,
        /// How many tensors the bytes are.
        #[arg(long, default_value_t = 1)]
        tensors: u32,
    },
    /// Receives them, several times.
    Receive {
        #[command(flatten)]
        args: ReceiveArgs,
        /// Over how many lanes.
        #[arg(long, default_value_t = 1)]
        lanes: u32,
    },
}

#[derive(Subcommand)]
enum StockQuinn {
    /// Holds bytes and sends them.
    Serve {
        #[command(flatten)]
        args: ServeArgs,
        /// The congestion controller, which is the sender's to choose.
        #[arg(long, value_enum, default_value_t)]
        congestion: Congestion,
    },
    /// Receives them, several times.
    Receive(ReceiveArgs),
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let cli = Cli::parse();
    if cli.end_with_stdin {
        end_with_stdin();
    }
    match cli.command {
        Command::Raw(args) => tokio::select! {
            done = raw::run(args) => done,
            error = interrupted() => error,
        },
        #[cfg(feature = "gpu")]
        Command::Gpu(args) => tokio::select! {
            done = gpu::run(args) => done,
            error = interrupted() => error,
        },
        #[cfg(feature = "gpu")]
        Command::GpuPart { part, job } => gpu::run_part(part, job).await,
        Command::Relay(Relay::Serve { args, tensors }) => relay::serve(args, tensors).await,
        Command::Relay(Relay::Receive { args, lanes }) => relay::receive(args, lanes).await,
        Command::StockQuinn(StockQuinn::Serve { args, congestion }) => {
            stock_quinn::serve(args, congestion).await
        }
        Command::StockQuinn(StockQuinn::Receive(args)) => stock_quinn::receive(args).await,
    }
}

/// Waits for a signal to stop, so that what the harness started is dropped and thereby ended.
async fn interrupted() -> Result<()> {
    let context = "cannot listen for signals";
    let mut interrupt = signal(SignalKind::interrupt()).context(context)?;
    let mut terminate = signal(SignalKind::terminate()).context(context)?;
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    bail!("interrupted")
}

/// Ends this process when its standard input closes, whatever it is doing.
fn end_with_stdin() {
    std::thread::spawn(|| {
        let ended = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        std::process::exit(i32::from(ended.is_err()));
    });
}
