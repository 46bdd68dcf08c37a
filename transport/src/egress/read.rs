//! Reading a source within a deadline.

use bytes::Bytes;
use std::{ops::Range, time::Duration};
use tensor_relay_device::{CopyError, Source, SourceError};

/// The deadline of a device read, including the wait for a slot and a retry. Longer than each default deadline of a
/// copy engine, and than two late copies, whose errors are more precise. Shorter than all of them together, and than
/// the stall deadline of a subscriber, who is not to blame.
pub const READ_TIMEOUT: Duration = Duration::from_secs(25);

/// Reads `range` of `source`, with a retry if a device refused the copy or was late, and gives up after
/// [`READ_TIMEOUT`].
///
/// Why a retry: a version that cannot be read is lost to its subscriber, and the last version has no successor. There
/// is none if the producer's stream was late: a second wait would exceed [`READ_TIMEOUT`], which blames the device, and
/// hide the actual cause.
///
/// Who waits for a slot waits for copies alone, and those have deadlines: a source on a device keeps a quarter of its slots
/// from its readers. So this deadline passes where a device hangs, where its engine never saw the ends of so many copies
/// that no slot is left, or where several waits came together that were each in time: for a slot, for a stream, and for a
/// copy. A copy that was begun may go on after that, and after an engine said that it is late.
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
    async fn a_copy_that_is_refused_is_tried_once_more() {
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
