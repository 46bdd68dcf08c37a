//! The command line `tensor-relay`: as a program (`main.rs`), and as a command of the Python package.
//!
//! This crate owns the terminal. `args` defines the arguments, each command has its own file, and only `exit`
//! maps errors to exit codes. Data is written to stdout, everything else to stderr.

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
mod engine_caches;
mod engine_facts;
mod exit;
mod hub;
mod keys;
mod list;
mod log;
mod offered;
mod orphans;
mod output;
mod publish;
mod relay;
mod secret_file;
mod serve;
mod sharing;
mod signals;
mod subscribe;
mod table;
mod ticket;
mod tickets;
mod units;

pub use admin::{AdminPort, Consumer, FollowedTopic};
pub use args::parse_engine_cache;
pub use engine_facts::{PYTHON_PROGRAM, fact_doubts, machine_facts};
pub use sharing::{HostOptions, OfferOptions, SharedTopic, Sharing, SharingOptions, SwarmOptions};

use args::Command;
use config::Layers;
use exit::Exit;
use std::{ffi::OsString, io::Write};
use tensor_relay_bench::program::Program;
use tensor_relay_server::Token;

/// Runs a command line, whose first argument is the program's name, and returns the exit code.
///
/// Requires a dedicated process: commands handle signals, write to stdout and stderr, and may end the process if
/// stdout cannot be written. `program` is the command that starts this program again, for the child processes of
/// `bench`; with `None`, the executable of this process is started.
pub fn run(argv: &[OsString], program: Option<&[OsString]>) -> u8 {
    let result = config::read(argv).and_then(|(args, layers)| {
        log::to_stderr(args.verbose, args.log_format)?;
        descriptors::reserve(&args.command)?;
        run_command(args.command, &layers, program)
    });
    let code = result.map_or_else(report, |exit| exit as u8);
    output::flush(); // Rust flushes stdout when a Rust `main` returns, but a Python process has none.
    code
}

/// Prints an error on stderr, or help on stdout, and returns the exit code.
fn report(error: anyhow::Error) -> u8 {
    match error.downcast::<clap::Error>() {
        // clap returns help as an error too, and chooses stdout or stderr.
        Ok(error) => {
            let text = error.render().to_string();
            let redacted = Token::redact(&text);
            let _ = match redacted == text {
                true => error.print(),
                false => std::io::stderr().write_all(redacted.as_bytes()),
            };
            u8::try_from(error.exit_code()).unwrap_or(Exit::Failed as u8)
        }
        Err(error) => {
            log::message!("error: {}", Token::redact(&exit::message_of(&error)));
            exit::code_of(&error) as u8
        }
    }
}

/// The program that child processes run: `argv`, or the executable of this process.
fn child_program(argv: Option<&[OsString]>) -> anyhow::Result<Program> {
    match argv.and_then(Program::of) {
        Some(program) => Ok(program),
        None => Program::current(&[]),
    }
}

/// Runs a command on a runtime with one thread for the network: a lane is one task, and handing it over between two
/// threads costs more than a second thread saves. CPU-bound work and disk waits run on the runtime's blocking threads.
fn run_command(command: Command, layers: &Layers, program: Option<&[OsString]>) -> anyhow::Result<Exit> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let code = runtime.block_on(async {
        match command {
            Command::Serve(args) => serve::run(*args).await,
            Command::Publish(args) => publish::run(args).await,
            Command::Relay(args) => relay::run(*args).await,
            Command::Subscribe(args) => subscribe::run(*args).await,
            Command::List(args) => list::run(args).await,
            Command::Hub(args) => hub::run(*args).await,
            Command::Demo(args) => demo::run(args).await,
            Command::Devices(args) => devices::run(&args).await,
            Command::Doctor(args) => doctor::run(args).await,
            Command::Bench(args) => bench::run(args, child_program(program)?).await,
            Command::Config(args) => config::run(&args, layers),
            Command::Keys(command) => keys::run(command),
            Command::Tickets(command) => tickets::run(command),
            Command::Acl(command) => acl::run(command),
            Command::Completions(args) => completions::run(&args),
        }
    });
    // A blocking thread may still wait for a disk or for stdin; the process does not wait for that thread.
    runtime.shutdown_background();
    device::close_all();
    code
}
