use std::{io, os::fd::BorrowedFd, ptr, ptr::NonNull, sync::Arc, thread};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

/// One private mapping, given back by `munmap` on drop: zeroed memory from the kernel, or a file that is only read.
///
/// It starts on a page, so it is more than aligned for payloads (256 bytes), and, unless it is a file's, it asks
/// for huge pages: large tensors touch hundreds of thousands of small ones otherwise. It owns addresses, not access: who may
/// read and write which bytes is the business of [`Region`](crate::Region), through the one owner that a
/// mapping is given.
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
    /// The bytes that a mapping for `len` bytes occupies: whole pages. `None` where no address space could
    /// hold it.
    pub(crate) fn mapped_len(len: usize) -> Option<usize> {
        len.checked_next_multiple_of(PAGE_BYTES)
            .filter(|&bytes| bytes <= isize::MAX as usize)
    }

    /// Maps `len` bytes, rounded up to whole pages. Costs two system calls; the kernel finds the memory
    /// itself only when it is touched. Fails where the kernel refuses, and for a length of zero.
    pub(crate) fn new(len: usize) -> io::Result<Self> {
        let len = Self::mapped_len(len).ok_or(io::ErrorKind::OutOfMemory)?;
        let (access, kind) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: without MAP_FIXED the kernel picks a range that nothing else in this process uses.
        let address = unsafe { mmap_anonymous(ptr::null_mut(), len, access, kind) }?;
        let start = NonNull::new(address.cast()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        let mapping = Self { start, len };
        mapping.ask_for_huge_pages();
        Ok(mapping)
    }

    /// Maps `len` bytes of a file of plain pages from `offset` on, a multiple of a page, to be read only. Fails where the
    /// kernel refuses. Whether so many bytes are there, and stay, is for the caller to know: those that are not kill
    /// whoever reads them.
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

    /// Lets the kernel find the memory now, on a thread of its own, ahead of whoever writes it first.
    ///
    /// Why: receiving into fresh memory was measured erratic and up to eight times slower than into memory
    /// that was touched before. The contents do not change, so the owner may write meanwhile. The thread
    /// holds the mapping only while one piece is at work, and stops when its owner let it go. Failure costs
    /// speed, nothing else.
    pub(crate) fn prefault_in_background(self: &Arc<Self>) {
        let weak = Arc::downgrade(self);
        let prefault = move || {
            for offset in (0..).step_by(PREFAULT_PIECE_BYTES) {
                let Some(mapping) = weak.upgrade() else { return };
                if !mapping.prefault_piece(offset) {
                    return;
                }
            }
        };
        // No thread to be had: the first writer takes the page faults itself.
        let _ = thread::Builder::new().name("relay-prefault".into()).spawn(prefault);
    }

    /// Lets the kernel find all of the memory now, on this thread: near it, on a machine of several nodes. Where the
    /// kernel cannot, the first writer takes the page faults itself.
    pub(crate) fn prefault(&self) {
        for offset in (0..self.len).step_by(PREFAULT_PIECE_BYTES) {
            if !self.prefault_piece(offset) {
                return;
            }
        }
    }

    /// Leaves this range out of what a fork copies, so that the pages under it stay the parent's own. A child that
    /// touches it would be killed; one that only executes another program does not.
    pub(crate) fn keep_from_children(&self) {
        // Refused: a fork costs the parent what it costs for all other memory.
        // SAFETY: the range is this mapping, and this advice changes nothing in this process.
        let _ = unsafe { madvise(self.start.as_ptr().cast(), self.len, Advice::LinuxDontFork) };
    }

    /// Pre-faults the piece at `offset` and says whether it went well: false past the end, and where the
    /// kernel cannot (before Linux 5.14) or has no memory to give.
    fn prefault_piece(&self, offset: usize) -> bool {
        let len = self.len.saturating_sub(offset).min(PREFAULT_PIECE_BYTES);
        let piece = self.start.as_ptr().wrapping_add(offset);
        // SAFETY: the piece lies inside this mapping, which `&self` keeps, and populating changes no content.
        len > 0 && unsafe { madvise(piece.cast(), len, Advice::LinuxPopulateWrite) }.is_ok()
    }

    fn ask_for_huge_pages(&self) {
        // A kernel without huge pages refuses; small ones work as well, only slower.
        // SAFETY: the range is this mapping, and this advice changes no content.
        let _ = unsafe { madvise(self.start.as_ptr().cast(), self.len, Advice::LinuxHugepage) };
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

/// What one pre-fault call populates: a few milliseconds of kernel work, so that a mapping that was let go is
/// not held for long, and thousands of huge-page faults a call are saved. A whole number of pages.
pub(crate) const PREFAULT_PIECE_BYTES: usize = 32 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_is_whole_pages_on_a_page() {
        let mapping = Mapping::new(5000).unwrap();
        assert_eq!(mapping.len(), 8192);
        assert_eq!(mapping.start().addr().get() % PAGE_BYTES, 0);
    }

    #[test]
    fn impossible_lengths_are_refused() {
        assert!(Mapping::new(0).is_err());
        assert!(Mapping::new(usize::MAX).is_err());
        assert!(Mapping::new(isize::MAX as usize - PAGE_BYTES).is_err());
    }

    #[test]
    fn prefaulting_ends_at_the_end() {
        let mapping = Mapping::new(PREFAULT_PIECE_BYTES + 1).unwrap();
        assert!(!mapping.prefault_piece(mapping.len()));
        assert!(!mapping.prefault_piece(2 * PREFAULT_PIECE_BYTES));
    }

    #[test]
    fn a_prefaulting_thread_lets_go_of_its_mapping() {
        let mapping = Arc::new(Mapping::new(2 * PREFAULT_PIECE_BYTES).unwrap());
        let weak = Arc::downgrade(&mapping);
        mapping.prefault_in_background();
        drop(mapping);
        while weak.strong_count() > 0 {
            thread::yield_now();
        }
    }
}
