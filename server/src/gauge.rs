//! [`Gauge`]: a count of live objects.

use std::sync::Arc;
use tokio::sync::watch;

/// A gauge of live objects. Clones share one count.
#[derive(Debug, Clone, Default)]
pub(crate) struct Gauge(Arc<watch::Sender<u64>>);

/// One unit of a [`Gauge`], until it is dropped.
#[derive(Debug)]
#[must_use = "it is counted until this is dropped"]
pub(crate) struct Counted(Arc<watch::Sender<u64>>);

impl Gauge {
    pub(crate) fn get(&self) -> u64 {
        *self.0.borrow()
    }

    pub(crate) fn count(&self) -> Counted {
        self.0.send_modify(|count| *count += 1);
        Counted(Arc::clone(&self.0))
    }

    /// Waits until the count is zero. Cancel safe.
    pub(crate) async fn wait_for_zero(&self) {
        // The sender is borrowed, so it cannot be gone.
        let _ = self.0.subscribe().wait_for(|count| *count == 0).await;
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_gauge_counts_live_units() {
        let gauge = Gauge::default();
        let (first, second) = (gauge.count(), gauge.count());
        assert_eq!(gauge.get(), 2);
        drop((first, second));
        gauge.wait_for_zero().await;
        assert_eq!(gauge.get(), 0);
    }
}
