//! The command line `tensor-relay`: as a program (`main.rs`), and in the Python package, which brings it as a command.
//!
//! This crate owns the terminal. Words become plain arguments in `args`; each command is a file; what a failure means
//! for the shell is decided in `exit` alone. Data goes to stdout, everything else to stderr.

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

pub use admin::{AdminPort, Consumer, FollowedTopic};

use args::Command;
use config::Layers;
use exit::Exit;
use std::{ffi::OsString, io::Write};
use tensor_relay_bench::program::Program;

/// Does what a command line says, whose first word is the program's name, and gives the exit code.
///
/// It is meant for a process of its own: commands listen for signals, write to stdout and stderr, and may end the process
/// when stdout cannot be written. `program` are the words that start this program again, which `demo` and `bench` do for
/// their parts; `None` is the file of this process.
pub fn run(words: &[OsString], program: Option<&[OsString]>) -> u8 {
    let done = config::read(words).and_then(|(args, layers)| {
        log::to_stderr(args.verbose, args.log_format)?;
        descriptors::reserve(&args.command)?;
        carry_out(args.command, &layers, program)
    });
    let code = done.map_or_else(report, |exit| exit as u8);
    // Whoever reads it may be gone, and then there is nobody to tell. A program does this by itself when it ends; a library
    // does not.
    let _ = std::io::stdout().flush();
    code
}

/// Tells of a failure on stderr, or of help on stdout, and gives its exit code.
fn report(error: anyhow::Error) -> u8 {
    match error.downcast::<clap::Error>() {
        // Help is such an error too; clap knows what goes where.
        Ok(words) => {
            let _ = words.print();
            u8::try_from(words.exit_code()).unwrap_or(Exit::Failed as u8)
        }
        Err(error) => {
            log::say!("error: {}", exit::message_of(&error));
            exit::code_of(&error) as u8
        }
    }
}

/// The program to start again.
fn program_of(words: Option<&[OsString]>) -> anyhow::Result<Program> {
    match words.and_then(Program::of) {
        Some(program) => Ok(program),
        None => Program::current(&[]),
    }
}

/// One thread runs the network: a lane is one task, and a second thread costs more in hand-overs than it saves. What
/// burns CPU or waits for disks runs on the runtime's blocking threads beside it.
fn carry_out(command: Command, layers: &Layers, program: Option<&[OsString]>) -> anyhow::Result<Exit> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let code = runtime.block_on(async {
        match command {
            Command::Serve(args) => serve::run(args).await,
            Command::Publish(args) => publish::run(args).await,
            Command::Subscribe(args) => subscribe::run(args).await,
            Command::List(args) => list::run(args).await,
            Command::Demo(args) => demo::run(args, &program_of(program)?).await,
            Command::Devices(args) => devices::run(&args).await,
            Command::Doctor(args) => doctor::run(args).await,
            Command::Bench(args) => bench::run(args, program_of(program)?).await,
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
