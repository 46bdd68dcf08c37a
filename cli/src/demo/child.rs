//! A child process of this program, read line by line.

use anyhow::{Context, bail};
use serde::de::DeserializeOwned;
use std::{process::Stdio, time::Duration};
use tensor_relay_bench::program::Program;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    process::{ChildStdin, ChildStdout, Command},
};

/// A process that writes events to stdout and reads words from stdin. It is killed when this is dropped.
pub(crate) struct Child {
    name: &'static str,
    process: tokio::process::Child,
    id: u32,
    words: Option<ChildStdin>,
    events: Lines<BufReader<ChildStdout>>,
    patience: Duration,
}

impl Child {
    /// Starts `program` with `words`, with a deadline of `patience` for each event. Its stderr is ours.
    pub(crate) fn start(
        name: &'static str,
        program: &Program,
        words: Vec<String>,
        patience: Duration,
    ) -> anyhow::Result<Self> {
        let mut process = Command::new(program.executable())
            .args(program.lead())
            .args(words)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot start the {name}"))?;
        let (words, events) = (process.stdin.take(), process.stdout.take().context("stdout was piped")?);
        let id = process.id().unwrap_or(0);
        Ok(Self { name, process, id, words, events: BufReader::new(events).lines(), patience })
    }

    /// The process' id.
    pub(crate) fn id(&self) -> u32 {
        self.id
    }

    /// Waits for the next event.
    pub(crate) async fn next<E: DeserializeOwned>(&mut self) -> anyhow::Result<E> {
        let line = tokio::time::timeout(self.patience, self.events.next_line()).await;
        let line = line
            .with_context(|| format!("the {} said nothing for {} s", self.name, self.patience.as_secs()))?;
        match line? {
            Some(line) => {
                serde_json::from_str(&line).with_context(|| format!("the {} said {line:?}", self.name))
            }
            None => {
                let status = self.process.wait().await?;
                bail!("the {} ended ({status}); its message is above", self.name)
            }
        }
    }

    /// Writes a line.
    pub(crate) async fn say(&mut self, line: &str) -> anyhow::Result<()> {
        let words = self.words.as_mut().context("the process was told to end")?;
        let written = words.write_all(format!("{line}\n").as_bytes()).await;
        written.with_context(|| format!("the {} hears no more; its message is above", self.name))
    }

    /// Asks the process to end, and waits for it.
    pub(crate) async fn end(mut self) -> anyhow::Result<()> {
        drop(self.words.take());
        let status = tokio::time::timeout(self.patience, self.process.wait()).await;
        let status = status.with_context(|| format!("the {} did not end", self.name))??;
        match status.success() {
            true => Ok(()),
            false => bail!("the {} failed ({status}); its message is above", self.name),
        }
    }
}
