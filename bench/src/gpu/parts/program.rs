//! The program `tensor-relay`, run on this device as a user runs it.

use super::Job;
use crate::gpu::{
    child::{self, Output},
    engine::DeviceArg,
    line,
};
use anyhow::{Context, Result};
use std::{process::Stdio, time::Duration};
use tokio::process::Command;

pub(super) const ABOUT: &str = "\
`tensor-relay devices`, and `tensor-relay demo` from GPU to GPU, which checks every byte. This part needs \
the program beside `tensor-relay-bench`.";

pub(super) async fn run(job: Job) -> Result<()> {
    let this = std::env::current_exe().context("cannot find this program")?;
    let program = this.with_file_name("tensor-relay");
    if !program.is_file() || job.device == DeviceArg::Host {
        let reason = "It was not run: it is not in the folder of this program, or has no host engine.";
        line::note(reason);
        return Ok(());
    }
    let (device, size) = (format!("--device={}", job.device), format!("--size={}B", job.bytes));
    let demo = ["demo", &device, &size, "--versions=3", "--small=50"];
    for arguments in [&["devices"][..], &demo] {
        let mut command = Command::new(&program);
        command.args(arguments);
        let name = format!("tensor-relay {}", arguments[0]);
        let output: Output = child::run(&name, command, Stdio::null(), PROGRAM_TIMEOUT).await;
        let text = output.text();
        line::check(name, output.failure.map_or(Ok(text), Err));
    }
    Ok(())
}

const PROGRAM_TIMEOUT: Duration = Duration::from_secs(20);
