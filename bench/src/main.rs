//! `tensor-relay-bench`: measures tensor-relay, and compares it with other programs.

#![forbid(unsafe_code)]

use anyhow::Result;
use clap::{Parser, Subcommand};
#[cfg(feature = "gpu")]
use tensor_relay_bench::{command::until_interrupted, gpu};
use tensor_relay_bench::{
    command::{self, BenchArgs},
    process::Lifetime,
    program::Program,
};

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
    GpuPart { part: gpu::Part, job: gpu::Job },
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let Cli { command, lifetime } = Cli::parse();
    match command {
        Command::Shared(command) => {
            command::run(BenchArgs { command, lifetime }, Program::current(&[])?).await
        }
        #[cfg(feature = "gpu")]
        Command::Gpu(args) => {
            lifetime.begin();
            until_interrupted(gpu::run(args)).await
        }
        #[cfg(feature = "gpu")]
        Command::GpuPart { part, job } => {
            lifetime.begin();
            gpu::run_part(part, job).await
        }
    }
}
