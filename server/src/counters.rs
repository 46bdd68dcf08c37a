//! [`Counters`]: what a server counts of its subscribers.

use std::sync::atomic::AtomicU64;

/// The counters of a server.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Commits: one for each version and subscriber.
    pub(crate) committed: AtomicU64,
    /// Subscribers that accepted no byte within the deadline, or did not keep up with their publisher.
    pub(crate) evicted: AtomicU64,
}
