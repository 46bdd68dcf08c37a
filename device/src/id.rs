use std::sync::atomic::{AtomicU64, Ordering};

/// Tells one engine or sink of this process from every other, so that a slot or target handed to the wrong
/// one is refused and not copied to a wrong place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Id(u64);

impl Id {
    /// An id that no earlier call returned: 2^64 do not run out.
    pub(crate) fn unique() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}
