use std::{
    collections::TryReserveError,
    fmt,
    future::{Future, ready},
    io,
    ops::Range,
    os::fd::OwnedFd,
    path::PathBuf,
    pin::Pin,
    sync::Arc,
};

use bytes::Bytes;

use crate::{
    engine::CopyError,
    on_device::OnDevice,
    pool::SlotPool,
    region::Region,
    shared_range::{NotShared, SharedFile, SharedRange},
    spread::SpreadError,
};

/// A boxed future, which makes [`Source`] and [`Sink`](crate::Sink) usable as trait objects. Costs one small allocation
/// per chunk.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The origin of one payload's bytes.
///
/// Reads may run concurrently and end in any order. The owner of the bytes must not change them while the source
/// exists: a reader could receive a mixture of old and new ones. Of a source that [may change](Self::may_change) all
/// the same, readers compare what they read again with what they read first.
pub trait Source: Send + Sync + fmt::Debug {
    /// The length of the whole payload.
    fn len_bytes(&self) -> u64;

    /// Returns the bytes of `range`, without a copy where constant bytes lie in host memory in one piece. May wait for
    /// a staging slot, which the bytes may then hold until their last clone is dropped.
    fn read(&self, range: Range<u64>) -> BoxFuture<'_, Result<Bytes, SourceError>>;

    /// Whether others can write to the bytes or free them, although they must not.
    fn may_change(&self) -> bool {
        false
    }

    /// Whether `range` lies in constant host memory in one piece, so that a read copies nothing. For counters, and for the
    /// budget of copies.
    fn is_in_place(&self, range: &Range<u64>) -> bool {
        let _ = range;
        false
    }

    /// The pool of slots that reads go through, if any. Bytes that were read may hold a slot of it.
    fn slots(&self) -> Option<&SlotPool> {
        None
    }

    /// The whole payload as other processes of this host can map it, if it lies in such memory in one piece.
    ///
    /// # Errors
    /// [`NotShared`], if it does not.
    fn shared(&self) -> Result<SharedRange, NotShared> {
        Err(NotShared::Private)
    }

    /// The whole payload as it lies on a device, if it does, each tensor in one piece.
    fn on_device(&self) -> Option<&OnDevice> {
        None
    }

    /// Whether a read costs a device copy, so that its bytes are worth caching for other readers.
    fn is_costly(&self) -> bool {
        self.slots().is_some()
    }
}

/// Why a source could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// The range is out of bounds.
    #[error(
        "The bytes {start}..{end} were to be read from a source of {len_bytes} bytes. The manifest that the reader \
         follows does not describe this source."
    )]
    OutOfBounds {
        /// The first requested byte.
        start: u64,
        /// One past the last requested byte.
        end: u64,
        /// The length of the source.
        len_bytes: u64,
    },
    /// The bytes have to be copied, and there is no memory for the copy.
    #[error(
        "There is no memory for a copy of {asked_bytes} bytes. Check the free memory of this host, or make chunks \
         smaller."
    )]
    NoMemory {
        /// The requested length.
        asked_bytes: u64,
        /// The allocator's error.
        source: TryReserveError,
    },
    /// The engine could not copy the bytes from its device.
    #[error("The source could not be copied off its device. {0}")]
    Copy(#[from] CopyError),
    /// The bytes of a spread part are not where they were said to be.
    #[error("The source could not be gathered from the memory of its tensors. {0}")]
    Spread(#[from] SpreadError),
    /// The device returned no bytes for longer than any copy may take.
    #[error(
        "A read of {asked_bytes} bytes had not ended after {waited_ms} ms. The device hangs, or copies that never ended \
         keep all of its slots: look for its first error, and restart this process if there is no other."
    )]
    TimedOut {
        /// The requested length.
        asked_bytes: u64,
        /// The time that the reader waited.
        waited_ms: u64,
    },
    /// The file was changed since it was published.
    #[error(
        "{} changed while it was served. Write new content under another name and rename it into place.",
        path.display()
    )]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// Lent memory is not where it was.
    #[error(
        "The publisher freed, moved or cut off memory that it had lent (bytes {start}..{end} of the payload) before the \
         version was released. Wait for the release, or publish a copy (hold=\"stage\")."
    )]
    Gone {
        /// The first byte that is gone.
        start: u64,
        /// One past the last one.
        end: u64,
    },
    /// Lent memory has other bytes than when it was read first.
    #[error(
        "The publisher wrote to memory that it had lent (bytes {start}..{end} of the payload) before the version was \
         released. Wait for the release, or publish a copy (hold=\"stage\")."
    )]
    Overwritten {
        /// The first byte that was compared.
        start: u64,
        /// One past the last one.
        end: u64,
    },
    /// The server that it is received from gave it up.
    #[error("The version is relayed, and the server that it comes from gave it up before it was whole.")]
    GivenUp,
    /// The system does not copy lent memory.
    #[error(
        "Memory that was lent cannot be read: {source}. Lent memory is read by process_vm_readv, which this container \
         must permit; otherwise publish a copy (hold=\"stage\")."
    )]
    Foreign {
        /// The system's error.
        source: io::Error,
    },
    /// The owner of lent memory did not say whether it is still there.
    #[error(
        "The program that lent the memory did not answer for {waited_ms} ms whether it is still there: one of its \
         threads holds Python's interpreter lock for that long."
    )]
    Unconfirmed {
        /// The time waited.
        waited_ms: u64,
    },
    /// The file cannot be read.
    #[error("{} could not be read: {source}.", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl SourceError {
    /// Whether a retry would fail as well: the bytes changed or never existed, or their device failed. A refusal by the
    /// system may be temporary.
    pub fn is_final(&self) -> bool {
        match self {
            Self::Copy(error) => error.is_final(),
            Self::Io { .. } | Self::NoMemory { .. } | Self::TimedOut { .. } | Self::Unconfirmed { .. } => {
                false
            }
            Self::OutOfBounds { .. } | Self::Spread(_) | Self::Foreign { .. } | Self::GivenUp => true,
            changed => changed.is_changed(),
        }
    }

    /// Whether the publisher changed or freed the bytes while they were on offer.
    pub fn is_changed(&self) -> bool {
        matches!(self, Self::Changed { .. } | Self::Gone { .. } | Self::Overwritten { .. })
    }

    /// The bytes of the payload that the publisher changed or freed, if they are known.
    pub fn changed_range(&self) -> Option<Range<u64>> {
        match self {
            Self::Gone { start, end } | Self::Overwritten { start, end } => Some(*start..*end),
            _ => None,
        }
    }

    /// The error for another owner's memory of `range` that the kernel could not copy.
    pub(crate) fn of_foreign(range: &Range<u64>, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::PermissionDenied | io::ErrorKind::Unsupported => Self::Foreign { source },
            _ => Self::Gone { start: range.start, end: range.end },
        }
    }
}

/// A source in host memory. Reading it neither copies nor waits.
#[derive(Clone)]
pub struct HostSource {
    bytes: Bytes,
    shared: Result<SharedRange, NotShared>,
}

impl HostSource {
    /// Serves `bytes`, shared with every reader.
    pub fn new(bytes: Bytes) -> Self {
        Self { bytes, shared: Err(NotShared::Private) }
    }

    /// Serves `bytes`, and shares them as `shared`, which is of the same memory, or does not for its reason.
    pub fn sharing(bytes: Bytes, shared: Result<SharedRange, NotShared>) -> Self {
        Self { bytes, shared }
    }

    /// Serves the bytes of `region`, and [shares](Source::shared) them if their memory can be shared.
    pub fn of_region(region: Region) -> Self {
        let shared = region.shared();
        Self { bytes: region.freeze(), shared }
    }

    /// Serves `bytes`, and shares them: `descriptor` is the memfd that begins with them, of which they are a
    /// [`Sealed`](crate::Sealed) mapping. They are held until the last clone of what is shared is dropped. Fails if the
    /// system does not know the descriptor.
    pub fn of_sealed(bytes: Bytes, descriptor: OwnedFd) -> io::Result<Self> {
        let file = Arc::new(SharedFile::new(descriptor)?);
        let shared = SharedRange::new(file, 0, bytes.len() as u64, bytes.clone());
        Ok(Self { bytes, shared: Ok(shared) })
    }

    /// All bytes.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    fn slice(&self, range: Range<u64>) -> Result<Bytes, SourceError> {
        check_range(&range, self.len_bytes())?;
        // Both ends are within the bytes, whose length is a `usize`.
        Ok(self.bytes.slice(range.start as usize..range.end as usize))
    }
}

impl Source for HostSource {
    fn len_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read(&self, range: Range<u64>) -> BoxFuture<'_, Result<Bytes, SourceError>> {
        Box::pin(ready(self.slice(range)))
    }

    fn is_in_place(&self, range: &Range<u64>) -> bool {
        range.end <= self.len_bytes()
    }

    fn shared(&self) -> Result<SharedRange, NotShared> {
        self.shared.clone()
    }
}

impl fmt::Debug for HostSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostSource").field("len_bytes", &self.len_bytes()).finish()
    }
}

/// Checks a range before it is read.
pub(crate) fn check_range(range: &Range<u64>, len_bytes: u64) -> Result<(), SourceError> {
    let Range { start, end } = *range;
    let inside = start <= end && end <= len_bytes;
    inside.then_some(()).ok_or(SourceError::OutOfBounds { start, end, len_bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_host_source_shares_its_bytes() {
        let bytes = Bytes::from(vec![1, 2, 3, 4]);
        let source = HostSource::new(bytes.clone());
        let part = source.read(1..3).await.unwrap();
        assert_eq!(part.as_ptr(), bytes[1..].as_ptr());
        assert_eq!(&part[..], [2, 3]);
        assert!(source.read(4..4).await.unwrap().is_empty());
    }

    #[tokio::test]
    #[expect(clippy::reversed_empty_ranges, reason = "a reader may ask for any two numbers")]
    async fn ranges_outside_are_refused() {
        let source = HostSource::new(Bytes::from_static(b"four"));
        for range in [0..5, 5..5, 3..2, u64::MAX..u64::MAX, 1..u64::MAX] {
            assert!(matches!(source.read(range).await, Err(SourceError::OutOfBounds { len_bytes: 4, .. })));
        }
    }
}
