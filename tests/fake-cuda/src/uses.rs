use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

/// The number of copies and fills that use a block.
#[derive(Clone, Debug, Default)]
pub(crate) struct Uses(Arc<AtomicUsize>);

/// The use of a block by one copy or fill, from the request until the work has ended.
#[derive(Debug)]
pub(crate) struct Use(Arc<AtomicUsize>);

impl Uses {
    /// Counts a use, until the result is dropped.
    pub(crate) fn begin(&self) -> Use {
        self.0.fetch_add(1, Ordering::AcqRel);
        Use(self.0.clone())
    }

    /// Whether any copy or fill uses the block.
    pub(crate) fn any(&self) -> bool {
        self.0.load(Ordering::Acquire) > 0
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}
