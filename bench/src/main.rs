//! `tensor-relay-bench`: measures tensor-relay, and compares it with other programs.

#![forbid(unsafe_code)]

use anyhow::Result;
use clap::{Parser, Subcommand};
use tensor_relay_bench::{command, process::Lifetime, program::Program};
#[cfg(feature = "gpu")]
use tensor_relay_bench::{command::until_interrupted, contender, gpu};

/// The allocator of `tensor-relay`; the contenders `stock-quinn` and `tcp` use it too.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Measures tensor-relay, and compares it with other programs.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    lifetime: Lifetime,
}

/// The commands of `tensor-relay bench`, and the GPU suite, which only this program has because it uses internals.
#[derive(Subcommand)]
enum Command {
    #[command(flatten)]
    Shared(command::Command),
    /// Measures all that tensor-relay does with a GPU, and writes the results to files.
    #[cfg(feature = "gpu")]
    Gpu(gpu::GpuArgs),
    /// Runs one part of the suite, in a process that `gpu` started.
    #[cfg(feature = "gpu")]
    #[command(hide = true)]
    GpuPart {
        part: gpu::Part,
        #[arg(value_parser = contender::from_json::<gpu::Job>)]
        job: gpu::Job,
    },
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let Cli { command, lifetime } = Cli::parse();
    lifetime.begin();
    match command {
        Command::Shared(command) => command::run(command, Program::current(&[])?).await,
        #[cfg(feature = "gpu")]
        Command::Gpu(args) => until_interrupted(gpu::run(args)).await,
        #[cfg(feature = "gpu")]
        Command::GpuPart { part, job } => gpu::run_part(part, job).await,
    }
}
