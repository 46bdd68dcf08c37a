//! Where work that burns CPU is done.

/// Runs hashing, encoding and decoding away from the async executor, whose thread must stay free for packets: a chunk of
/// 4 MiB takes zstd three milliseconds, in which a lane at line rate receives ten thousand packets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Workers {
    /// On the blocking threads of the tokio runtime. They are started on demand and end when idle; what is given to
    /// them is bounded by the slots and credits of the pipelines, so their number is too.
    #[default]
    Threads,
    /// In place. For simulations, where the order of events must follow from the seed alone.
    Inline,
}

impl Workers {
    /// Runs `work` to its end, even when the future is dropped, and returns what it returns.
    pub async fn run<T: Send + 'static>(self, work: impl FnOnce() -> T + Send + 'static) -> T {
        match self {
            Self::Inline => work(),
            Self::Threads => match tokio::task::spawn_blocking(work).await {
                Ok(done) => done,
                Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
                // Blocking work is never aborted; it is only refused when the runtime itself ends, and then nothing
                // that waits for it will be polled again.
                Err(_) => std::future::pending().await,
            },
        }
    }
}
