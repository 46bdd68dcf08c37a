use std::{
    fmt,
    ops::{Deref, DerefMut, Range},
};

use crate::{
    DeviceBuffer,
    cuda::share::ShareError,
    engine::CopyError,
    host_memory::AllocError,
    id::Id,
    ledger::Entry,
    pieces::{Claim, Piece},
    region::Region,
    slot::Slot,
    source::BoxFuture,
    spread::SpreadError,
};

/// The destination of one payload's bytes.
///
/// Each range is opened, filled and written; ranges may be open at the same time. A sink does not know which ranges
/// were filled: the caller tracks whether the payload is complete (in tensor-relay, `protocol::Assembly`).
pub trait Sink: Send + Sync + fmt::Debug {
    /// The length of the whole payload.
    fn len_bytes(&self) -> u64;

    /// Lends memory for the bytes of `range`, of unspecified content. May wait for a staging slot, and for an abandoned
    /// copy to these bytes. No byte but padding is lent twice at a time. Cancel safe.
    fn open(&self, range: Range<u64>) -> BoxFuture<'_, Result<Target, SinkError>>;

    /// Writes the bytes of a filled target; they are in place when this resolves. Drop a target that was not filled:
    /// the content of its range is then unspecified.
    fn write(&self, target: Target) -> BoxFuture<'_, Result<(), SinkError>>;

    /// Copies bytes of `from` to their places, within the device that both lie on: for each offset in `from`, as many
    /// as its range of the payload has. Meanwhile all of the sink is being written. Waits for copies that were
    /// abandoned, and for the end of this one. Cancelling stops no copy.
    fn copy_within<'a>(
        &'a self,
        from: &'a DeviceBuffer,
        places: &'a [(u64, Range<u64>)],
    ) -> BoxFuture<'a, Result<(), SinkError>> {
        let _ = places;
        let device = format!("{}, or of the host", from.device().name());
        Box::pin(std::future::ready(Err(ShareError::NotShareable { device }.into())))
    }
}

/// Why a sink refused a range or a target.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SinkError {
    /// The range is out of bounds.
    #[error(
        "The bytes {start}..{end} were to be written to a sink of {len_bytes} bytes. The manifest that the writer \
         follows does not describe this sink."
    )]
    OutOfBounds {
        /// The first requested byte.
        start: u64,
        /// One past the last requested byte.
        end: u64,
        /// The length of the sink.
        len_bytes: u64,
    },
    /// Some byte of the range is lent to another target, or to be lent as soon as a slot is free. Retry when that
    /// target is written or dropped.
    #[error(
        "The bytes {start}..{end} are being written already, in whole or in part. Wait for the other writer of this \
         range."
    )]
    Busy {
        /// The first requested byte.
        start: u64,
        /// One past the last requested byte.
        end: u64,
    },
    /// The sink cannot be committed while bytes are lent or being copied.
    #[error(
        "{lent_bytes} of {len_bytes} bytes are still lent to writers. Commit when all targets are written or dropped."
    )]
    StillLent {
        /// The bytes that are lent, being copied, or waiting for a slot.
        lent_bytes: u64,
        /// The length of the sink; in host memory, of its parts.
        len_bytes: u64,
    },
    /// The sink is already committed.
    #[error(
        "The sink was committed, and its bytes are no longer its own. Make a new sink for a new version."
    )]
    Committed,
    /// The target belongs to another sink. It was dropped, and nothing was written.
    #[error("The target was opened by another sink. Write it to the sink that opened it.")]
    ForeignTarget,
    /// No memory to stage a range that spans several places, or is longer than a slot.
    #[error("A chunk could not be staged in host memory before it goes to its place.")]
    NoMemory(#[from] AllocError),
    /// The engine could not copy the bytes to its device.
    #[error("The bytes could not be copied to the sink's device.")]
    Copy(#[from] CopyError),
    /// The bytes could not be copied within the sink's device.
    #[error("The bytes could not be copied within the sink's device.")]
    Within(#[from] ShareError),
    /// The bytes of a spread part have no place. Some bytes of the range may have been written.
    #[error("A chunk could not be spread over the memory of its tensors.")]
    Spread(#[from] SpreadError),
}

/// The memory that a sink lends for one range: dereferences to exactly the range's bytes.
///
/// In host memory this is the destination itself, if the range lies in one part. Dropping the target gives its range
/// back to the sink, with unspecified content.
pub struct Target {
    /// The sink that opened this target.
    pub(crate) sink: Id,
    pub(crate) range: Range<u64>,
    pub(crate) lent: Lent,
}

impl Target {
    /// The range of the payload that this target is for.
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }
}

impl Deref for Target {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.lent {
            Lent::Piece(piece) => piece.bytes(),
            Lent::Staged { slot, len, .. } => &slot[..*len],
            Lent::Scattered { staging, .. } | Lent::Overlong { staging, .. } => staging,
        }
    }
}

impl DerefMut for Target {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.lent {
            Lent::Piece(piece) => piece.bytes_mut(),
            Lent::Staged { slot, len, .. } => &mut slot[..*len],
            Lent::Scattered { staging, .. } | Lent::Overlong { staging, .. } => staging,
        }
    }
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Target").field("range", &self.range).finish_non_exhaustive()
    }
}

/// The memory of a target.
pub(crate) enum Lent {
    /// The destination itself, in the memory of a host sink.
    Piece(Piece),
    /// A slot, from which the bytes are copied to the device. `len` bytes of it are the target.
    Staged { slot: Slot, len: usize, entry: Entry },
    /// Memory of the range's length, from which the bytes are copied to the pieces, and to the spread parts that it
    /// touches: these are claimed.
    Scattered { staging: Region, pieces: Vec<Piece>, claim: Option<Claim> },
    /// Memory of the range's length, longer than a slot, from which the bytes are copied slot by slot.
    Overlong { staging: Region, entry: Entry },
}

/// Checks a range before memory is lent for it.
pub(crate) fn check_range(range: &Range<u64>, len_bytes: u64) -> Result<(), SinkError> {
    let Range { start, end } = *range;
    let inside = start <= end && end <= len_bytes;
    inside.then_some(()).ok_or(SinkError::OutOfBounds { start, end, len_bytes })
}
