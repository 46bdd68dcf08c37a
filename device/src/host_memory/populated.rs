use crate::Lock;
use std::{
    ops::{Deref, Range},
    sync::{Arc, Weak},
    thread,
    time::Duration,
};

use rustix::time::{ClockId, clock_gettime};

use super::page_costs::PAGE_COSTS;
use crate::mapping::{HUGE_PAGE_BYTES, Mapping, PIECE_BYTES, PageSize};

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
    progress: Lock<Progress>,
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
    /// Wraps a mapping whose pages are not populated. `size` is its page size.
    pub(super) fn new(mapping: Mapping, size: PageSize) -> Self {
        let progress = Progress { next: 0, size, threads: 0, is_wanted: false };
        Self { mapping, progress: Lock::new(progress) }
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
        let before = processor_time();
        let populated = self.mapping.populate(piece.clone());
        let time = processor_time().saturating_sub(before);
        PAGE_COSTS.lock().record(size, piece.len(), populated.is_ok().then_some(time));
        if populated.is_err() {
            let mut progress = self.progress.lock();
            (progress.next, progress.size) = (self.mapping.len(), PageSize::Huge);
            self.mapping.prefer(PageSize::Huge, 0..self.mapping.len());
        }
        true
    }

    /// Takes the next piece, and advises the chosen page size from its start on. `None` ends the calling thread.
    fn take_piece(&self) -> Option<(Range<usize>, PageSize)> {
        let mut progress = self.progress.lock();
        if !progress.is_wanted || progress.next >= self.mapping.len() {
            progress.threads -= 1; // Under the lock, so that `begin` never counts a thread that ends.
            return None;
        }
        let size = PAGE_COSTS.lock().choose();
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
        let mapping = Mapping::new(pieces * PIECE_BYTES, PageSize::Huge).unwrap();
        Arc::new(Populated::new(mapping, PageSize::Huge))
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
