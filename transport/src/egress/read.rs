//! Reads a source within a deadline.

use bytes::Bytes;
use std::{ops::Range, time::Duration};
use tensor_relay_device::{CopyError, Source, SourceError};

/// The deadline of a device read, including the wait for a slot and a retry. Longer than each default deadline of a
/// copy engine and than two late copies, whose errors are more precise. Shorter than their sum, and than the stall
/// deadline of a subscriber, which is not to blame.
pub const READ_TIMEOUT: Duration = Duration::from_secs(25);

/// Reads `range` of `source`, within [`READ_TIMEOUT`]. Retries once if a device refused the copy or was late.
///
/// It retries because an unreadable version is lost to its subscriber, and the last version has no successor. It does
/// not if the producer's stream was late: a second wait would exceed [`READ_TIMEOUT`], which blames the device, and
/// hide the cause.
///
/// Waiting for a slot means waiting for copies, which have deadlines: a source on a device reserves a quarter of its
/// slots for them. So the deadline passes if the device hangs; if so many copies never ended that no slot is left; or
/// if the waits for a slot, a stream and a copy, each in time, add up. A copy in progress may continue after this
/// deadline, and after that of its engine.
///
/// # Errors
/// The source's error, or [`SourceError::TimedOut`].
pub async fn read(source: &dyn Source, range: Range<u64>) -> Result<Bytes, SourceError> {
    let asked_bytes = range.end.saturating_sub(range.start);
    let waited_ms = READ_TIMEOUT.as_millis() as u64;
    let read = async {
        match source.read(range.clone()).await {
            Err(SourceError::Copy(error)) if is_worth_another_try(&error) => source.read(range).await,
            read => read,
        }
    };
    let read = tokio::time::timeout(READ_TIMEOUT, read).await;
    read.unwrap_or(Err(SourceError::TimedOut { asked_bytes, waited_ms }))
}

fn is_worth_another_try(error: &CopyError) -> bool {
    !error.is_final() && !matches!(error, CopyError::FenceTimedOut { .. })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tensor_relay_device::BoxFuture;

    /// A device that refuses its first copies.
    #[derive(Debug)]
    struct Refusing {
        refusals: usize,
        reads: AtomicUsize,
        error: fn() -> CopyError,
    }

    impl Source for Refusing {
        fn len_bytes(&self) -> u64 {
            8
        }

        fn read(&self, range: Range<u64>) -> BoxFuture<'_, Result<Bytes, SourceError>> {
            let refused = self.reads.fetch_add(1, Ordering::Relaxed) < self.refusals;
            Box::pin(async move {
                match refused {
                    true => Err((self.error)().into()),
                    false => Ok(Bytes::from(vec![7; (range.end - range.start) as usize])),
                }
            })
        }
    }

    #[tokio::test]
    async fn a_refused_copy_is_retried_once() {
        let late = || CopyError::TimedOut { device: "test".into(), waited: READ_TIMEOUT };
        let fenced = || CopyError::FenceTimedOut { device: "test".into(), waited: READ_TIMEOUT };
        let stopped = || CopyError::EngineStopped;
        for (refusals, error, succeeds, reads) in [
            (0, late as fn() -> CopyError, true, 1),
            (1, late, true, 2),
            (2, late, false, 2),
            (1, fenced, false, 1),
            (1, stopped, false, 1),
        ] {
            let source = Refusing { refusals, reads: AtomicUsize::new(0), error };
            let read = read(&source, 0..8).await;
            assert_eq!((read.is_ok(), source.reads.into_inner()), (succeeds, reads));
        }
    }
}
