//! The program `tensor-relay`, run on this device as a user runs it.

use super::Job;
use crate::gpu::engine::DeviceArg;
use anyhow::{Context, Result};
use std::{path::PathBuf, process::Stdio, time::Duration};
use tokio::{process::Command, time::timeout};

pub(super) const ABOUT: &str = "\
`tensor-relay devices`, and `tensor-relay demo` from GPU to GPU, which checks every byte. This part needs \
the program beside `tensor-relay-bench`.";

pub(super) async fn run(job: Job) -> Result<()> {
    let Some(program) = find_program()? else {
        job.printer()
            .note("The program tensor-relay is not in the folder of this program, so it was not run.");
        return Ok(());
    };
    if job.device == DeviceArg::Host {
        job.printer().note("The program has no host engine, so it was not run.");
        return Ok(());
    }
    let (device, size) = (format!("--device={}", job.device), format!("--size={}B", job.bytes));
    let demo = ["demo", &device, &size, "--versions=3", "--small=50"];
    for arguments in [&["devices"][..], &demo] {
        let outcome = run_program(&program, arguments).await;
        job.printer().check(format!("tensor-relay {}", arguments[0]), outcome);
    }
    Ok(())
}

/// The path of `tensor-relay` in the folder of this program; `None` if it is not there.
fn find_program() -> Result<Option<PathBuf>> {
    let this = std::env::current_exe().context("cannot find this program")?;
    let program = this.with_file_name("tensor-relay");
    Ok(program.is_file().then_some(program))
}

/// The standard output of the program if it succeeds in time; otherwise its status, standard error and standard output.
async fn run_program(program: &PathBuf, arguments: &[&str]) -> Result<String, String> {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).kill_on_drop(true);
    let output = match timeout(PROGRAM_TIMEOUT, command.output()).await {
        Ok(Ok(output)) => output,
        Ok(Err(error)) => return Err(format!("it cannot be started: {error}")),
        Err(_) => return Err(format!("it had not ended after {PROGRAM_TIMEOUT:?} and was killed")),
    };
    let stdout = String::from_utf8_lossy(&output.stdout).trim().replace('\n', " / ");
    if output.status.success() {
        return Ok(stdout);
    }
    let stderr = String::from_utf8_lossy(&output.stderr).trim().replace('\n', " / ");
    Err(format!("{}: {stderr} / {stdout}", output.status))
}

const PROGRAM_TIMEOUT: Duration = Duration::from_secs(20);
