//! [`Traffic`]: counts the traffic of a server's lanes, open and ended.

use crate::LaneStatus;
use tensor_relay_device::Lock;
use tensor_relay_transport::{Lane, LaneKind, LaneStats};

/// The total traffic of lanes. Monotonic.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TrafficStats {
    /// Packets sent over QUIC.
    pub sent_packets: u64,
    /// Packets sent over QUIC and lost; their data was retransmitted.
    pub lost_packets: u64,
    /// Bytes of UDP payload sent, retransmissions and control included. Over TCP the bytes before encryption.
    pub sent_bytes: u64,
    /// Bytes of UDP payload received. Over TCP the bytes after decryption.
    pub received_bytes: u64,
}

/// The counters. One lock, taken when a lane opens, when it ends, and when they are read.
#[derive(Debug, Default)]
pub(crate) struct Traffic(Lock<TrafficTotals>);

#[derive(Debug, Default)]
struct TrafficTotals {
    opened: u64,
    open: Vec<(u64, Lane)>,
    /// The traffic of ended lanes, by kind, in the order of `KINDS`.
    ended: [TrafficStats; KINDS.len()],
}

/// Counts a lane as open until this is dropped, which adds its traffic to that of ended lanes.
#[derive(Debug)]
#[must_use = "the lane counts as ended when this is dropped"]
pub(crate) struct CountedLane<'a> {
    traffic: &'a Traffic,
    number: u64,
}

impl Traffic {
    /// Counts the traffic of `lane` from now on.
    pub(crate) fn count(&self, lane: &Lane) -> CountedLane<'_> {
        let mut totals = self.0.lock();
        let number = totals.opened;
        totals.opened += 1;
        totals.open.push((number, lane.clone()));
        CountedLane { traffic: self, number }
    }

    /// The total traffic.
    pub(crate) fn stats(&self) -> TrafficStats {
        let totals = self.0.lock();
        let ended = totals.ended.into_iter().fold(TrafficStats::default(), TrafficStats::plus);
        totals.open.iter().fold(ended, |sum, (_, lane)| sum.plus_lane(lane.stats()))
    }

    /// For each kind of lane, the number of open ones, and the total traffic of open and ended ones.
    pub(crate) fn by_kind(&self) -> Vec<(LaneKind, u64, TrafficStats)> {
        let totals = self.0.lock();
        let totals_of = |kind: LaneKind| {
            let open = totals.open.iter().filter(|(_, lane)| lane.kind() == kind);
            let none = (kind, 0, totals.ended[index_of(kind)]);
            open.fold(none, |(kind, count, sum), (_, lane)| (kind, count + 1, sum.plus_lane(lane.stats())))
        };
        KINDS.map(totals_of).into()
    }

    /// The number of open lanes, and the status of at most `lanes_max` of them.
    pub(crate) fn lanes(&self, lanes_max: usize) -> (usize, Vec<LaneStatus>) {
        let totals = self.0.lock();
        let status = |(_, lane): &(u64, Lane)| LaneStatus {
            peer: lane.peer(),
            transport: lane.kind(),
            stats: lane.stats(),
        };
        (totals.open.len(), totals.open.iter().take(lanes_max).map(status).collect())
    }
}

impl Drop for CountedLane<'_> {
    fn drop(&mut self) {
        let mut totals = self.traffic.0.lock();
        if let Some(index) = totals.open.iter().position(|(number, _)| *number == self.number) {
            let (_, lane) = totals.open.swap_remove(index);
            let ended = &mut totals.ended[index_of(lane.kind())];
            *ended = ended.plus_lane(lane.stats());
        }
    }
}

/// The kinds of lanes.
const KINDS: [LaneKind; 3] = [LaneKind::Quic, LaneKind::Tcp, LaneKind::Unix];

/// The index of a kind in `KINDS`.
fn index_of(kind: LaneKind) -> usize {
    match kind {
        LaneKind::Quic => 0,
        LaneKind::Tcp => 1,
        LaneKind::Unix => 2,
    }
}

impl TrafficStats {
    fn plus(self, other: Self) -> Self {
        Self {
            sent_packets: self.sent_packets + other.sent_packets,
            lost_packets: self.lost_packets + other.lost_packets,
            sent_bytes: self.sent_bytes + other.sent_bytes,
            received_bytes: self.received_bytes + other.received_bytes,
        }
    }

    fn plus_lane(self, lane: LaneStats) -> Self {
        self.plus(Self {
            sent_packets: lane.sent_packets,
            lost_packets: lane.lost_packets,
            sent_bytes: lane.sent_bytes,
            received_bytes: lane.received_bytes,
        })
    }
}
