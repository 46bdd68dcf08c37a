use std::{io, ops::Range, os::fd::BorrowedFd, ptr, ptr::NonNull};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

/// A private memory mapping, unmapped on drop: zeroed memory from the kernel, or a read-only file.
///
/// It starts on a page, so it is more than aligned for payloads (256 bytes). It owns addresses, not access: reads and
/// writes are governed by [`Region`](crate::Region), through the one owner that a mapping is given.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is an address range of the whole process; no thread is special to it.
unsafe impl Send for Mapping {}
// SAFETY: `&Mapping` gives numbers and advice to the kernel only, and no access to the bytes.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// The length of the mapping for `len` bytes: whole pages. `None` on overflow.
    pub(crate) fn mapped_len(len: usize) -> Option<usize> {
        len.checked_next_multiple_of(PAGE_BYTES)
            .filter(|&bytes| bytes <= isize::MAX as usize)
    }

    /// Maps `len` bytes, rounded up to whole pages, of the size that `pages` says. Costs two system calls; the kernel finds
    /// the memory itself only when it is touched. Fails where the kernel refuses, and for a length of zero.
    pub(crate) fn new(len: usize, pages: PageSize) -> io::Result<Self> {
        let len = Self::mapped_len(len).ok_or(io::ErrorKind::OutOfMemory)?;
        let (access, kind) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: without MAP_FIXED the kernel picks a range that nothing else in this process uses.
        let address = unsafe { mmap_anonymous(ptr::null_mut(), len, access, kind) }?;
        let start = NonNull::new(address.cast()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        let mapping = Self { start, len };
        mapping.prefer(pages, 0..len);
        Ok(mapping)
    }

    /// Maps `len` bytes of a file of plain pages from `offset` on, a multiple of a page, to be read only. Fails where
    /// the kernel refuses. The caller must ensure that so many bytes exist and stay: reading missing ones kills the
    /// process.
    pub(crate) fn of_file(fd: BorrowedFd<'_>, offset: u64, len: usize) -> io::Result<Self> {
        let len = Self::mapped_len(len).ok_or(io::ErrorKind::OutOfMemory)?;
        // Private, though nobody writes: before Linux 6.7 a sealed file cannot be mapped as a shared one.
        // SAFETY: without MAP_FIXED the kernel picks a range that nothing else in this process uses.
        let address = unsafe { mmap(ptr::null_mut(), len, ProtFlags::READ, MapFlags::PRIVATE, fd, offset) }?;
        let start = NonNull::new(address.cast()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(Self { start, len })
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Populates all pages now, on this thread: near it, on a machine of several nodes. If the kernel cannot, the first
    /// writer takes the page faults.
    pub(crate) fn prefault(&self) {
        let pieces = (0..self.len)
            .step_by(PIECE_BYTES)
            .map(|start| start..self.len.min(start + PIECE_BYTES));
        for piece in pieces {
            if self.populate(piece).is_err() {
                return;
            }
        }
    }

    /// Populates the pages of `range` now. Changes no content, so others may read and write meanwhile. Fails outside of
    /// this mapping, and if the kernel cannot (before Linux 5.14) or has no memory.
    pub(crate) fn populate(&self, range: Range<usize>) -> io::Result<()> {
        self.advise(range, Advice::LinuxPopulateWrite)
    }

    /// Advises the page size for the unpopulated memory of `range`.
    pub(crate) fn prefer(&self, size: PageSize, range: Range<usize>) {
        let advice = match size {
            PageSize::Huge => Advice::LinuxHugepage,
            PageSize::Small => Advice::LinuxNoHugepage,
        };
        // A kernel without huge pages refuses; small ones work as well, mostly slower.
        let _ = self.advise(range, advice);
    }

    /// Excludes this range from forks, so that its pages stay the parent's own. A child that touches it would be
    /// killed; one that only executes another program does not.
    pub(crate) fn keep_from_children(&self) {
        // Refused: a fork costs the parent what it costs for all other memory.
        let _ = self.advise(0..self.len, Advice::LinuxDontFork);
    }

    /// Gives the kernel advice that changes neither content nor access.
    fn advise(&self, range: Range<usize>, advice: Advice) -> io::Result<()> {
        if range.is_empty() || range.end > self.len {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        if cfg!(miri) {
            return Err(io::ErrorKind::Unsupported.into()); // Its kernel takes no advice.
        }
        let start = self.start.as_ptr().wrapping_add(range.start);
        // SAFETY: the range lies inside this mapping, which `&self` keeps, and none of the callers' advice changes it.
        Ok(unsafe { madvise(start.cast(), range.len(), advice) }?)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `new` or `of_file` mapped exactly this range, and whoever reads or writes it holds this mapping alive.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "munmap of a whole mapping: {unmapped:?}");
    }
}

/// The smallest page of any Linux. Where pages are larger the kernel rounds up by itself.
pub(crate) const PAGE_BYTES: usize = 4096;

/// A huge page of most systems. Where it is another size, pieces that begin on this one cost a little more.
pub(crate) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// The bytes that one call populates: a few milliseconds of kernel work, so that a released mapping is not held for
/// long, and about the length of a chunk, so that several threads stay near the first chunks.
pub(crate) const PIECE_BYTES: usize = 2 * HUGE_PAGE_BYTES;

/// The page size of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PageSize {
    /// Huge pages if available: large tensors touch hundreds of thousands of small ones.
    Huge,
    Small,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_is_whole_pages_on_a_page() {
        let mapping = Mapping::new(5000, PageSize::Huge).unwrap();
        assert_eq!(mapping.len(), 8192);
        assert_eq!(mapping.start().addr().get() % PAGE_BYTES, 0);
    }

    #[test]
    fn impossible_lengths_are_refused() {
        assert!(Mapping::new(0, PageSize::Huge).is_err());
        assert!(Mapping::new(usize::MAX, PageSize::Huge).is_err());
        assert!(Mapping::new(isize::MAX as usize - PAGE_BYTES, PageSize::Huge).is_err());
    }

    #[test]
    fn populated_memory_is_zero_and_can_be_written() {
        for pages in [PageSize::Huge, PageSize::Small] {
            let mapping = Mapping::new(3 * PIECE_BYTES + 1, pages).unwrap();
            mapping.prefer(PageSize::Small, PIECE_BYTES..2 * PIECE_BYTES);
            mapping.prefault();
            for offset in (0..mapping.len()).step_by(PAGE_BYTES) {
                // SAFETY: the byte lies in the mapping, which nobody else has.
                let byte = unsafe { mapping.start().add(offset) };
                // SAFETY: as above; the kernel initialised it.
                assert_eq!(unsafe { byte.read() }, 0);
                // SAFETY: as above.
                unsafe { byte.write(1) };
            }
        }
    }

    #[test]
    fn nothing_is_populated_outside() {
        let mapping = Mapping::new(5000, PageSize::Huge).unwrap();
        for range in [0..0, 8192..8193, 0..8193, 4096..usize::MAX] {
            assert!(mapping.populate(range).is_err());
        }
    }
}
