//! A process that the harness starts: this program again, or a peer's program.

use crate::{
    node::{self, NodeAddress, Token},
    wire::{LINE_MAX_BYTES, Lines, WireError, parse_line},
};
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{
    collections::VecDeque,
    process::{ExitStatus, Stdio},
    time::Duration,
};
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, BufReader},
    net::tcp::OwnedWriteHalf,
    process::{Child, ChildStderr, Command},
    task::JoinHandle,
    time::timeout,
};

/// A running process whose standard output is lines of JSON: a child, whose standard error is forwarded to that of the
/// harness, or a process that a node started.
///
/// Dropping it ends the process. If the harness itself is killed, nothing is dropped, but the process's standard input
/// closes, at which the programs that the harness starts exit by themselves ([`Lifetime`]).
pub(crate) struct Process {
    name: String,
    source: Source,
    lines: Lines<Box<dyn AsyncRead + Send + Unpin>>,
}

enum Source {
    Child {
        child: Child,
        /// Returns the last lines of standard error; `None` once an error has quoted them.
        stderr_tail: Option<JoinHandle<String>>,
    },
    /// The process at the other end of a connection, which is its standard input.
    Node { _input: OwnedWriteHalf },
}

/// The line that a side of a job prints instead of its next one when it fails.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Failure {
    pub(crate) failed: String,
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
        let stderr_tail = Some(tokio::spawn(forward_stderr(name.clone(), stderr)));
        let lines = Lines::new(Box::new(stdout) as _, LINE_MAX_BYTES);
        Ok(Self { name, source: Source::Child { child, stderr_tail }, lines })
    }

    /// Makes the node at `address` start this program with `arguments`. `name` is for messages.
    ///
    /// # Errors
    /// When no node listens there, or it refuses `token`.
    pub(crate) async fn start_at(
        name: &str,
        address: &NodeAddress,
        token: &Token,
        arguments: &[String],
    ) -> Result<Self> {
        let name = format!("{name} ({address})");
        let (lines, input) = node::order(address, token, arguments)
            .await
            .with_context(|| format!("cannot work with {name}"))?;
        Ok(Self { name, source: Source::Node { _input: input }, lines })
    }

    /// Reads the next line; kills the process if it prints none before the deadline.
    ///
    /// # Errors
    /// When the process exits, fails, misses the deadline, or prints a line that is no `T`.
    pub(crate) async fn line<T: DeserializeOwned>(&mut self, deadline: Duration) -> Result<T> {
        let name = self.name.clone();
        match timeout(deadline, self.lines.next_line()).await {
            Ok(Ok(Some(line))) => match serde_json::from_slice::<Failure>(&line) {
                Ok(Failure { failed }) => bail!("{name} failed: {}", printable(&failed)),
                Err(_) => parse_line(&line).with_context(|| format!("cannot read the output of {name}")),
            },
            Ok(Ok(None) | Err(WireError::CutOff)) => bail!("{name} {}", self.end_reason().await),
            Ok(Err(error)) => Err(error).with_context(|| format!("cannot read the output of {name}")),
            Err(_) => bail!("{name} printed nothing for {deadline:?} and was killed{}", self.kill().await),
        }
    }

    /// The next line as it is; `None` at the end of the output.
    ///
    /// # Errors
    /// When the output cannot be read.
    #[cfg(feature = "gpu")]
    pub(crate) async fn next_line(&mut self) -> Result<Option<Vec<u8>>> {
        Ok(self.lines.next_line().await?)
    }

    /// The exit status of a child whose output has ended, and whose standard input stays open until then; `None` if it
    /// has not exited at the deadline.
    #[cfg(feature = "gpu")]
    pub(crate) async fn exit_status(&mut self) -> Option<ExitStatus> {
        let Source::Child { child, .. } = &mut self.source else { return None };
        let _input = child.stdin.take();
        timeout(EXIT_TIMEOUT, child.wait()).await.ok()?.ok()
    }

    /// The reason why the output of the process ended, as the end of a sentence for an error. Kills a process that does
    /// not exit.
    pub(crate) async fn end_reason(&mut self) -> String {
        if let Source::Node { .. } = self.source {
            return "is gone: its node closed the connection; see the standard error of that node".into();
        }
        match self.wait().await {
            Some(status) => format!("ended early, with {status}{}", self.stderr_tail().await),
            None => format!("closed its output and was killed{}", self.kill().await),
        }
    }

    /// Closes its standard input and waits for its exit; `None` if it has not exited at the deadline, or is no child.
    async fn wait(&mut self) -> Option<ExitStatus> {
        let Source::Child { child, .. } = &mut self.source else { return None };
        timeout(EXIT_TIMEOUT, child.wait()).await.ok()?.ok()
    }

    /// Kills a child, and returns the end of its standard error. A process inside a call of a hung GPU driver may
    /// survive even SIGKILL; it is then left behind.
    pub(crate) async fn kill(&mut self) -> String {
        if let Source::Child { child, .. } = &mut self.source
            && timeout(EXIT_TIMEOUT, child.kill()).await.is_err()
        {
            eprintln!("{} could not be ended", self.name);
        }
        self.stderr_tail().await
    }

    /// Ends the process, whose work is done, and waits until the memory of a child is free for the next process. Closing
    /// its standard input lets it end its own children first; if it does not exit in time, it is killed.
    pub(crate) async fn end(mut self) {
        if self.wait().await.is_none() {
            self.kill().await;
        }
    }

    /// The end of its standard error, as part of a sentence; empty if nothing was printed there.
    async fn stderr_tail(&mut self) -> String {
        let Source::Child { stderr_tail, .. } = &mut self.source else { return String::new() };
        let Some(tail) = stderr_tail.take() else { return String::new() };
        // A grandchild could keep the pipe open.
        match timeout(EXIT_TIMEOUT, tail).await {
            Ok(Ok(tail)) if !tail.is_empty() => format!("; its standard error ended with: {tail}"),
            _ => String::new(),
        }
    }
}

/// `text` from another host, truncated and without control characters, so that it is safe to print on a terminal.
fn printable(text: &str) -> String {
    let shown = text.chars().take(REASON_MAX_CHARS);
    shown.map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// The length to which the reason of another process's failure is truncated.
const REASON_MAX_CHARS: usize = 2_000;

/// The option that ends a process together with the process that started it.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Lifetime {
    /// Exits when standard input closes, so that no process outlives the harness that started it.
    #[arg(long, hide = true)]
    end_with_stdin: bool,
}

impl Lifetime {
    /// With the option, starts a thread that exits this process as soon as its standard input closes.
    pub fn begin(self) {
        if self.end_with_stdin {
            std::thread::spawn(|| {
                let ended = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
                std::process::exit(i32::from(ended.is_err()));
            });
        }
    }
}

/// The command-line option of [`Lifetime`].
pub(crate) const EXIT_ON_STDIN_EOF: &str = "--end-with-stdin";

/// Copies the standard error of the process called `name` to that of the harness, and returns its last lines.
async fn forward_stderr(name: String, stderr: ChildStderr) -> String {
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
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// The number of lines of standard error that an error quotes, and the length to which each is truncated.
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
    async fn lines_are_read_one_by_one() {
        let mut process = process("echo 1; echo 2; exec sleep 60");
        assert_eq!(process.line::<u32>(TIMEOUT).await.unwrap(), 1);
        assert_eq!(process.line::<u32>(TIMEOUT).await.unwrap(), 2);
        process.end().await;
    }

    #[tokio::test]
    async fn errors_name_the_process_and_the_reason() {
        let silent = failure("exec sleep 60", Duration::from_millis(20)).await;
        assert!(silent.contains("test printed nothing for 20ms and was killed"), "{silent}");
        let ended = failure("printf 'no memory\n\nStack backtrace:\n 0: main\n' >&2; exit 3", TIMEOUT).await;
        assert!(
            ended.contains("test ended early, with exit status: 3; its standard error ended with: no memory"),
            "{ended}"
        );
        let garbage = failure("echo hello; exec sleep 60", TIMEOUT).await;
        assert!(garbage.contains("it sent \"hello\""), "{garbage}");
        let endless = failure("yes | tr -d '\\n'", TIMEOUT).await;
        assert!(endless.contains("a line of more than"), "{endless}");
        let failed = failure(r#"echo '{"failed":"no\u001b[2Jmemory"}'; exec sleep 60"#, TIMEOUT).await;
        assert_eq!(failed, "test failed: no [2Jmemory", "without the control character");
    }

    const TIMEOUT: Duration = Duration::from_secs(30);
}
