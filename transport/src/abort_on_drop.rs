//! [`AbortOnDrop`]: ends a task with its owner.

use tokio::task::AbortHandle;

/// Aborts a task when it is dropped.
#[derive(Debug)]
pub struct AbortOnDrop(pub AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}
