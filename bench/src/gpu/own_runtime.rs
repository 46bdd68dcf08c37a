//! A tokio runtime on threads of its own, for a part of the suite, a server or a client.

use anyhow::{Context, Result};
use std::thread;
use tokio::{
    runtime::{Builder, Handle, Runtime},
    sync::oneshot,
};

/// A tokio runtime on threads of its own, as in a separate process. Dropping it ends its tasks.
#[derive(Debug)]
pub(super) struct OwnRuntime {
    handle: Handle,
    /// Dropping it ends the runtime.
    _end: oneshot::Sender<()>,
}

impl OwnRuntime {
    /// Starts a runtime with `threads` threads. With one thread, a lane needs the least CPU time.
    pub(super) fn new(name: &str, threads: usize) -> Result<Self> {
        let mut builder =
            if threads == 1 { Builder::new_current_thread() } else { Builder::new_multi_thread() };
        let runtime = builder.worker_threads(threads.max(1)).enable_all().build();
        let runtime = runtime.context("cannot make a runtime")?;
        let handle = runtime.handle().clone();
        let (end, ended) = oneshot::channel();
        let run = move || run_until(runtime, ended);
        thread::Builder::new()
            .name(name.into())
            .spawn(run)
            .context("cannot start a thread")?;
        Ok(Self { handle, _end: end })
    }

    /// Runs `work` on the runtime.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T> {
        self.handle
            .spawn(work)
            .await
            .context("the work on another thread panicked or was cancelled")
    }
}

fn run_until(runtime: Runtime, ended: oneshot::Receiver<()>) {
    let _ = runtime.block_on(ended);
    // In the background, because waiting for blocking work that hangs would hang this thread too.
    runtime.shutdown_background();
}
