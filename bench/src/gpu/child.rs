//! A part of the suite in a process of its own, with a deadline.

use super::line::Line;
use crate::{process::Process, program::Program};
use anyhow::{Result, bail};
use std::{ffi::OsString, time::Duration};
use tokio::time::timeout;

/// What a part left: all that it said before it ended, however it ended.
#[derive(Debug, Default)]
pub(super) struct Said {
    pub(super) lines: Vec<Line>,
    /// Why it did not end well, if it did not.
    pub(super) failure: Option<String>,
}

/// Runs this program with `arguments` until it ends, or until the deadline has passed and it is killed. Never fails and
/// never hangs: what goes wrong is part of what was said. `name` is for messages.
pub(super) async fn run(name: &str, arguments: Vec<OsString>, deadline: Duration) -> Said {
    let mut said = Said::default();
    let listened = listen(name, arguments, deadline, &mut said.lines).await;
    said.failure = listened.err().map(|error| format!("{error:#}"));
    said
}

async fn listen(
    name: &str,
    arguments: Vec<OsString>,
    deadline: Duration,
    said: &mut Vec<Line>,
) -> Result<()> {
    let mut command = Program::current(&[])?.command();
    command.args(arguments);
    let mut process = Process::start(name.into(), command)?;
    // It ends when its standard input is closed.
    let (_stdin, mut lines) = process.split()?;
    let all = async {
        while let Some(line) = lines.next_line().await? {
            // A library that prints is no reason to lose what was measured.
            let note = || Line::Note(String::from_utf8_lossy(&line).into_owned());
            said.push(serde_json::from_slice(&line).unwrap_or_else(|_| note()));
        }
        anyhow::Ok(())
    };
    let Ok(read) = timeout(deadline, all).await else {
        bail!("it had not ended after {} s and was killed{}", deadline.as_secs(), process.kill().await)
    };
    read?;
    match process.wait().await {
        Some(status) if status.success() => Ok(()),
        _ => bail!("it {}", process.obituary().await),
    }
}
