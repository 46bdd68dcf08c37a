//! The command of `--exec`, which runs after each version. The command and its children form a process group, which is
//! terminated if the subscriber ends first.

use rustix::process::{Pid, Signal, WaitOptions, kill_process_group, test_kill_process_group, waitpgid};
use std::{
    io,
    os::fd::AsFd,
    path::Path,
    process::{ExitStatus, Stdio},
    time::Duration,
};
use tensor_relay_client::VersionId;
use tensor_relay_device::Lock;
use tokio::process::Command;

/// The time between SIGTERM and SIGKILL: shorter than the ten seconds after which Docker kills a container.
const KILL_DELAY: Duration = Duration::from_secs(5);

/// The interval of checks whether a process group is empty.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// The process groups of all running commands, for [`terminate_all`].
static RUNNING: Lock<Vec<Pid>> = Lock::new(Vec::new());

/// A failure of the command of `--exec`.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HookError {
    #[error("the command of --exec ended with {status} for {id}")]
    Failed { status: ExitStatus, id: VersionId },
    #[error("the command of --exec cannot be run for {id}: {source}")]
    NotRun { source: io::Error, id: VersionId },
}

/// Runs `command` in a shell and waits for its end. If the future is dropped, the command continues until
/// [`terminate_all`]. Its stdout is that of this process or, if `stdout_is_json`, stderr.
pub(crate) async fn run(
    command: &str,
    id: &VersionId,
    path: Option<&Path>,
    stdout_is_json: bool,
) -> Result<(), HookError> {
    let mut shell = Command::new("/bin/sh");
    shell.arg("-c").arg(command).stdin(Stdio::null()).process_group(0);
    if stdout_is_json {
        let stderr = io::stderr().as_fd().try_clone_to_owned();
        shell.stdout(stderr.map_err(|source| HookError::NotRun { source, id: id.clone() })?);
    }
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

/// Waits for the end of the shell and returns its exit status. It does not wait for background processes that the shell
/// started.
async fn status(mut shell: Command) -> io::Result<ExitStatus> {
    let mut shell = shell.spawn()?;
    let group = shell.id().and_then(|id| Pid::from_raw(id.cast_signed()));
    RUNNING.lock().extend(group);
    let status = shell.wait().await;
    RUNNING.lock().retain(|running| Some(*running) != group);
    status
}

/// Whether `process` is the shell of a running command, whose exit status is awaited.
pub(crate) fn is_running(process: Pid) -> bool {
    RUNNING.lock().contains(&process)
}

/// Terminates all running commands and their children: SIGTERM first, SIGKILL after [`KILL_DELAY`]. Processes that left
/// their group (`setsid`) are not terminated.
pub(crate) async fn terminate_all() {
    let groups = std::mem::take(&mut *RUNNING.lock());
    signal_all(&groups, Signal::TERM);
    let all_gone = async {
        while groups.iter().any(|group| exists(*group)) {
            tokio::time::sleep(CHECK_INTERVAL).await;
        }
    };
    if tokio::time::timeout(KILL_DELAY, all_gone).await.is_err() {
        signal_all(&groups, Signal::KILL);
    }
}

fn signal_all(groups: &[Pid], signal: Signal) {
    for group in groups {
        let _ = kill_process_group(*group, signal); // The group may have ended already.
    }
}

/// Whether `group` has a process.
fn exists(group: Pid) -> bool {
    // A zombie counts as a process until it is reaped. If this process is the first one of a container, only it can
    // reap zombies.
    while let Ok(Some(_)) = waitpgid(group, WaitOptions::NOHANG) {}
    test_kill_process_group(group).is_ok()
}
