//! [`Child`]: a child process of the demo, which sends events line by line.

use anyhow::{Context, bail};
use serde::de::DeserializeOwned;
use std::{process::Stdio, time::Duration};
use tensor_relay_bench::program::Program;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    process::{ChildStdin, ChildStdout, Command},
};

/// A process that writes events to stdout and reads commands from stdin. Dropping the child kills the process.
pub(crate) struct Child {
    name: &'static str,
    process: tokio::process::Child,
    id: u32,
    commands: Option<ChildStdin>,
    events: Lines<BufReader<ChildStdout>>,
    timeout: Duration,
}

impl Child {
    /// Starts `program` with `args`. The process inherits stderr. `timeout` is the deadline for each event, and for the
    /// end of the process.
    pub(crate) fn start(
        name: &'static str,
        program: &Program,
        args: Vec<String>,
        timeout: Duration,
    ) -> anyhow::Result<Self> {
        let mut process = Command::new(program.executable())
            .args(program.lead())
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot start the {name}"))?;
        let (commands, events) = (process.stdin.take(), process.stdout.take().context("stdout is piped")?);
        let id = process.id().unwrap_or(0);
        Ok(Self { name, process, id, commands, events: BufReader::new(events).lines(), timeout })
    }

    /// The process ID.
    pub(crate) fn id(&self) -> u32 {
        self.id
    }

    /// Waits for the next event.
    pub(crate) async fn next<E: DeserializeOwned>(&mut self) -> anyhow::Result<E> {
        let line = tokio::time::timeout(self.timeout, self.events.next_line()).await;
        let line = line
            .with_context(|| format!("the {} sent no event for {} s", self.name, self.timeout.as_secs()))?;
        match line? {
            Some(line) => serde_json::from_str(&line)
                .with_context(|| format!("the {} sent an invalid event: {line:?}", self.name)),
            None => {
                let status = self.process.wait().await?;
                bail!("the {} ended ({status}); its message is above", self.name)
            }
        }
    }

    /// Sends a command, which is one line.
    pub(crate) async fn send(&mut self, command: &str) -> anyhow::Result<()> {
        let commands = self.commands.as_mut().context("the stdin of the process is closed")?;
        let written = commands.write_all(format!("{command}\n").as_bytes()).await;
        written.with_context(|| format!("the {} closed its stdin; its message is above", self.name))
    }

    /// Closes the stdin of the process, at which the process ends, and waits for that.
    pub(crate) async fn end(mut self) -> anyhow::Result<()> {
        drop(self.commands.take());
        let status = tokio::time::timeout(self.timeout, self.process.wait()).await;
        let status = status.with_context(|| {
            format!("the {} did not end within {} s", self.name, self.timeout.as_secs())
        })??;
        match status.success() {
            true => Ok(()),
            false => bail!("the {} failed ({status}); its message is above", self.name),
        }
    }
}
