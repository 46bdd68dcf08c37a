//! A process that the harness starts: this program again, here or on another host, or a peer's program.

use anyhow::{Context, Result, bail};
use serde::de::DeserializeOwned;
use std::{
    collections::VecDeque,
    process::{ExitStatus, Stdio},
    time::Duration,
};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    process::{Child, ChildStderr, ChildStdout, Command},
    task::JoinHandle,
    time::timeout,
};

/// A running child whose standard output is lines of JSON, and whose standard error is forwarded to that of the harness.
///
/// Dropping it ends the process. If the harness itself is killed, nothing is dropped, but the process's standard input
/// closes, at which the programs that the harness starts exit by themselves ([`Lifetime`]).
pub(crate) struct Process {
    name: String,
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    /// Returns the last lines of standard error; `None` once an error has quoted them.
    stderr_tail: Option<JoinHandle<String>>,
}

impl Process {
    /// Starts `command` with this standard input. `name` is for messages.
    ///
    /// # Errors
    /// When it cannot be started.
    pub(crate) fn start(name: String, mut command: Command, stdin: Stdio) -> Result<Self> {
        command
            .stdin(stdin)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        let mut child = command.spawn().with_context(|| format!("cannot start {name}"))?;
        let stdout = child.stdout.take().expect("its standard output was piped above");
        let stderr = child.stderr.take().expect("its standard error was piped above");
        let stderr_tail = Some(tokio::spawn(forward_stderr(name.clone(), stderr)));
        Ok(Self { name, child, lines: BufReader::new(stdout).lines(), stderr_tail })
    }

    /// Writes `line` to its standard input, which stays open.
    ///
    /// # Errors
    /// When the process is gone.
    pub(crate) async fn send(&mut self, line: &str) -> Result<()> {
        let input = self.child.stdin.as_mut().context("its standard input is closed")?;
        let sent = input.write_all(format!("{line}\n").as_bytes()).await;
        sent.with_context(|| format!("cannot write to {}", self.name))
    }

    /// Reads the next line; kills the process if it prints none before the deadline.
    ///
    /// # Errors
    /// When the process exits, misses the deadline, or prints a line that is no `T`.
    pub(crate) async fn line<T: DeserializeOwned>(&mut self, deadline: Duration) -> Result<T> {
        let name = self.name.clone();
        match timeout(deadline, self.next_line()).await {
            Ok(Ok(Some(line))) => serde_json::from_str(&line).with_context(|| {
                let shown: String = line.chars().take(SHOWN_MAX_CHARS).collect();
                format!("{name} printed {shown:?}, which is no line of a contender")
            }),
            Ok(Ok(None)) => bail!("{name} {}", self.end_reason().await),
            Ok(Err(error)) => Err(error).with_context(|| format!("cannot read the output of {name}")),
            Err(_) => bail!("{name} printed nothing for {deadline:?} and was killed{}", self.kill().await),
        }
    }

    /// The next line as it is; `None` at the end of the output. It has no deadline, but is cancel safe.
    ///
    /// # Errors
    /// When the output cannot be read.
    pub(crate) async fn next_line(&mut self) -> Result<Option<String>> {
        Ok(self.lines.next_line().await?)
    }

    /// The exit status, after the output has ended; `None` if it has not exited at the deadline. Its standard input stays
    /// open until then.
    #[cfg(feature = "gpu")]
    pub(crate) async fn exit_status(&mut self) -> Option<ExitStatus> {
        let _input = self.child.stdin.take();
        self.wait().await
    }

    /// The reason why the output of the process ended, as the end of a sentence for an error. Kills a process that does
    /// not exit.
    pub(crate) async fn end_reason(&mut self) -> String {
        match self.wait().await {
            Some(status) => format!("ended early, with {status}{}", self.stderr_tail().await),
            None => format!("closed its output and was killed{}", self.kill().await),
        }
    }

    /// Closes its standard input and waits for its exit; `None` if it has not exited at the deadline.
    async fn wait(&mut self) -> Option<ExitStatus> {
        timeout(EXIT_TIMEOUT, self.child.wait()).await.ok()?.ok()
    }

    /// Kills the process, and returns the end of its standard error. A process inside a call of a hung GPU driver may
    /// survive even SIGKILL; it is then left behind.
    pub(crate) async fn kill(&mut self) -> String {
        if timeout(EXIT_TIMEOUT, self.child.kill()).await.is_err() {
            eprintln!("{} could not be ended", self.name);
        }
        self.stderr_tail().await
    }

    /// Ends the process, whose work is done, and waits until its memory is free for the next process. Closing its
    /// standard input lets it end its own children first; if it does not exit in time, it is killed.
    pub(crate) async fn end(mut self) {
        if self.wait().await.is_none() {
            self.kill().await;
        }
    }

    /// The end of its standard error, as part of a sentence; empty if nothing was printed there.
    async fn stderr_tail(&mut self) -> String {
        let Some(tail) = self.stderr_tail.take() else { return String::new() };
        // A grandchild could keep the pipe open.
        match timeout(EXIT_TIMEOUT, tail).await {
            Ok(Ok(tail)) if !tail.is_empty() => format!("; its standard error ended with: {tail}"),
            _ => String::new(),
        }
    }
}

/// The length to which an invalid line is truncated in errors.
const SHOWN_MAX_CHARS: usize = 80;

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
        Process::start("test".into(), shell, Stdio::piped()).unwrap()
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
        assert!(garbage.contains("printed \"hello\""), "{garbage}");
    }

    const TIMEOUT: Duration = Duration::from_secs(30);
}
