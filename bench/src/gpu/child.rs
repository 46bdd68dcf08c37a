//! A part of the suite in a process of its own, with a deadline.

use super::line::Line;
use anyhow::{Context, Result};
use std::{ffi::OsString, process::Stdio, time::Duration};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, BufReader},
    process::{Child, ChildStderr, ChildStdout, Command},
    time::{Instant, timeout, timeout_at},
};

/// What a part left: all that it said before it ended, however it ended.
#[derive(Debug, Default)]
pub(super) struct Said {
    pub(super) lines: Vec<Line>,
    /// Why it did not end well, if it did not.
    pub(super) failure: Option<String>,
}

/// Runs this program with `arguments` until it ends, or until the deadline has passed and it is killed. Never fails and
/// never hangs: what goes wrong is part of what was said.
pub(super) async fn run(arguments: Vec<OsString>, deadline: Duration) -> Said {
    let mut said = Said::default();
    if let Err(error) = listen(arguments, deadline, &mut said).await {
        said.failure = Some(format!("{error:#}"));
    }
    said
}

async fn listen(arguments: Vec<OsString>, deadline: Duration, said: &mut Said) -> Result<()> {
    let program = std::env::current_exe().context("cannot find this program to start it again")?;
    let mut command = Command::new(program);
    command
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut process = command.kill_on_drop(true).spawn().context("cannot start a process")?;
    let stdout = process.stdout.take().expect("its standard output was piped above");
    let stderr = process.stderr.take().expect("its standard error was piped above");
    let complaints = tokio::spawn(last_words(stderr));
    let until = Instant::now() + deadline;
    said.failure = match timeout_at(until, read(stdout, said)).await {
        Ok(read) => {
            read?;
            end(process, until, deadline).await?
        }
        Err(_) => {
            kill(process).await;
            Some(format!("it had not ended after {} s and was killed", deadline.as_secs()))
        }
    };
    if let Some(failure) = &mut said.failure {
        // A grandchild could keep the pipe open.
        if let Ok(Ok(words)) = timeout(KILL_MAX, complaints).await
            && !words.is_empty()
        {
            *failure = format!("{failure}; its last words: {words}");
        }
    }
    Ok(())
}

async fn read(stdout: ChildStdout, said: &mut Said) -> Result<()> {
    let mut lines = BufReader::new(stdout).lines();
    while let Some(line) = lines.next_line().await.context("cannot read what it prints")? {
        match serde_json::from_str(&line) {
            Ok(line) => said.lines.push(line),
            // A library that prints is no reason to lose what was measured.
            Err(_) => said.lines.push(Line::Note(line)),
        }
    }
    Ok(())
}

/// Waits for the end of a process that closed its output; says what was wrong with it.
async fn end(mut process: Child, until: Instant, deadline: Duration) -> Result<Option<String>> {
    match timeout_at(until, process.wait()).await {
        Ok(status) => {
            let status = status?;
            Ok((!status.success()).then(|| format!("it ended with {status}")))
        }
        Err(_) => {
            kill(process).await;
            Ok(Some(format!(
                "it closed its output, had not ended after {} s and was killed",
                deadline.as_secs()
            )))
        }
    }
}

/// A process in a call of a hung driver may not even die; then it is left behind.
async fn kill(mut process: Child) {
    let _ = timeout(KILL_MAX, process.kill()).await;
}

/// The end of what it complained, which is kept short.
async fn last_words(mut stderr: ChildStderr) -> String {
    let mut tail = Vec::new();
    let mut buffer = [0; 4096];
    while let Ok(read @ 1..) = stderr.read(&mut buffer).await {
        tail.extend_from_slice(&buffer[..read]);
        let surplus = tail.len().saturating_sub(LAST_WORDS_BYTES);
        tail.drain(..surplus);
    }
    String::from_utf8_lossy(&tail).trim().to_owned()
}

const KILL_MAX: Duration = Duration::from_secs(3);
const LAST_WORDS_BYTES: usize = 2000;
