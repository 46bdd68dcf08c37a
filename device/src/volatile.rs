use std::{
    any::Any,
    collections::TryReserveError,
    fmt,
    io::{self, Write},
    ops::Range,
    ptr::NonNull,
    sync::Arc,
};

use bytes::Bytes;

use crate::region::Region;

/// Shared bytes that others may write while they are read: what [`Bytes`] is for constant memory.
///
/// Why: the compiler assumes that bytes behind a reference are constant, so no reference may ever point to memory that
/// another language writes. This type holds a pointer instead, and returns only copies of its bytes. A copy made during
/// a write is a mixture of old and new bytes, nothing worse: hashing and encoding read the same copy.
#[derive(Clone)]
pub struct VolatileBytes {
    start: NonNull<u8>,
    len: usize,
    /// Keeps the memory. `None` only for empty bytes.
    owner: Option<Arc<dyn Any + Send + Sync>>,
}

impl VolatileBytes {
    /// No bytes.
    pub const EMPTY: Self = Self { start: NonNull::dangling(), len: 0, owner: None };

    /// The `len` bytes at `start`, which `owner` keeps.
    ///
    /// # Safety
    ///
    /// While `owner` lives, `len` initialised bytes lie at `start`, which any thread may read. They may change
    /// meanwhile, but no `&mut` reference to them exists.
    pub unsafe fn new(start: NonNull<u8>, len: usize, owner: impl Any + Send + Sync) -> Self {
        Self { start, len, owner: Some(Arc::new(owner)) }
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of the bytes. Those of a [`Region`] may be written there for as long as `self` or a clone lives,
    /// unless they are or will be read as [`Bytes`] too ([`Region::freeze_volatile`]). For bytes of any other owner,
    /// that owner decides who may write them.
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.start
    }

    /// The bytes of `range`, in the same memory; `None` if the range is out of bounds.
    pub fn slice(&self, range: Range<usize>) -> Option<Self> {
        let len = range.end.checked_sub(range.start).filter(|_| range.end <= self.len)?;
        // SAFETY: `range` ends within the bytes, so this stays within the memory that `owner` keeps, or one past it.
        let start = unsafe { self.start.add(range.start) };
        Some(Self { start, len, owner: self.owner.clone() })
    }

    /// The same bytes, which also keep `other` alive: it is dropped after their owner.
    #[must_use]
    pub fn keep(self, other: impl Any + Send + Sync) -> Self {
        Self { owner: Some(Arc::new((self.owner, other))), ..self }
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

    /// Appends a copy of the bytes to `out`. Fails, and leaves `out` unchanged, when there is no memory.
    pub fn append_to(&self, out: &mut Vec<u8>) -> Result<(), TryReserveError> {
        out.try_reserve_exact(self.len)?;
        let spare = NonNull::from(out.spare_capacity_mut()).cast::<u8>();
        // SAFETY: `owner` keeps `len` readable bytes at `start`, and `out`, which is exclusive, has `len` spare bytes.
        unsafe { self.start.copy_to_nonoverlapping(spare, self.len) };
        let len = out.len() + self.len;
        // SAFETY: the capacity was reserved, and all bytes up to `len` are written.
        unsafe { out.set_len(len) };
        Ok(())
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

// SAFETY: any thread may read the bytes (`new` requires it) and drop the owner (`Send`).
unsafe impl Send for VolatileBytes {}
// SAFETY: likewise; through a shared reference the bytes are only read.
unsafe impl Sync for VolatileBytes {}

impl From<Region> for VolatileBytes {
    fn from(region: Region) -> Self {
        region.freeze_volatile().1
    }
}

impl Region {
    /// Like [`freeze`](Self::freeze), and also returns the same memory as volatile bytes, which others may write
    /// through [`VolatileBytes::as_ptr`]. From the first such write on, the [`Bytes`] must not be read any more: the
    /// writer guarantees that.
    pub fn freeze_volatile(self) -> (Bytes, VolatileBytes) {
        let (start, len, region) = (self.start(), self.len(), Arc::new(self));
        let volatile = VolatileBytes { start, len, owner: Some(Arc::clone(&region) as Arc<_>) };
        (Bytes::from_owner(Frozen(region)), volatile)
    }
}

/// A region that is no longer written through its own methods.
struct Frozen(Arc<Region>);

impl AsRef<[u8]> for Frozen {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for VolatileBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VolatileBytes").field("len", &self.len).finish_non_exhaustive()
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
        let mut appended = vec![9];
        part.append_to(&mut appended).unwrap();
        assert_eq!((appended[0], &appended[1..]), (9, &copy[..]));
    }

    #[test]
    #[expect(clippy::reversed_empty_ranges, reason = "a caller may ask for any two numbers")]
    fn parts_outside_are_refused() {
        let bytes = VolatileBytes::from(Region::from_owner(counting(10)));
        for range in [0..11, 11..11, 3..2, usize::MAX..usize::MAX] {
            assert!(bytes.slice(range).is_none());
        }
        assert!(bytes.slice(10..10).unwrap().is_empty());
        assert!(VolatileBytes::EMPTY.slice(0..0).unwrap().is_empty());
    }

    #[test]
    fn bytes_written_by_others_are_copied() {
        let (bytes, volatile) = Region::from_owner(counting(100)).freeze_volatile();
        assert_eq!(bytes[..], counting(100));
        drop(bytes);
        // SAFETY: 7 is within the 100 bytes, and nobody reads the `Bytes` any more.
        let at = unsafe { volatile.as_ptr().add(7) };
        // SAFETY: likewise.
        unsafe { at.write(99) };
        let mut copy = vec![];
        volatile.append_to(&mut copy).unwrap();
        assert_eq!((copy[7], copy[8]), (99, 8));
    }

    #[test]
    fn bytes_longer_than_the_buffer_are_written_completely() {
        let model = counting(2 * WRITE_BYTES + 77);
        let mut written = vec![];
        VolatileBytes::from(Region::from_owner(model.clone()))
            .write_to(&mut written)
            .unwrap();
        assert!(written == model);
        VolatileBytes::EMPTY.write_to(&mut written).unwrap();
        assert_eq!(written.len(), model.len());
    }

    #[test]
    fn dropping_the_last_part_returns_the_memory() {
        let memory = HostMemory::new(u64::MAX);
        let (loan, returned) = Loan::new();
        let bytes = VolatileBytes::from(memory.allocate(100).unwrap());
        let lent = loan.lend_volatile(bytes);
        drop(loan);
        let part = lent.slice(10..20).unwrap();
        drop(lent);
        assert!(!returned.is_returned() && memory.stats().in_use_bytes > 0);
        drop(part);
        assert!(returned.is_returned() && memory.stats().in_use_bytes == 0);
    }
}
