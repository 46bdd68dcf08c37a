//! The command of `--exec`, which runs after each version. It and what it starts form a process group, which is
//! terminated when the subscriber ends before it.

use rustix::process::{Pid, Signal, WaitOptions, kill_process_group, test_kill_process_group, waitpgid};
use std::{
    io,
    path::Path,
    process::{ExitStatus, Stdio},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tensor_relay_client::VersionId;
use tokio::process::Command;

/// How long a command may take to end after SIGTERM, before SIGKILL. Container engines give the whole program ten seconds.
const GRACE: Duration = Duration::from_secs(5);

/// How often it is asked whether a process group is empty.
const TICK: Duration = Duration::from_millis(20);

/// The process groups of the commands that run now, of all topics: they end with this process, however it ends.
static RUNNING: Mutex<Vec<Pid>> = Mutex::new(Vec::new());

/// The command did not succeed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HookError {
    #[error("the command of --exec ended with {status} for {id}")]
    Failed { status: ExitStatus, id: VersionId },
    #[error("the command of --exec cannot be run for {id}: {source}")]
    NotRun { source: io::Error, id: VersionId },
}

/// Runs `command` in a shell and waits for it. When this is cancelled it runs on, until [`terminate_all`].
pub(crate) async fn run(command: &str, id: &VersionId, path: Option<&Path>) -> Result<(), HookError> {
    let mut shell = Command::new("/bin/sh");
    shell.arg("-c").arg(command).stdin(Stdio::null()).process_group(0);
    shell.env("TENSOR_RELAY_TOPIC", id.topic.as_str());
    shell.env("TENSOR_RELAY_VERSION", id.version.to_string());
    shell.env("TENSOR_RELAY_EPOCH", id.epoch.to_string());
    match path {
        Some(path) => shell.env("TENSOR_RELAY_PATH", path),
        None => shell.env_remove("TENSOR_RELAY_PATH"),
    };
    match status(shell).await {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(HookError::Failed { status, id: id.clone() }),
        Err(source) => Err(HookError::NotRun { source, id: id.clone() }),
    }
}

/// How a command ended. What it left in the background is its own affair.
async fn status(mut shell: Command) -> io::Result<ExitStatus> {
    let mut shell = shell.spawn()?;
    let group = shell.id().and_then(|id| Pid::from_raw(id.cast_signed()));
    running().extend(group);
    let status = shell.wait().await;
    running().retain(|running| Some(*running) != group);
    status
}

/// Terminates the commands that still run, with all that they started: SIGTERM first, SIGKILL after [`GRACE`]. A process
/// that left its group (`setsid`) is not reached.
pub(crate) async fn terminate_all() {
    let groups = std::mem::take(&mut *running());
    signal_all(&groups, Signal::TERM);
    let all_gone = async {
        while groups.iter().any(|group| exists(*group)) {
            tokio::time::sleep(TICK).await;
        }
    };
    if tokio::time::timeout(GRACE, all_gone).await.is_err() {
        signal_all(&groups, Signal::KILL);
    }
}

fn signal_all(groups: &[Pid], signal: Signal) {
    for group in groups {
        let _ = kill_process_group(*group, signal); // It may be gone already.
    }
}

/// Whether a process of `group` is left.
fn exists(group: Pid) -> bool {
    // The dead count until somebody waits for them, and where this is the first process of a container nobody else does.
    while let Ok(Some(_)) = waitpgid(group, WaitOptions::NOHANG) {}
    test_kill_process_group(group).is_ok()
}

fn running() -> MutexGuard<'static, Vec<Pid>> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}
