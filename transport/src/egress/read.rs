//! Reads sources within a deadline.

use bytes::Bytes;
use std::{ops::Range, time::Duration};
use tensor_relay_device::{CopyError, Source, SourceError};

/// The deadline of a device read, including the wait for a slot and a retry. Longer than the engine's default deadlines
/// for two copies (20 s) and for a producer's stream (20 s), whose errors are more precise. Shorter than the sum of the
/// two, and than the subscriber's stall deadline (30 s), since the subscriber is not the cause.
pub const READ_TIMEOUT: Duration = Duration::from_secs(25);

/// Reads `range` of `source` within [`READ_TIMEOUT`]. Retries once if a device copy failed or timed out, unless the
/// error is final.
///
/// Without a retry the subscriber would lose the version, and the last version has no successor. There is no retry if
/// the producer's stream timed out: a second wait would exceed [`READ_TIMEOUT`], whose error blames the device and
/// hides the cause.
///
/// Slots become free when copies end, which have deadlines: a device source reserves a quarter of its slots for copies.
/// So this deadline expires only if the device hangs, if hung copies hold all slots, or if the waits for a slot, a
/// stream and a copy, each within its own deadline, add up. A copy in progress may continue after this deadline and
/// after its own.
///
/// # Errors
/// The source's error, or [`SourceError::TimedOut`].
pub async fn read(source: &dyn Source, range: Range<u64>) -> Result<Bytes, SourceError> {
    let asked_bytes = range.end.saturating_sub(range.start);
    let waited_ms = READ_TIMEOUT.as_millis() as u64;
    let reading = async {
        match source.read(range.clone()).await {
            Err(SourceError::Copy(error)) if is_retryable(&error) => source.read(range).await,
            outcome => outcome,
        }
    };
    let outcome = tokio::time::timeout(READ_TIMEOUT, reading).await;
    outcome.unwrap_or(Err(SourceError::TimedOut { asked_bytes, waited_ms }))
}

fn is_retryable(error: &CopyError) -> bool {
    !error.is_final() && !matches!(error, CopyError::FenceTimedOut { .. })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tensor_relay_device::BoxFuture;

    /// A device whose first copies fail.
    #[derive(Debug)]
    struct Failing {
        failures: usize,
        reads: AtomicUsize,
        error: fn() -> CopyError,
    }

    impl Source for Failing {
        fn len_bytes(&self) -> u64 {
            8
        }

        fn read(&self, range: Range<u64>) -> BoxFuture<'_, Result<Bytes, SourceError>> {
            let fails = self.reads.fetch_add(1, Ordering::Relaxed) < self.failures;
            Box::pin(async move {
                match fails {
                    true => Err((self.error)().into()),
                    false => Ok(Bytes::from(vec![7; (range.end - range.start) as usize])),
                }
            })
        }
    }

    #[tokio::test]
    async fn a_failed_copy_is_retried_once() {
        let late = || CopyError::TimedOut { device: "test".into(), waited: READ_TIMEOUT };
        let fenced = || CopyError::FenceTimedOut { device: "test".into(), waited: READ_TIMEOUT };
        let stopped = || CopyError::EngineStopped;
        for (failures, error, succeeds, reads) in [
            (0, late as fn() -> CopyError, true, 1),
            (1, late, true, 2),
            (2, late, false, 2),
            (1, fenced, false, 1),
            (1, stopped, false, 1),
        ] {
            let source = Failing { failures, reads: AtomicUsize::new(0), error };
            let outcome = read(&source, 0..8).await;
            assert_eq!((outcome.is_ok(), source.reads.into_inner()), (succeeds, reads));
        }
    }
}
