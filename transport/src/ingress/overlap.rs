//! Whether receiving and writing overlap, by counting.

use std::sync::atomic::{AtomicU64, Ordering};

/// How the chunks of one session overlapped, so far.
///
/// Where a sink is on a device, writing a chunk is its copy there: a pipeline that works copies one chunk while it
/// receives the next. In host memory a chunk is in its place when it is received, and writing takes no time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OverlapStats {
    /// The chunks whose writing was begun.
    pub written: u64,
    /// Those of them that were begun while another chunk was being received.
    pub written_while_receiving: u64,
    /// The chunks that were received to their end while another was being written.
    pub received_while_writing: u64,
}

/// Where chunks say what is done with them. Counters only: readers may see them a moment apart.
#[derive(Debug, Default)]
pub(super) struct Overlap {
    receiving: AtomicU64,
    writing: AtomicU64,
    written: AtomicU64,
    written_while_receiving: AtomicU64,
    received_while_writing: AtomicU64,
}

impl Overlap {
    pub(super) fn get(&self) -> OverlapStats {
        OverlapStats {
            written: self.written.load(Ordering::Relaxed),
            written_while_receiving: self.written_while_receiving.load(Ordering::Relaxed),
            received_while_writing: self.received_while_writing.load(Ordering::Relaxed),
        }
    }

    /// A chunk that has a place begins to be received.
    pub(super) fn receive(&self) -> Stage<'_> {
        Stage::enter(self, &self.receiving)
    }
}

/// A chunk in one stage of its way, which it leaves when this is dropped.
#[derive(Debug)]
pub(super) struct Stage<'a> {
    overlap: &'a Overlap,
    stage: &'a AtomicU64,
}

impl<'a> Stage<'a> {
    fn enter(overlap: &'a Overlap, stage: &'a AtomicU64) -> Self {
        stage.fetch_add(1, Ordering::Relaxed);
        Self { overlap, stage }
    }

    /// The chunk was received, and begins to be written.
    pub(super) fn write(self) -> Self {
        let overlap = self.overlap;
        drop(self);
        count_if(&overlap.received_while_writing, &overlap.writing);
        count_if(&overlap.written_while_receiving, &overlap.receiving);
        overlap.written.fetch_add(1, Ordering::Relaxed);
        Stage::enter(overlap, &overlap.writing)
    }
}

impl Drop for Stage<'_> {
    fn drop(&mut self) {
        self.stage.fetch_sub(1, Ordering::Relaxed);
    }
}

fn count_if(counter: &AtomicU64, others: &AtomicU64) {
    let any = others.load(Ordering::Relaxed) > 0;
    counter.fetch_add(u64::from(any), Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_done_at_once_is_counted() {
        let overlap = Overlap::default();
        drop(overlap.receive().write());
        assert_eq!(overlap.get(), OverlapStats { written: 1, ..OverlapStats::default() });
        let (one, two) = (overlap.receive(), overlap.receive());
        let one = one.write();
        let expected = OverlapStats { written: 2, written_while_receiving: 1, received_while_writing: 0 };
        assert_eq!(overlap.get(), expected);
        let two = two.write();
        let expected = OverlapStats { written: 3, written_while_receiving: 1, received_while_writing: 1 };
        assert_eq!(overlap.get(), expected);
        drop((one, two));
        drop(overlap.receive());
        drop(overlap.receive().write());
        assert_eq!(overlap.get(), OverlapStats { written: 4, ..expected });
    }
}
