//! A process that the harness starts: one of this program, or a peer.

use crate::wire::{LINE_MAX_BYTES, Lines, WireError};
use anyhow::{Context, Result, bail};
use serde::de::DeserializeOwned;
use std::{
    collections::VecDeque,
    process::{ExitStatus, Stdio},
    time::Duration,
};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, ChildStderr, ChildStdin, ChildStdout, Command},
    task::JoinHandle,
    time::timeout,
};

/// A running process that prints lines. What it complains is passed on.
///
/// It is killed when this is dropped. If the harness is killed itself, nothing is dropped; but then the pipe to the
/// process's standard input closes, and the process ends by itself, as it was told to ([`Lifetime`]).
pub(crate) struct Process {
    name: String,
    child: Child,
    lines: Option<Lines<ChildStdout>>,
    /// Until they were told.
    last_words: Option<JoinHandle<String>>,
}

impl Process {
    /// Starts `command`. `name` is for messages.
    ///
    /// # Errors
    /// When it cannot be started.
    pub(crate) fn start(name: String, mut command: Command) -> Result<Self> {
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        let mut child = command.spawn().with_context(|| format!("cannot start {name}"))?;
        let stdout = child.stdout.take().expect("its standard output was piped above");
        let stderr = child.stderr.take().expect("its standard error was piped above");
        let last_words = Some(tokio::spawn(pass_on(name.clone(), stderr)));
        Ok(Self { name, child, lines: Some(Lines::new(stdout, LINE_MAX_BYTES)), last_words })
    }

    /// Its standard input and output, to use both at once.
    ///
    /// # Errors
    /// When they are already taken.
    pub(crate) fn split(&mut self) -> Result<(ChildStdin, Lines<ChildStdout>)> {
        let both = self.child.stdin.take().zip(self.lines.take());
        both.with_context(|| format!("somebody speaks to {} already", self.name))
    }

    /// Reads the next line; kills the process when it does not come in time.
    ///
    /// # Errors
    /// When the process ends, or says something else.
    pub(crate) async fn line<T: DeserializeOwned>(&mut self, deadline: Duration) -> Result<T> {
        let name = self.name.clone();
        let lines = self.lines.as_mut().context("somebody else listens to it")?;
        match timeout(deadline, lines.next()).await {
            Ok(Ok(Some(line))) => Ok(line),
            Ok(Ok(None) | Err(WireError::CutOff)) => bail!("{name} {}", self.end_reason().await),
            Ok(Err(error)) => Err(error).with_context(|| format!("cannot understand {name}")),
            Err(_) => bail!("{name} printed nothing for {deadline:?} and was killed{}", self.kill().await),
        }
    }

    /// The error for a process whose output has ended.
    pub(crate) async fn end_reason(&mut self) -> String {
        match self.wait().await {
            Some(status) => format!("ended early, with {status}{}", self.last_words().await),
            None => format!("closed its output and was killed{}", self.kill().await),
        }
    }

    /// Waits for its end, for which its standard input is closed; not for ever.
    pub(crate) async fn wait(&mut self) -> Option<ExitStatus> {
        timeout(END_MAX, self.child.wait()).await.ok()?.ok()
    }

    /// Kills it, and gives its last words. A process in a call of a hung driver may not even die; then it is left behind.
    pub(crate) async fn kill(&mut self) -> String {
        if timeout(END_MAX, self.child.kill()).await.is_err() {
            eprintln!("{} could not be ended", self.name);
        }
        self.last_words().await
    }

    /// Ends the process, whose work is done, and waits until its memory is free for the next one. It is told by the end
    /// of its standard input, so that it can end what it started itself, and killed when it does not heed that.
    pub(crate) async fn end(mut self) {
        if self.wait().await.is_none() {
            self.kill().await;
        }
    }

    /// The end of what it complained, as part of a sentence; nothing, if there was nothing.
    async fn last_words(&mut self) -> String {
        let Some(words) = self.last_words.take() else { return String::new() };
        // A grandchild could keep the pipe open.
        match timeout(END_MAX, words).await {
            Ok(Ok(words)) if !words.is_empty() => format!("; its last words: {words}"),
            _ => String::new(),
        }
    }
}

/// The maximum lifetime of a process.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Lifetime {
    /// Ends when standard input closes: how the harness's processes end with it.
    #[arg(long, hide = true)]
    end_with_stdin: bool,
}

impl Lifetime {
    /// Ends this process when its standard input closes, whatever it is doing, if it was told to.
    pub fn begin(self) {
        if self.end_with_stdin {
            std::thread::spawn(|| {
                let ended = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
                std::process::exit(i32::from(ended.is_err()));
            });
        }
    }
}

/// The option behind [`Lifetime`].
pub(crate) const END_WITH_STDIN: &str = "--end-with-stdin";

/// Passes on what a process called `name` complains, and returns the end of it.
async fn pass_on(name: String, stderr: ChildStderr) -> String {
    let mut lines = BufReader::new(stderr).lines();
    let mut last = VecDeque::new();
    let mut is_backtrace = false;
    while let Ok(Some(line)) = lines.next_line().await {
        eprintln!("{name}: {line}");
        is_backtrace |= line.trim() == "Stack backtrace:";
        if !line.trim().is_empty() && !is_backtrace {
            last.push_back(line.trim().chars().take(LAST_LINE_CHARS).collect::<String>());
        }
        if last.len() > LAST_LINES {
            last.pop_front();
        }
    }
    Vec::from(last).join(" | ")
}

/// The deadline for a process to exit by itself.
const END_MAX: Duration = Duration::from_secs(5);

/// The length of standard error kept for a table.
const LAST_LINES: usize = 6;
const LAST_LINE_CHARS: usize = 300;

#[cfg(test)]
mod tests {
    use super::*;

    /// A process that runs `script` in a shell.
    fn process(script: &str) -> Process {
        let mut shell = Command::new("sh");
        shell.args(["-c", script]);
        Process::start("test".into(), shell).unwrap()
    }

    async fn failure(script: &str, deadline: Duration) -> String {
        format!("{:#}", process(script).line::<u32>(deadline).await.unwrap_err())
    }

    #[tokio::test]
    async fn lines_come_one_by_one() {
        let mut process = process("echo 1; echo 2; exec sleep 60");
        assert_eq!(process.line::<u32>(LONG).await.unwrap(), 1);
        assert_eq!(process.line::<u32>(LONG).await.unwrap(), 2);
        process.end().await;
    }

    #[tokio::test]
    async fn failures_say_who_and_what() {
        let silent = failure("exec sleep 60", Duration::from_millis(20)).await;
        assert!(silent.contains("test printed nothing for 20ms and was killed"), "{silent}");
        let ended = failure("printf 'no memory\n\nStack backtrace:\n 0: main\n' >&2; exit 3", LONG).await;
        assert!(
            ended.contains("test ended early, with exit status: 3; its last words: no memory"),
            "{ended}"
        );
        let garbage = failure("echo hello; exec sleep 60", LONG).await;
        assert!(garbage.contains("it sent \"hello\""), "{garbage}");
    }

    const LONG: Duration = Duration::from_secs(30);
}
