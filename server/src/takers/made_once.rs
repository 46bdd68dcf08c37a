//! [`MadeOnce`]: what is made for the first client that needs it, and for all others.

use std::future::Future;
use tensor_relay_device::Lock;
use tensor_relay_protocol::NotLent;
use tokio::sync::OnceCell;

/// A value that is made once, by the first that asks; those that ask meanwhile wait for it. A failure answers all of them:
/// otherwise each would try in turn, and the last one wait for as many deadlines as there are clients. A later request tries
/// again.
#[derive(Debug)]
pub(super) struct MadeOnce<T> {
    value: OnceCell<T>,
    /// The number of failures, and why the last one was.
    failures: Lock<(u64, Option<NotLent>)>,
}

impl<T> Default for MadeOnce<T> {
    fn default() -> Self {
        Self { value: OnceCell::new(), failures: Lock::default() }
    }
}

impl<T> MadeOnce<T> {
    /// The value, made by `make` if there is none. Cancel safe: another one that waits makes it then.
    ///
    /// # Errors
    /// Why it could not be made.
    pub(super) async fn get<F>(&self, make: impl FnOnce() -> F) -> Result<&T, NotLent>
    where
        F: Future<Output = Result<T, NotLent>>,
    {
        let before = self.failures.lock().0;
        let make = || async {
            let (failures, last) = *self.failures.lock();
            if let Some(why) = last.filter(|_| failures > before) {
                return Err(why);
            }
            let made = make().await;
            if let Err(why) = &made {
                *self.failures.lock() = (failures + 1, Some(*why));
            }
            made
        };
        self.value.get_or_try_init(make).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        sync::atomic::{AtomicU32, Ordering},
        time::Duration,
    };

    /// Goal: a failure answers all that waited for the same attempt, and a later request tries again.
    #[tokio::test(start_paused = true)]
    async fn a_failure_answers_all_that_waited() {
        let (made, attempts) = (MadeOnce::default(), AtomicU32::new(0));
        let get = |result: Result<u32, NotLent>| {
            let attempts = &attempts;
            made.get(move || async move {
                attempts.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(Duration::from_secs(5)).await;
                result
            })
        };
        let failure = Err(NotLent::GpuFull);
        for attempt in 1..=2 {
            let failed = tokio::join!(get(failure), get(failure), get(failure));
            assert_eq!(failed, (Err(NotLent::GpuFull), Err(NotLent::GpuFull), Err(NotLent::GpuFull)));
            assert_eq!(attempts.load(Ordering::Relaxed), attempt);
        }
        assert_eq!(tokio::join!(get(Ok(7)), get(Ok(8))), (Ok(&7), Ok(&7)));
        assert_eq!(attempts.load(Ordering::Relaxed), 3);
    }
}
