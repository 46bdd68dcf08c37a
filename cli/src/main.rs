//! `tensor-relay`: streams tensors between containers over QUIC.
//!
//! This room owns the terminal. Words become plain arguments in [`args`]; each command is a file; what a failure means
//! for the shell is decided in [`exit`] alone. Data goes to stdout, everything else to stderr.

#![forbid(unsafe_code)]

mod acl;
mod admin;
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
mod doctor;
mod exit;
mod keys;
mod list;
mod log;
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
use std::{ffi::OsString, process::ExitCode};

/// QUIC allocates 64 KiB for each batch that comes, and gives it back a moment later. glibc returns such memory to the
/// system and faults it in again: measured, that is a tenth of all CPU time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let words: Vec<OsString> = std::env::args_os().collect();
    let done = config::read(&words).and_then(|(args, layers)| {
        log::to_stderr(args.verbose, args.log_format)?;
        descriptors::reserve(&args.command)?;
        run(args.command, &layers)
    });
    done.unwrap_or_else(|error| match error.downcast::<clap::Error>() {
        // Help is such an error too; clap knows what goes where.
        Ok(words) => words.exit(),
        Err(error) => {
            log::say!("error: {}", exit::message_of(&error));
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
            Command::Doctor(args) => doctor::run(args).await,
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
