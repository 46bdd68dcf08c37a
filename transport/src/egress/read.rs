//! One read of a source, within a deadline.

use bytes::Bytes;
use std::{ops::Range, time::Duration};
use tensor_relay_device::{Source, SourceError};

/// How long a read of a device may take, the wait for a slot included. Longer than the deadlines of a copy engine, whose
/// errors know more; shorter than what a subscriber is given before it counts as stalled, who is not to blame.
pub const READ_TIMEOUT: Duration = Duration::from_secs(25);

/// Reads `range` of `source`, and gives up after [`READ_TIMEOUT`].
///
/// Who waits for a slot waits for copies alone, and those have deadlines: a source on a device keeps a quarter of its slots
/// from its readers. So this deadline passes only where a device hangs, or where its engine never saw the ends of so many
/// copies that no slot is left.
///
/// # Errors
/// What the source says, and [`SourceError::TimedOut`].
pub async fn read(source: &dyn Source, range: Range<u64>) -> Result<Bytes, SourceError> {
    let asked_bytes = range.end.saturating_sub(range.start);
    let waited_ms = READ_TIMEOUT.as_millis() as u64;
    let read = tokio::time::timeout(READ_TIMEOUT, source.read(range)).await;
    read.unwrap_or(Err(SourceError::TimedOut { asked_bytes, waited_ms }))
}
