use crate::Lock;
use std::{
    io,
    ops::{Deref, Range},
    sync::{
        Arc, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use rustix::time::{ClockId, clock_gettime};

use super::{
    page_costs::{PRIVATE_PAGES, PageCosts, SHARED_PAGES},
    sharing,
};
use crate::{
    mapping::{HUGE_PAGE_BYTES, Mapping, PIECE_BYTES, PageSize},
    shared_range::SharedFile,
};

/// A mapping whose pages are populated ahead of its first writer, on background threads.
///
/// Why: to allocate and clear pages takes the kernel about as long as receiving into them, and up to ten times as long
/// if the host of a virtual machine has to allocate them too. The threads start at the beginning, where the first
/// chunks go, and take a piece each in turn. They hold the mapping only while they work on a piece, and stop when the
/// last region in the mapping is dropped. The contents do not change, so the owner may write meanwhile. Failure costs
/// only speed: the first writer takes the page faults itself.
#[derive(Debug)]
pub(super) struct Populated {
    mapping: Mapping,
    /// The memfd that is mapped, if other processes can map it.
    file: Option<Arc<SharedFile>>,
    progress: Lock<Progress>,
    /// The length of the last region in this mapping: nothing was written beyond it.
    used_bytes: AtomicUsize,
    /// Up to where small pages were replaced by huge ones, as far as there are any.
    enlarged_bytes: AtomicUsize,
    /// The bytes that were populated in huge pages from the start.
    huge_bytes: AtomicUsize,
}

#[derive(Debug)]
struct Progress {
    /// The start of the next piece.
    next: usize,
    /// The page size from `next` on.
    size: PageSize,
    /// The number of working threads.
    threads: usize,
    /// Whether the memory is in use and will be written.
    is_wanted: bool,
}

/// The most threads per mapping, if there are as many processors. They clear memory as fast as it can be written, so
/// more would only wait for each other.
const THREADS_MAX: usize = 4;

impl Populated {
    /// Maps `len` bytes of private memory.
    pub(super) fn private(len: usize) -> io::Result<Self> {
        let size = PRIVATE_PAGES.lock().preferred();
        Ok(Self::new(Mapping::new(len, size)?, None, size))
    }

    /// Maps `len` bytes of memory that other processes can read.
    pub(super) fn shared(len: usize) -> io::Result<Self> {
        let size = SHARED_PAGES.lock().preferred();
        let (mapping, file) = sharing::map(len)?;
        mapping.prefer(size, 0..len);
        Ok(Self::new(mapping, Some(file), size))
    }

    /// Wraps a mapping whose pages are not populated. `size` is its page size.
    fn new(mapping: Mapping, file: Option<Arc<SharedFile>>, size: PageSize) -> Self {
        let progress = Progress { next: 0, size, threads: 0, is_wanted: false };
        Self {
            mapping,
            file,
            progress: Lock::new(progress),
            used_bytes: AtomicUsize::new(0),
            enlarged_bytes: AtomicUsize::new(0),
            huge_bytes: AtomicUsize::new(0),
        }
    }

    /// The memfd that is mapped, if other processes can map it.
    pub(super) fn file(&self) -> Option<&Arc<SharedFile>> {
        self.file.as_ref()
    }

    /// Whether other processes can map the memory, and huge pages may take the place of small ones in it.
    pub(super) fn has_small_pages(&self) -> bool {
        let len = self.mapping.len();
        let is_huge = |bytes: &AtomicUsize| bytes.load(Ordering::Relaxed) >= len;
        self.file.is_some()
            && len >= HUGE_PAGE_BYTES
            && !is_huge(&self.enlarged_bytes)
            && !is_huge(&self.huge_bytes)
    }

    /// Puts huge pages in the place of the small ones of the next piece, if other processes can map the memory. Returns whether
    /// another piece remains. Copies the piece, and changes no content: call it when it is written, on a thread that
    /// nobody waits for.
    pub(super) fn enlarge_next_pages(&self) -> bool {
        if !self.has_small_pages() {
            return false;
        }
        let len = self.mapping.len();
        let start = self.enlarged_bytes.fetch_add(PIECE_BYTES, Ordering::Relaxed);
        let piece = start.min(len)..(start + PIECE_BYTES).min(len);
        let (end, is_done) = (piece.end, self.mapping.collapse(piece).is_ok());
        if !is_done {
            self.enlarged_bytes.store(len, Ordering::Relaxed); // There are none.
        }
        is_done && end < len
    }

    /// Notes that the first `len` bytes will be written. Returns the length that was noted before.
    pub(super) fn use_first(&self, len: usize) -> usize {
        self.used_bytes.swap(len, Ordering::Relaxed)
    }

    fn costs(&self) -> &'static Lock<PageCosts> {
        match self.file {
            Some(_) => &SHARED_PAGES,
            None => &PRIVATE_PAGES,
        }
    }

    /// Populates the missing pages in the background.
    pub(super) fn begin(self: &Arc<Self>) {
        let mut progress = self.progress.lock();
        progress.is_wanted = true;
        let pieces = self.mapping.len().saturating_sub(progress.next).div_ceil(PIECE_BYTES);
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let threads = pieces.min(processors).min(THREADS_MAX);
        while progress.threads < threads {
            let weak = Arc::downgrade(self);
            // Without this thread, the threads already started populate the pages, or the first writer does.
            let spawned = thread::Builder::new().name("relay-prefault".into()).spawn(|| work(weak));
            if spawned.is_err() {
                return;
            }
            progress.threads += 1;
        }
    }

    /// Stops populating: the memory will not be written soon.
    pub(super) fn stop(&self) {
        self.progress.lock().is_wanted = false;
    }

    /// Populates the next piece; after a failure, no further ones are populated. Returns false if there is none, or the
    /// memory is no longer wanted: the thread is then no longer counted.
    fn advance(&self) -> bool {
        let Some((piece, size)) = self.take_piece() else { return false };
        if self.populate_piece(piece, size).is_err() {
            let mut progress = self.progress.lock();
            (progress.next, progress.size) = (self.mapping.len(), PageSize::Huge);
            self.mapping.prefer(PageSize::Huge, 0..self.mapping.len());
        }
        true
    }

    /// Populates `piece`, and records what it cost.
    fn populate_piece(&self, piece: Range<usize>, size: PageSize) -> io::Result<()> {
        let before = processor_time();
        if self.file.is_some() && size == PageSize::Huge {
            // Otherwise pages are small: slower for takers.
            if self.mapping.collapse(piece.clone()).is_ok() {
                self.huge_bytes.fetch_add(piece.len(), Ordering::Relaxed);
            }
        }
        let populated = self.mapping.populate(piece.clone());
        let time = processor_time().saturating_sub(before);
        self.costs().lock().record(size, piece.len(), populated.is_ok().then_some(time));
        populated
    }

    /// Takes the next piece, and advises the chosen page size from its start on. `None` ends the calling thread.
    fn take_piece(&self) -> Option<(Range<usize>, PageSize)> {
        let mut progress = self.progress.lock();
        if !progress.is_wanted || progress.next >= self.mapping.len() {
            progress.threads -= 1; // Under the lock, so that `begin` never counts a thread that ends.
            return None;
        }
        let size = self.costs().lock().choose();
        let start = progress.next;
        if size != progress.size {
            self.mapping.prefer(size, start..self.mapping.len());
            progress.size = size;
        }
        // Pieces end at huge page boundaries, so that no two threads populate the same huge page.
        let address = self.mapping.start().addr().get();
        let end = (address + start + PIECE_BYTES) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES - address;
        progress.next = end.min(self.mapping.len());
        Some((start..progress.next, size))
    }
}

impl Deref for Populated {
    type Target = Mapping;

    fn deref(&self) -> &Mapping {
        &self.mapping
    }
}

/// Populates piece after piece, until there is none or the mapping is no longer wanted.
fn work(populated: Weak<Populated>) {
    while populated.upgrade().is_some_and(|populated| populated.advance()) {}
}

/// The processor time of this thread: unlike elapsed time, it excludes other processes.
fn processor_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new_mapping(pieces: usize) -> Arc<Populated> {
        Arc::new(Populated::private(pieces * PIECE_BYTES).unwrap())
    }

    fn wait_for_threads(populated: &Populated) {
        while populated.progress.lock().threads > 0 {
            thread::yield_now();
        }
    }

    #[test]
    fn pieces_follow_each_other_to_the_end() {
        let populated = new_mapping(5);
        let pretend_thread = |is_wanted| {
            populated.progress.lock().threads += 1;
            populated.progress.lock().is_wanted = is_wanted;
        };
        pretend_thread(false);
        assert!(populated.take_piece().is_none(), "the memory is not wanted yet");
        pretend_thread(true);
        let (address, mut end) = (populated.start().addr().get(), 0);
        while let Some((piece, _)) = populated.take_piece() {
            assert_eq!(piece.start, end);
            assert!(!piece.is_empty() && piece.len() <= PIECE_BYTES);
            end = piece.end;
            assert!((address + end).is_multiple_of(HUGE_PAGE_BYTES) || end == populated.len());
        }
        assert_eq!(end, populated.len());
    }

    /// Goal: only memory that may have small pages is worth a thread that replaces them. Method: memory of huge pages, and
    /// such with a piece of small ones between, as it is when the cost of both is measured.
    #[test]
    fn only_small_pages_are_replaced() {
        for small in [None, Some(1)] {
            let populated = Populated::shared(3 * PIECE_BYTES).unwrap();
            let has_huge_pages = populated.mapping.collapse(0..PIECE_BYTES).is_ok();
            for number in 0..3 {
                let piece = number * PIECE_BYTES..(number + 1) * PIECE_BYTES;
                let size = if small == Some(number) { PageSize::Small } else { PageSize::Huge };
                populated.mapping.prefer(size, piece.clone());
                populated.populate_piece(piece, size).unwrap();
            }
            assert_eq!(populated.has_small_pages(), small.is_some() || !has_huge_pages);
            let replaced = (0..10).take_while(|_| populated.enlarge_next_pages()).count();
            let expected = if small.is_some() && has_huge_pages { 2 } else { 0 };
            assert_eq!((replaced, populated.has_small_pages()), (expected, false), "{small:?}");
        }
        assert!(!Populated::private(3 * PIECE_BYTES).unwrap().has_small_pages());
    }

    #[test]
    fn all_pages_are_populated() {
        let populated = new_mapping(9);
        populated.begin();
        wait_for_threads(&populated);
        assert_eq!(populated.progress.lock().next, populated.len());
    }

    #[test]
    fn populating_resumes_after_a_stop() {
        let populated = new_mapping(3);
        populated.progress.lock().is_wanted = true;
        populated.progress.lock().threads = 1;
        assert!(populated.advance());
        populated.stop();
        let next = populated.progress.lock().next;
        assert!(!populated.advance() && populated.progress.lock().next == next);
        assert_eq!(populated.progress.lock().threads, 0);
        populated.begin();
        wait_for_threads(&populated);
        assert_eq!(populated.progress.lock().next, populated.len());
    }

    #[test]
    fn threads_release_a_dropped_mapping() {
        let populated = new_mapping(20);
        let weak = Arc::downgrade(&populated);
        populated.begin();
        drop(populated);
        while weak.strong_count() > 0 {
            thread::yield_now();
        }
    }
}
