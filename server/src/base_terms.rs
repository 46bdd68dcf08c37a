//! [`BaseTerms`]: whether later versions may be encoded against one, and for how long.

use std::sync::atomic::{AtomicBool, Ordering};

/// Whether a version may be a base, and whether it may stay one after it left retention.
#[derive(Debug)]
pub(crate) struct BaseTerms {
    /// Whether later versions may be encoded against it.
    pub(crate) may_be: bool,
    /// Whether it may be cached after it left retention: it fits the budget, its producer does not wait for its memory,
    /// and it was not withdrawn.
    may_stay: AtomicBool,
    /// The maximum number of cached versions of its topic.
    pub(crate) versions_max: u32,
}

impl BaseTerms {
    pub(crate) fn new(may_be: bool, may_stay: bool, versions_max: u32) -> Self {
        Self { may_be, may_stay: may_stay.into(), versions_max }
    }

    /// Whether the version may be cached after it left retention.
    pub(crate) fn may_stay(&self) -> bool {
        self.may_stay.load(Ordering::Relaxed)
    }

    /// Withdraws the version: only transfers in progress still hold it.
    pub(crate) fn withdraw(&self) {
        self.may_stay.store(false, Ordering::Relaxed);
    }
}
