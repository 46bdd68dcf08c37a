//! [`InUse`]: counts what is in use.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// An amount that is in use. Cheap to change, from any thread; clones share it.
#[derive(Debug, Clone, Default)]
pub struct InUse(Arc<AtomicU64>);

/// A part of what is in use, until this is dropped.
#[derive(Debug)]
#[must_use = "it is in use until this is dropped"]
pub(crate) struct Used {
    all: Arc<AtomicU64>,
    amount: u64,
}

impl InUse {
    /// The amount.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Adds `amount`.
    pub(crate) fn add(&self, amount: u64) -> Used {
        self.0.fetch_add(amount, Ordering::Relaxed);
        Used { all: Arc::clone(&self.0), amount }
    }
}

impl Drop for Used {
    fn drop(&mut self) {
        self.all.fetch_sub(self.amount, Ordering::Relaxed);
    }
}
