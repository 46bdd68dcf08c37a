//! One process of a contender.

use crate::command::END_WITH_STDIN;
use anyhow::{Context, Result, bail};
use serde::de::DeserializeOwned;
use std::{collections::VecDeque, ffi::OsString, process::Stdio, time::Duration};
use tokio::{
    io::{AsyncBufReadExt, BufReader, Lines},
    process::{Child, ChildStderr, ChildStdout, Command},
    task::JoinHandle,
    time::timeout,
};

/// A running process that prints JSON lines.
///
/// It is killed when this is dropped. If the harness is killed itself, nothing is dropped; but then the pipe to the
/// process's standard input closes, and the process ends by itself, as it was told to ([`END_WITH_STDIN`]).
pub(crate) struct Side {
    name: String,
    process: Child,
    lines: Lines<BufReader<ChildStdout>>,
    /// Until they were told.
    last_words: Option<JoinHandle<String>>,
}

impl Side {
    /// Starts `command`, which names the program, with `words`: its role and its options. `name` is for messages.
    pub(crate) fn start(name: String, mut command: Command, words: &[OsString]) -> Result<Self> {
        command.arg(END_WITH_STDIN).args(words);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        let mut process = command.spawn().with_context(|| format!("cannot start {name}"))?;
        let stdout = process.stdout.take().expect("its standard output was piped above");
        let stderr = process.stderr.take().expect("its standard error was piped above");
        let last_words = Some(tokio::spawn(pass_on(name.clone(), stderr)));
        Ok(Self { name, process, lines: BufReader::new(stdout).lines(), last_words })
    }

    /// Reads the next line; kills the process when it does not come in time.
    pub(crate) async fn line<T: DeserializeOwned>(&mut self, deadline: Duration) -> Result<T> {
        let name = &self.name;
        match timeout(deadline, self.lines.next_line()).await {
            Ok(Ok(Some(line))) => serde_json::from_str(&line).with_context(|| {
                format!("{name} should have printed a JSON line of its protocol, not {line:?}")
            }),
            Ok(Ok(None)) => {
                self.process.start_kill().ok();
                let status = self.process.wait().await?;
                let words = told(self.last_words.take()).await;
                bail!("{name} ended early, with {status}{words}")
            }
            Ok(Err(error)) => Err(error).with_context(|| format!("cannot read what {name} prints")),
            Err(_) => {
                self.process.start_kill().ok();
                bail!("{name} printed nothing for {deadline:?} and was killed")
            }
        }
    }

    /// Ends the process, whose work is done, and waits until its memory is free for the next one. It is told by the end
    /// of its standard input, so that it can end what it started itself, and killed when it does not heed that.
    pub(crate) async fn end(mut self) {
        // Waiting closes its standard input.
        if timeout(END_MAX, self.process.wait()).await.is_err()
            && let Err(error) = self.process.kill().await
        {
            eprintln!("{} could not be ended: {error}", self.name);
        }
    }
}

/// The end of what a process complained, as part of a sentence; nothing, if there was nothing.
async fn told(last_words: Option<JoinHandle<String>>) -> String {
    let Some(words) = last_words else { return String::new() };
    // A grandchild could keep the pipe open.
    match timeout(END_MAX, words).await {
        Ok(Ok(words)) if !words.is_empty() => format!("; its last words: {words}"),
        _ => String::new(),
    }
}

/// Passes on what a process called `name` complains, and returns the end of it.
async fn pass_on(name: String, stderr: ChildStderr) -> String {
    let mut lines = BufReader::new(stderr).lines();
    let mut last = VecDeque::new();
    while let Ok(Some(line)) = lines.next_line().await {
        eprintln!("{name}: {line}");
        if !line.trim().is_empty() {
            last.push_back(line.trim().chars().take(LAST_LINE_CHARS).collect::<String>());
        }
        if last.len() > LAST_LINES {
            last.pop_front();
        }
    }
    Vec::from(last).join(" | ")
}

/// How long a process may take to end by itself.
const END_MAX: Duration = Duration::from_secs(5);

/// How much of what it complains is kept for a table.
const LAST_LINES: usize = 3;
const LAST_LINE_CHARS: usize = 300;

#[cfg(test)]
mod tests {
    use super::*;

    /// A side that runs `script` in a shell, which ignores the options.
    fn side(script: &str) -> Side {
        let mut shell = Command::new("sh");
        shell.args(["-c", script]);
        Side::start("test".into(), shell, &[]).unwrap()
    }

    async fn failure(script: &str, deadline: Duration) -> String {
        format!("{:#}", side(script).line::<u32>(deadline).await.unwrap_err())
    }

    #[tokio::test]
    async fn lines_come_one_by_one() {
        let mut side = side("echo 1; echo 2; exec sleep 60");
        assert_eq!(side.line::<u32>(LONG).await.unwrap(), 1);
        assert_eq!(side.line::<u32>(LONG).await.unwrap(), 2);
        side.end().await;
    }

    #[tokio::test]
    async fn failures_say_who_and_what() {
        let silent = failure("exec sleep 60", Duration::from_millis(20)).await;
        assert!(silent.contains("test printed nothing for 20ms and was killed"), "{silent}");
        let ended = failure("echo no memory >&2; exit 3", LONG).await;
        assert!(
            ended.contains("test ended early, with exit status: 3; its last words: no memory"),
            "{ended}"
        );
        let garbage = failure("echo hello; exec sleep 60", LONG).await;
        assert!(garbage.contains("not \"hello\""), "{garbage}");
    }

    const LONG: Duration = Duration::from_secs(30);
}
