//! What the lanes of a server have carried: those that are open, and those that are gone.

use std::sync::{Mutex, MutexGuard, PoisonError};
use tensor_relay_transport::{Lane, LaneStats};

/// What all lanes carried so far. Only ever grows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TrafficStats {
    /// Packets sent.
    pub sent_packets: u64,
    /// Packets sent and lost; what they carried was sent again.
    pub lost_packets: u64,
    /// Bytes of UDP payload sent, retransmissions and control included.
    pub sent_bytes: u64,
    /// Bytes of UDP payload received.
    pub received_bytes: u64,
}

/// The counters. One lock, taken when a lane opens, when it ends, and when they are read.
#[derive(Debug, Default)]
pub(crate) struct Traffic(Mutex<Books>);

#[derive(Debug, Default)]
struct Books {
    opened: u64,
    open: Vec<(u64, Lane)>,
    gone: TrafficStats,
}

/// A lane that is counted, until it is dropped: then what it carried is kept.
#[derive(Debug)]
#[must_use = "the lane counts as gone when this is dropped"]
pub(crate) struct Counted<'a> {
    traffic: &'a Traffic,
    number: u64,
}

impl Traffic {
    /// Counts what `lane` carries from now on.
    pub(crate) fn count(&self, lane: &Lane) -> Counted<'_> {
        let mut books = self.books();
        let number = books.opened;
        books.opened += 1;
        books.open.push((number, lane.clone()));
        Counted { traffic: self, number }
    }

    /// What was carried so far.
    pub(crate) fn stats(&self) -> TrafficStats {
        let books = self.books();
        books.open.iter().fold(books.gone, |sum, (_, lane)| sum.with(lane.stats()))
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        // Numbers cannot be left half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        let mut books = self.traffic.books();
        if let Some(at) = books.open.iter().position(|(number, _)| *number == self.number) {
            let (_, lane) = books.open.swap_remove(at);
            books.gone = books.gone.with(lane.stats());
        }
    }
}

impl TrafficStats {
    fn with(self, lane: LaneStats) -> Self {
        Self {
            sent_packets: self.sent_packets + lane.sent_packets,
            lost_packets: self.lost_packets + lane.lost_packets,
            sent_bytes: self.sent_bytes + lane.sent_bytes,
            received_bytes: self.received_bytes + lane.received_bytes,
        }
    }
}
