use std::{
    any::Any,
    fmt,
    io::{self, Write},
    ops::Range,
    ptr::NonNull,
    sync::Arc,
};

use bytes::Bytes;

use crate::{mapping::Mapping, region::Region};

/// Shared bytes of a [`Region`] that others may write while they are read: what [`Bytes`] is for constant memory.
///
/// Why: the compiler assumes that bytes behind a reference are constant, so no reference may ever point to memory that
/// another language writes. This type holds a pointer instead, and returns only copies of its bytes. A copy made during
/// a write is a mixture of old and new bytes, nothing worse: what is computed from a copy agrees with that copy.
#[derive(Clone)]
pub struct VolatileBytes {
    start: NonNull<u8>,
    len: usize,
    /// Keeps the memory.
    owner: Arc<dyn Any + Send + Sync>,
}

impl VolatileBytes {
    /// The first `len` bytes of `mapping`, which it has. `keep` is dropped after they are unmapped.
    pub(crate) fn of_mapping(mapping: Mapping, len: usize, keep: impl Any + Send + Sync) -> Self {
        Self { start: mapping.start(), len, owner: Arc::new((mapping, keep)) }
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of the bytes, which may be written there for as long as `self` or a clone lives.
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.start
    }

    /// The bytes of `range`, in the same memory; `None` if the range is out of bounds.
    pub fn slice(&self, range: Range<usize>) -> Option<Self> {
        let len = range.end.checked_sub(range.start).filter(|_| range.end <= self.len)?;
        // SAFETY: `range` ends within the bytes, so this stays within the memory that `owner` keeps, or one past it.
        let start = unsafe { self.start.add(range.start) };
        Some(Self { start, len, owner: Arc::clone(&self.owner) })
    }

    /// The same bytes, which also keep `other` alive: it is dropped after their owner.
    #[must_use]
    pub fn keep(self, other: impl Any + Send + Sync) -> Self {
        Self { owner: Arc::new((self.owner, other)), ..self }
    }

    /// Copies all bytes to `out`.
    ///
    /// # Panics
    ///
    /// When `out` has a different length.
    pub fn copy_to(&self, out: &mut [u8]) {
        assert_eq!(out.len(), self.len, "as long as the bytes");
        // SAFETY: `owner` keeps `len` readable bytes at `start`. `out` is exclusive, so they do not overlap.
        unsafe { self.start.copy_to_nonoverlapping(NonNull::from(out).cast(), self.len) };
    }

    /// Writes all bytes to `writer`, through a buffer that stays in the processor's cache.
    pub fn write_to(&self, writer: &mut impl Write) -> io::Result<()> {
        let mut buffer = vec![0; self.len.min(WRITE_BYTES)];
        for start in (0..self.len).step_by(WRITE_BYTES) {
            let piece = self.slice(start..self.len.min(start + WRITE_BYTES)).expect("within");
            let buffer = &mut buffer[..piece.len];
            piece.copy_to(buffer);
            writer.write_all(buffer)?;
        }
        Ok(())
    }
}

/// The size of the buffer of `write_to`. Measured with 512 MiB written to shared memory (AMD EPYC, 1 MiB of L2): 104 ms
/// with a buffer of this size, 95 ms without one.
const WRITE_BYTES: usize = 256 << 10;

// SAFETY: any thread may read the bytes of a region and drop the owner (`Send`).
unsafe impl Send for VolatileBytes {}
// SAFETY: likewise; through a shared reference the bytes are only read.
unsafe impl Sync for VolatileBytes {}

impl From<Region> for VolatileBytes {
    /// Gives up the region: from now on its bytes are only copied, so others may write to them.
    fn from(region: Region) -> Self {
        Self { start: region.start(), len: region.len(), owner: Arc::new(region) }
    }
}

impl fmt::Debug for VolatileBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VolatileBytes").field("len", &self.len).finish_non_exhaustive()
    }
}

/// Shared bytes in host memory; the type says whether others may write them.
#[derive(Debug, Clone)]
pub enum HostBytes {
    /// Constant bytes, shared with readers.
    Stable(Bytes),
    /// Bytes that others may write: each reader gets a copy.
    Volatile(VolatileBytes),
}

impl HostBytes {
    /// The number of bytes.
    pub fn len(&self) -> usize {
        match self {
            Self::Stable(bytes) => bytes.len(),
            Self::Volatile(bytes) => bytes.len(),
        }
    }

    /// Whether there is no byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes of `range`, in the same memory.
    ///
    /// # Panics
    /// When the range is out of bounds.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Self {
        match self {
            Self::Stable(bytes) => Self::Stable(bytes.slice(range)),
            Self::Volatile(bytes) => Self::Volatile(bytes.slice(range).expect("within the bytes")),
        }
    }

    /// Copies all bytes to `out`.
    ///
    /// # Panics
    /// When `out` has a different length.
    pub fn copy_to(&self, out: &mut [u8]) {
        match self {
            Self::Stable(bytes) => out.copy_from_slice(bytes),
            Self::Volatile(bytes) => bytes.copy_to(out),
        }
    }

    /// Constant bytes: the same memory, or a copy of bytes that others may write.
    pub fn into_stable(self) -> Bytes {
        match self {
            Self::Stable(bytes) => bytes,
            Self::Volatile(bytes) => {
                let mut copy = vec![0; bytes.len()];
                bytes.copy_to(&mut copy);
                copy.into()
            }
        }
    }

    /// Writes all bytes to `writer`. Whatever it computes from them, such as a checksum, agrees with what it writes.
    pub fn write_to(&self, writer: &mut impl Write) -> io::Result<()> {
        match self {
            Self::Stable(bytes) => writer.write_all(bytes),
            Self::Volatile(bytes) => bytes.write_to(writer),
        }
    }
}

impl From<Bytes> for HostBytes {
    fn from(bytes: Bytes) -> Self {
        Self::Stable(bytes)
    }
}

impl From<VolatileBytes> for HostBytes {
    fn from(bytes: VolatileBytes) -> Self {
        Self::Volatile(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HostMemory, Loan};

    fn counting(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i % 251) as u8).collect()
    }

    #[test]
    fn slices_of_slices_are_copied() {
        let bytes = VolatileBytes::from(Region::from_owner(counting(1000)));
        let part = bytes.slice(100..300).unwrap().slice(50..60).unwrap();
        let mut copy = [0; 10];
        part.copy_to(&mut copy);
        assert_eq!(copy, counting(160)[150..]);
        assert_eq!(HostBytes::from(part).into_stable(), copy[..]);
    }

    #[test]
    #[expect(clippy::reversed_empty_ranges, reason = "a caller may ask for any two numbers")]
    fn parts_outside_are_refused() {
        let bytes = VolatileBytes::from(Region::from_owner(counting(10)));
        for range in [0..11, 11..11, 3..2, usize::MAX..usize::MAX] {
            assert!(bytes.slice(range).is_none());
        }
        assert!(bytes.slice(10..10).unwrap().is_empty());
    }

    #[test]
    fn bytes_written_by_others_are_copied() {
        let volatile = VolatileBytes::from(Region::from_owner(counting(100)));
        let before = HostBytes::from(volatile.clone()).into_stable();
        // SAFETY: 7 is within the 100 bytes.
        let at = unsafe { volatile.as_ptr().add(7) };
        // SAFETY: bytes of a region may be written, and no reference points to them.
        unsafe { at.write(99) };
        let after = HostBytes::from(volatile).into_stable();
        assert_eq!((before[7], after[7], after[8]), (7, 99, 8));
    }

    #[test]
    fn bytes_longer_than_the_buffer_are_written_completely() {
        let model = counting(2 * WRITE_BYTES + 77);
        let mut written = vec![];
        VolatileBytes::from(Region::from_owner(model.clone()))
            .write_to(&mut written)
            .unwrap();
        assert!(written == model);
        VolatileBytes::from(Region::default()).write_to(&mut written).unwrap();
        assert_eq!(written.len(), model.len());
    }

    #[test]
    fn dropping_the_last_part_returns_the_memory() {
        let memory = HostMemory::new(u64::MAX);
        let (other, dropped) = Loan::new();
        let bytes = VolatileBytes::from(memory.allocate(100).unwrap()).keep(other);
        let part = bytes.slice(10..20).unwrap();
        drop(bytes);
        assert!(!dropped.is_returned() && memory.stats().in_use_bytes > 0);
        drop(part);
        assert!(dropped.is_returned() && memory.stats().in_use_bytes == 0);
    }
}
