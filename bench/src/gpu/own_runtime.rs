//! Threads of their own for a server or a client.

use anyhow::{Context, Result};
use std::thread;
use tokio::{
    runtime::{Builder, Handle, Runtime},
    sync::oneshot,
};

/// A tokio runtime on threads of its own, as a process of its own would have. Dropping it ends its tasks.
#[derive(Debug)]
pub(super) struct OwnRuntime {
    handle: Handle,
    /// Dropped to end it.
    _end: oneshot::Sender<()>,
}

impl OwnRuntime {
    /// A runtime on `threads` threads. One is what costs a lane least.
    pub(super) fn new(name: &str, threads: usize) -> Result<Self> {
        let mut builder =
            if threads == 1 { Builder::new_current_thread() } else { Builder::new_multi_thread() };
        let runtime = builder.worker_threads(threads.max(1)).enable_all().build();
        let runtime = runtime.context("cannot make a runtime")?;
        let handle = runtime.handle().clone();
        let (end, ended) = oneshot::channel();
        let run = move || live(runtime, ended);
        thread::Builder::new()
            .name(name.into())
            .spawn(run)
            .context("cannot start a thread")?;
        Ok(Self { handle, _end: end })
    }

    /// Does `work` there.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T> {
        self.handle.spawn(work).await.context("the work in another thread did not end")
    }
}

fn live(runtime: Runtime, ended: oneshot::Receiver<()>) {
    let _ = runtime.block_on(ended);
    // Blocking work that hangs would hang this too.
    runtime.shutdown_background();
}
