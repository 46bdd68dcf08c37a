use std::sync::atomic::{AtomicU64, Ordering};

/// A process-wide unique id of an engine, a sink or a CUDA memory. By it, slots and targets of another engine or sink
/// are refused instead of copied to a wrong place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Id(u64);

impl Id {
    /// A new id. The 2^64 possible ones do not run out.
    pub(crate) fn unique() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}
