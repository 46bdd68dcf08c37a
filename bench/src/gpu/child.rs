//! Runs a part of the suite in a process of its own, with a deadline.

use super::line::Line;
use crate::{process::Process, program::Program};
use anyhow::{Result, bail};
use std::{ffi::OsString, time::Duration};
use tokio::time::timeout;

/// The output of a part that has ended, successfully or not.
#[derive(Debug, Default)]
pub(super) struct PartOutput {
    pub(super) lines: Vec<Line>,
    /// The reason of a failure.
    pub(super) failure: Option<String>,
}

/// Runs this program with `arguments` until it exits, or kills it at the deadline. Never fails and never hangs: a
/// failure is part of the output. `name` is for messages.
pub(super) async fn run(name: &str, arguments: Vec<OsString>, deadline: Duration) -> PartOutput {
    let mut output = PartOutput::default();
    let result = read_output(name, arguments, deadline, &mut output.lines).await;
    output.failure = result.err().map(|error| format!("{error:#}"));
    output
}

async fn read_output(
    name: &str,
    arguments: Vec<OsString>,
    deadline: Duration,
    output: &mut Vec<Line>,
) -> Result<()> {
    let mut command = Program::current(&[])?.command();
    command.args(arguments);
    let mut process = Process::start(name.into(), command)?;
    let all = async {
        while let Some(line) = process.next_line().await? {
            // Lines that are not JSON, e.g. output of a library, become notes.
            let note = || Line::Note(line.clone());
            output.push(serde_json::from_str(&line).unwrap_or_else(|_| note()));
        }
        anyhow::Ok(())
    };
    let Ok(read) = timeout(deadline, all).await else {
        bail!("it had not ended after {} s and was killed{}", deadline.as_secs(), process.kill().await)
    };
    read?;
    match process.exit_status().await {
        Some(status) if status.success() => Ok(()),
        _ => bail!("it {}", process.end_reason().await),
    }
}
