//! `tensor-relay`: streams tensors between containers over QUIC.
//!
//! This room owns the terminal. Words become plain arguments in [`args`]; each command is a file; what a failure means
//! for the shell is decided in [`exit`] alone. Data goes to stdout, everything else to stderr.

#![forbid(unsafe_code)]

mod acl;
mod args;
mod bar;
mod bench;
mod codecs;
mod completions;
mod config;
mod demo;
mod descriptors;
mod device;
mod devices;
mod exit;
mod keys;
mod list;
mod man;
mod offered;
mod publish;
mod serve;
mod signals;
mod subscribe;
mod ticket;
mod tickets;
mod units;

use args::Command;
use config::Layers;
use exit::UsageError;
use std::{ffi::OsString, io::IsTerminal, process::ExitCode};
use tracing::{Level, Metadata};
use tracing_subscriber::{EnvFilter, filter::filter_fn, prelude::*};

/// QUIC allocates 64 KiB for each batch that comes, and gives it back a moment later. glibc returns such memory to the
/// system and faults it in again: measured, that is a tenth of all CPU time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let words: Vec<OsString> = std::env::args_os().collect();
    let done = config::read(&words).and_then(|(args, layers)| {
        log_to_stderr(args.verbose)?;
        descriptors::reserve(&args.command)?;
        run(args.command, &layers)
    });
    done.unwrap_or_else(|error| match error.downcast::<clap::Error>() {
        // Help is such an error too; clap knows what goes where.
        Ok(words) => words.exit(),
        Err(error) => {
            eprintln!("error: {}", exit::message_of(&error));
            exit::code_of(&error).into()
        }
    })
}

/// One thread runs the network: a lane is one task, and a second thread costs more in hand-overs than it saves. What
/// burns CPU or waits for disks runs on the runtime's blocking threads beside it.
fn run(command: Command, layers: &Layers) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let code = runtime.block_on(async {
        match command {
            Command::Serve(args) => serve::run(args).await,
            Command::Publish(args) => publish::run(args).await,
            Command::Subscribe(args) => subscribe::run(args).await,
            Command::List(args) => list::run(args).await,
            Command::Demo(args) => demo::run(args).await,
            Command::Devices(args) => devices::run(&args).await,
            Command::Bench(args) => bench::run(args).await,
            Command::Config(args) => config::run(&args, layers),
            Command::Keys(command) => keys::run(command),
            Command::Tickets(command) => tickets::run(command),
            Command::Acl(command) => acl::run(command),
            Command::Completions(args) => completions::run(&args),
            Command::Man(args) => man::run(&args),
            Command::DemoProducer(args) => demo::producer::run(args).await,
            Command::DemoConsumer(args) => demo::consumer::run(args).await,
        }
    });
    // A blocking thread may still wait for a disk or for stdin; the process need not wait for it.
    runtime.shutdown_background();
    device::close_all();
    code
}

/// The variable that says what is logged.
const LOG: &str = "TENSOR_RELAY_LOG";

/// Warnings are shown by default; `-v` adds information, `-vv` everything; `TENSOR_RELAY_LOG` overrides both.
fn log_to_stderr(verbose: u8) -> Result<(), UsageError> {
    let default = match verbose {
        0 => "warn",
        1 => "info",
        _ => "debug",
    };
    let filter = match config::variable::value_of(LOG) {
        Some(filter) => log_filter(&filter.to_string_lossy())?,
        None => EnvFilter::new(default),
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none())
        .with_target(false)
        .finish()
        .with(filter_fn(shows_no_secret))
        .init();
    Ok(())
}

fn log_filter(text: &str) -> Result<EnvFilter, UsageError> {
    EnvFilter::try_new(text).map_err(|why| {
        UsageError(format!(
            "the environment variable {LOG} cannot be {text:?}: {why}; write a level (error, warn, info, debug, trace), or levels \
             by module, such as `info,tensor_relay_client=debug`"
        ))
    })
}

/// Whether something may be logged, whatever the filter says. On the level `trace`, QUIC prints every frame with what is in
/// it; those with a stateless reset token let any reader of the log end the connection.
fn shows_no_secret(metadata: &Metadata<'_>) -> bool {
    *metadata.level() != Level::TRACE || !metadata.target().starts_with("quinn_proto")
}
