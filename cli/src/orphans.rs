//! Reaps orphans, if this process is the first one of a container: the system makes it the parent of every process
//! whose own parent has ended, and each of them stays a zombie until it is reaped.

use crate::subscribe::hook;
use rustix::process::{Pid, WaitOptions, waitpid};
use tokio::signal::unix::{SignalKind, signal};

/// As process 1, reaps orphans until the runtime ends. Call it within the runtime, on the main thread, which starts
/// every child of this process.
pub(crate) fn reap_from_now_on() -> std::io::Result<()> {
    if std::process::id() == 1 {
        let mut ended = signal(SignalKind::child())?;
        tokio::spawn(async move {
            while ended.recv().await.is_some() {
                reap();
            }
        });
    }
    Ok(())
}

/// Reaps the children that have ended, except those whose exit status a task waits for.
fn reap() {
    let children = std::fs::read_to_string("/proc/self/task/1/children").unwrap_or_default();
    for child in children.split_whitespace().filter_map(|id| Pid::from_raw(id.parse().ok()?)) {
        if !hook::is_running(child) {
            let _ = waitpid(Some(child), WaitOptions::NOHANG);
        }
    }
}
