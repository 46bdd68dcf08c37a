//! Runs a program in a process of its own, with a deadline: a part of the suite, or one that a part needs.

use super::{
    line::Line,
    parts::{Job, Part},
};
use crate::{
    process::{EXIT_ON_STDIN_EOF, Process},
    program::Program,
};
use anyhow::{Result, bail};
use std::{process::Stdio, time::Duration};
use tokio::{process::Command, time::timeout};

/// The output of a process that has ended, successfully or not.
#[derive(Debug, Default)]
pub(super) struct Output {
    pub(super) lines: Vec<Line>,
    /// The reason of a failure.
    pub(super) failure: Option<String>,
}

impl Output {
    /// The output of a process that was not started, for this `reason`.
    pub(super) fn failed(reason: impl Into<String>) -> Self {
        Self { lines: vec![], failure: Some(reason.into()) }
    }

    /// All notes as one line: what a program printed that is no part of the suite.
    pub(super) fn text(&self) -> String {
        let note =
            |line: &Line| if let Line::Note(note) = line { Some(note.trim().to_owned()) } else { None };
        self.lines.iter().filter_map(note).collect::<Vec<_>>().join(" / ")
    }
}

/// Runs `part` with the settings in `job` in a process of its own.
pub(super) async fn run_part(part: Part, job: &Job, deadline: Duration) -> Output {
    match part_command(&[], &[EXIT_ON_STDIN_EOF], part, job) {
        Ok(command) => run(part.name(), command, Stdio::piped(), deadline).await,
        Err(error) => Output::failed(format!("{error:#}")),
    }
}

/// The command that runs `part` of this program with its `options`, behind the words of `prefix`.
pub(super) fn part_command(prefix: &[&str], options: &[&str], part: Part, job: &Job) -> Result<Command> {
    let this = Program::current(&[])?;
    let mut command = match prefix {
        [] => this.command(),
        [program, arguments @ ..] => {
            let mut command = Command::new(program);
            command.args(arguments).args(this.words());
            command
        }
    };
    command
        .args(options)
        .args(["gpu-part", part.name()])
        .arg(serde_json::to_string(job)?);
    Ok(command)
}

/// Runs `command` until it exits, or kills it at the deadline. Never fails and never hangs: a failure is part of the
/// output. `name` is for messages.
pub(super) async fn run(name: &str, command: Command, stdin: Stdio, deadline: Duration) -> Output {
    let mut output = Output::default();
    let result = read_output(name, command, stdin, deadline, &mut output.lines).await;
    output.failure = result.err().map(|error| format!("{error:#}"));
    output
}

async fn read_output(
    name: &str,
    command: Command,
    stdin: Stdio,
    deadline: Duration,
    output: &mut Vec<Line>,
) -> Result<()> {
    let mut process = Process::start(name.into(), command, stdin)?;
    let all = async {
        while let Some(line) = process.next_line().await? {
            // Lines that are not JSON, e.g. output of a library, become notes.
            output.push(serde_json::from_str(&line).unwrap_or(Line::Note(line)));
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
