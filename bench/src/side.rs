//! One process of a contender.

use crate::command::END_WITH_STDIN;
use anyhow::{Context, Result, bail};
use serde::de::DeserializeOwned;
use std::{ffi::OsString, process::Stdio, time::Duration};
use tokio::{
    io::{AsyncBufReadExt, BufReader, Lines},
    process::{Child, ChildStdout, Command},
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
}

impl Side {
    /// Starts `command`, which names the program, with `words`: its role and its options. `name` is for messages.
    pub(crate) fn start(name: String, mut command: Command, words: &[OsString]) -> Result<Self> {
        command.arg(END_WITH_STDIN).args(words);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut process = command.spawn().with_context(|| format!("cannot start {name}"))?;
        let stdout = process.stdout.take().expect("its standard output was piped above");
        Ok(Self { name, process, lines: BufReader::new(stdout).lines() })
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
                bail!("{name} ended early, with {status}: its own message is above")
            }
            Ok(Err(error)) => Err(error).with_context(|| format!("cannot read what {name} prints")),
            Err(_) => {
                self.process.start_kill().ok();
                bail!("{name} printed nothing for {deadline:?} and was killed")
            }
        }
    }

    /// Kills the process, whose work is done, and waits until its memory is free for the next one.
    pub(crate) async fn end(mut self) {
        if let Err(error) = self.process.kill().await {
            eprintln!("{} could not be ended: {error}", self.name);
        }
    }
}

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
        let ended = failure("exit 3", LONG).await;
        assert!(ended.contains("test ended early, with exit status: 3"), "{ended}");
        let garbage = failure("echo hello; exec sleep 60", LONG).await;
        assert!(garbage.contains("not \"hello\""), "{garbage}");
    }

    const LONG: Duration = Duration::from_secs(30);
}
