use std::{io, ops::Range, os::fd::BorrowedFd, ptr, ptr::NonNull};

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

/// A memory mapping, unmapped on drop: zeroed memory from the kernel, or a file.
///
/// It starts on a page, which satisfies the alignment of payloads (256 bytes). A mapping owns addresses and gives no
/// access to the bytes: its one owner does, usually through a [`Region`](crate::Region).
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is an address range of the whole process, and bound to no thread.
unsafe impl Send for Mapping {}
// SAFETY: `&Mapping` only returns address and length and advises the kernel; it gives no access to the bytes.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// The length of the mapping for `len` bytes: whole pages. `None` on overflow.
    pub(crate) fn mapped_len(len: usize) -> Option<usize> {
        len.checked_next_multiple_of(PAGE_BYTES)
            .filter(|&bytes| bytes <= isize::MAX as usize)
    }

    /// Maps `len` bytes, rounded up to whole pages, preferably of the size `pages`. Costs two system calls; the kernel
    /// allocates each page when it is first touched. Fails if the kernel refuses, and for a length of zero.
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

    /// Maps `len` bytes of a file of plain pages, from `offset` on, which is a multiple of a page. Costs a few system
    /// calls: no page is mapped or copied yet. Where the file has huge pages, they are mapped as such. Fails if the kernel
    /// refuses. The caller must ensure that the file has these bytes and keeps them: touching missing ones kills the
    /// process.
    pub(crate) fn of_file(fd: BorrowedFd<'_>, offset: u64, len: usize, view: View) -> io::Result<Self> {
        let len = Self::mapped_len(len).ok_or(io::ErrorKind::OutOfMemory)?;
        let (access, kind) = view.flags();
        let hint = Self::find_aligned(len).unwrap_or(ptr::null_mut());
        // SAFETY: without MAP_FIXED the kernel picks a range that nothing else in this process uses.
        let address = unsafe { mmap(hint.cast(), len, access, kind, fd, offset) }?;
        let start = NonNull::new(address.cast()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(Self { start, len })
    }

    /// A free address for `len` bytes that begin on a huge page, where those are useful. Another thread may take it.
    fn find_aligned(len: usize) -> Option<*mut u8> {
        let room = len.checked_add(HUGE_PAGE_BYTES).filter(|_| len >= HUGE_PAGE_BYTES)?;
        let free = Self::new(room, PageSize::Small).ok()?;
        let address = free.start().addr().get().next_multiple_of(HUGE_PAGE_BYTES);
        Some(ptr::without_provenance_mut(address))
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Populates all pages now, on this thread's NUMA node. If the kernel cannot, the first writer takes the page
    /// faults.
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

    /// Populates the pages of `range` now. Changes no content, so the owner may read and write meanwhile. Fails for a
    /// range outside of this mapping, and if the kernel cannot (before Linux 5.14) or has no memory.
    pub(crate) fn populate(&self, range: Range<usize>) -> io::Result<()> {
        self.advise(range, libc::MADV_POPULATE_WRITE)
    }

    /// Puts huge pages in the place of small and missing ones of a memfd in `range`, also where the system makes no huge
    /// ones at first use (`shmem_enabled`, by default), and where small ones were [preferred](Self::prefer): there the
    /// kernel would refuse. Small pages that are in use at this moment stay small. Changes no content. Fails before Linux
    /// 6.1, and if there are none.
    pub(crate) fn collapse(&self, range: Range<usize>) -> io::Result<()> {
        self.prefer(PageSize::Huge, range.clone());
        let address = self.start.addr().get();
        let mut start = (address + range.start).next_multiple_of(HUGE_PAGE_BYTES) - address;
        while start + HUGE_PAGE_BYTES <= range.end {
            let huge_page = start..start + HUGE_PAGE_BYTES;
            self.populate(start..start + PAGE_BYTES)?; // The kernel refuses a huge page without any page.
            match self.advise(huge_page.clone(), COLLAPSE) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {} // One of its pages was in use.
                advised => advised?,
            }
            start = huge_page.end;
        }
        Ok(())
    }

    /// Advises the page size for the unpopulated memory of `range`.
    pub(crate) fn prefer(&self, size: PageSize, range: Range<usize>) {
        let advice = match size {
            PageSize::Huge => libc::MADV_HUGEPAGE,
            PageSize::Small => libc::MADV_NOHUGEPAGE,
        };
        // A kernel without huge pages refuses; small pages work too, though usually slower.
        let _ = self.advise(range, advice);
    }

    /// Excludes this mapping from forks, so that its pages stay the parent's own. A child that touches them is killed;
    /// a child that only executes another program never does.
    pub(crate) fn keep_from_children(&self) {
        // If the kernel refuses, a fork makes these pages copy-on-write, like all other memory.
        let _ = self.advise(0..self.len, libc::MADV_DONTFORK);
    }

    /// Takes all access away, and keeps the addresses, which another test's memory would take otherwise: from now on they
    /// are as if freed. Only the kernel may be asked for the bytes.
    #[cfg(test)]
    pub(crate) fn take_access(&self) {
        let start = self.start.as_ptr().cast();
        // SAFETY: the range is this mapping's, and its test accesses the bytes by system calls alone.
        unsafe { rustix::mm::mprotect(start, self.len, rustix::mm::MprotectFlags::empty()) }.unwrap();
    }

    /// Gives the kernel advice that changes neither content nor access.
    fn advise(&self, range: Range<usize>, advice: i32) -> io::Result<()> {
        if range.is_empty() || range.end > self.len {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        if cfg!(miri) {
            return Err(io::ErrorKind::Unsupported.into()); // Miri does not implement madvise.
        }
        let start = self.start.as_ptr().wrapping_add(range.start);
        // SAFETY: the range lies inside this mapping, which `&self` keeps, and no advice of the callers changes its
        // content.
        match unsafe { libc::madvise(start.cast(), range.len(), advice) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `new` or `of_file` mapped exactly this range, and all its readers and writers keep this mapping
        // alive.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "munmap of a whole mapping: {unmapped:?}");
    }
}

/// What a mapping of a file is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum View {
    /// Reading.
    ReadOnly,
    /// Reading the file's own pages, so that locking them copies nothing. Before Linux 6.7, the kernel refuses this for a
    /// file with `F_SEAL_WRITE`.
    SharedReadOnly,
    /// Writing to the file.
    SharedWritable,
    /// Writing to copies of the file's pages, which the kernel makes at the first write to each.
    PrivateWritable,
}

impl View {
    fn flags(self) -> (ProtFlags, MapFlags) {
        let writable = ProtFlags::READ | ProtFlags::WRITE;
        match self {
            Self::ReadOnly => (ProtFlags::READ, MapFlags::PRIVATE),
            Self::SharedReadOnly => (ProtFlags::READ, MapFlags::SHARED),
            Self::SharedWritable => (writable, MapFlags::SHARED),
            Self::PrivateWritable => (writable, MapFlags::PRIVATE),
        }
    }
}

/// `MADV_COLLAPSE`, which neither `rustix` nor every `libc` has. Other advice is `libc`'s for its sake.
const COLLAPSE: i32 = 25;

/// The smallest page size of Linux. On systems with larger pages, the kernel rounds up.
pub(crate) const PAGE_BYTES: usize = 4096;

/// The huge page size of most systems. With another size, pieces aligned to this one cost a little more.
pub(crate) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// The bytes that one call populates: a few milliseconds of kernel work, so that a released mapping is not held for
/// long, and about the length of a chunk, so that several threads populate the first chunks first.
pub(crate) const PIECE_BYTES: usize = 2 * HUGE_PAGE_BYTES;

/// The page size of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PageSize {
    /// Huge pages if available: a large tensor takes hundreds of thousands of small pages.
    Huge,
    Small,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_consists_of_whole_pages() {
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

    /// Goal: memory in which small pages were preferred gets huge ones all the same, if the system has any. Method: compare
    /// with memory in which nothing was preferred.
    #[test]
    fn small_pages_of_a_memfd_are_replaced() {
        let [usual, small] = [PageSize::Huge, PageSize::Small].map(|size| {
            let (mapping, _memfd) =
                crate::Memfd::new(2 * PIECE_BYTES as u64).unwrap().map_writable().unwrap();
            mapping.prefer(size, 0..mapping.len());
            mapping.prefault();
            mapping.collapse(0..mapping.len()).is_ok()
        });
        assert_eq!(usual, small);
    }

    #[test]
    fn ranges_outside_are_not_populated() {
        let mapping = Mapping::new(5000, PageSize::Huge).unwrap();
        for range in [0..0, 8192..8193, 0..8193, 4096..usize::MAX] {
            assert!(mapping.populate(range).is_err());
        }
    }
}
