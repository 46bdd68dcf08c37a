//! A tokio runtime on threads of its own, for a part of the suite, a server or a client.

use anyhow::{Context, Result};
use tokio::runtime::{Builder, Runtime};

/// A tokio runtime on threads of its own, as in a separate process. Dropping it ends its tasks.
#[derive(Debug)]
pub(super) struct OwnRuntime(Option<Runtime>);

impl OwnRuntime {
    /// Starts a runtime with `threads` threads.
    pub(super) fn new(name: &str, threads: usize) -> Result<Self> {
        let mut builder = Builder::new_multi_thread();
        let runtime = builder.worker_threads(threads).thread_name(name).enable_all().build();
        Ok(Self(Some(runtime.context("cannot make a runtime")?)))
    }

    /// Runs `work` on the runtime.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T> {
        let runtime = self.0.as_ref().context("the runtime has ended")?;
        runtime
            .spawn(work)
            .await
            .context("the work on another thread panicked or was cancelled")
    }
}

impl Drop for OwnRuntime {
    fn drop(&mut self) {
        // In the background, because waiting for blocking work that hangs would hang this thread too.
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}
