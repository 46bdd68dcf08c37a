//! [`Recovery`]: decides how a lost connection is replaced: when, over which way, and when to stop.

use crate::backoff::Backoff;
use std::{collections::VecDeque, time::Duration};
use tensor_relay_transport::{LaneKind, Transport, Way};
use tokio::time::Instant;

/// The segments to try where larger packets are lost without a notice: in packets of 1,200 bytes, which tunnels carry,
/// and of 576 bytes, which every IPv4 network carries; both without their headers of 40 bytes.
const SEGMENTS_MAX: [u32; 2] = [1_160, 536];

/// The number of connections in a row without progress after which the session may end.
const FRUITLESS_MAX: u32 = 8;

/// The number of connections in a row that a way may lose without progress before another is tried. One that is silent
/// to its end is enough.
const LOSSES_MAX: u32 = 2;

/// Decides how lost connections of a session are replaced. Pure.
///
/// A connection makes progress if it carries a chunk to its end, or idles for a while. Without progress, the waits
/// between connections grow, and another way is tried: the other transport, or smaller packets. A path that loses large
/// packets, or ends each connection, opens new ones without fault; only their yield tells.
#[derive(Debug)]
pub(crate) struct Recovery {
    transport: Transport,
    idle_timeout: Duration,
    /// The time without progress after which the session may end.
    timeout: Duration,
    backoff: Backoff,
    /// The ways that have not failed. The first is taken, unless the connector chooses.
    ways: VecDeque<Way>,
    /// Whether the connector chooses, because no way has failed, or all have.
    is_free: bool,
    /// The number of connections lost in a row over the current way without progress.
    losses: u32,
    /// The number of connections lost in a row without progress, and the time of the first of these losses.
    fruitless: u32,
    since: Option<Instant>,
}

/// A lost connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LostConnection {
    pub(crate) kind: LaneKind,
    pub(crate) age: Duration,
    /// Whether a chunk was received on it and verified.
    pub(crate) has_verified: bool,
    /// Whether a version was being received.
    pub(crate) was_receiving: bool,
    /// Whether the path may be the cause: the server did not close it.
    pub(crate) is_by_path: bool,
}

impl Recovery {
    /// Begins with a connection that the connector chose among what `transport` allows. The session may end `timeout`
    /// after the first loss without progress.
    pub(crate) fn new(transport: Transport, idle_timeout: Duration, timeout: Duration) -> Self {
        let mut recovery = Self {
            transport,
            idle_timeout,
            timeout,
            backoff: Backoff::new(),
            ways: VecDeque::new(),
            is_free: true,
            losses: 0,
            fruitless: 0,
            since: None,
        };
        recovery.free();
        recovery
    }

    /// Lets the connector choose; all ways are usable.
    fn free(&mut self) {
        let full = [LaneKind::Tcp, LaneKind::Quic].map(|kind| Way { kind, segment_max: None });
        let small = SEGMENTS_MAX.map(|bytes| Way { kind: LaneKind::Tcp, segment_max: Some(bytes) });
        let all = full.into_iter().chain(small);
        self.ways = all.filter(|way| self.transport.allows(way.kind)).collect();
        self.is_free = true;
    }

    /// The way of the next connection; `None` if the connector chooses.
    pub(crate) fn way(&self) -> Option<Way> {
        self.ways.front().copied().filter(|_| !self.is_free)
    }

    /// The wait before the next attempt to connect.
    pub(crate) fn next_wait(&mut self, chance: f64) -> Duration {
        self.backoff.next(chance)
    }

    /// Handles a failed attempt to connect: the next one takes another way.
    pub(crate) fn handle_unreachable(&mut self) {
        if !self.is_free {
            self.ways.rotate_left(1);
        }
    }

    /// Handles a lost connection; returns its way if that has failed.
    pub(crate) fn handle_lost(&mut self, now: Instant, lost: LostConnection) -> Option<Way> {
        let has_idled = !lost.was_receiving && lost.age >= 2 * self.idle_timeout;
        if lost.has_verified || has_idled {
            self.backoff = Backoff::new();
            (self.losses, self.fruitless, self.since) = (0, 0, None);
            return None;
        }
        self.fruitless += 1;
        self.since.get_or_insert(now);
        if !lost.is_by_path || lost.kind == LaneKind::Unix {
            return None;
        }
        self.losses += 1;
        // Both ends detect silence after about the idle timeout; the faster one's end may be what the other sees.
        let was_silent = lost.age >= self.idle_timeout.mul_f64(0.8);
        if !was_silent && self.losses < LOSSES_MAX {
            return None;
        }
        let segment_max = self.way().and_then(|way| way.segment_max);
        let failed = Way { kind: lost.kind, segment_max };
        self.ways.retain(|way| *way != failed);
        (self.is_free, self.losses) = (false, 0);
        if self.ways.is_empty() {
            self.free();
        }
        Some(failed)
    }

    /// The number of connections lost in a row without progress, once that is reason to end the session.
    pub(crate) fn fruitless(&self, now: Instant) -> Option<u32> {
        let has_passed = self.since.is_some_and(|since| now >= since + self.timeout);
        (has_passed && self.fruitless >= FRUITLESS_MAX).then_some(self.fruitless)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDLE_TIMEOUT: Duration = Duration::from_secs(10);
    const TIMEOUT: Duration = Duration::from_secs(60);

    /// A connection over TCP that was lost after `seconds` while it received its first chunk.
    fn lost_after(seconds: u64) -> LostConnection {
        LostConnection {
            kind: LaneKind::Tcp,
            age: Duration::from_secs(seconds),
            has_verified: false,
            was_receiving: true,
            is_by_path: true,
        }
    }

    fn recovery(transport: Transport) -> Recovery {
        Recovery::new(transport, IDLE_TIMEOUT, TIMEOUT)
    }

    fn way(kind: LaneKind, segment_max: Option<u32>) -> Option<Way> {
        Some(Way { kind, segment_max })
    }

    #[test]
    fn each_silent_connection_leads_to_another_way() {
        let now = Instant::now();
        let mut auto = recovery(Transport::Auto);
        assert_eq!(auto.way(), None);
        assert_eq!(auto.handle_lost(now, lost_after(10)), way(LaneKind::Tcp, None));
        assert_eq!(auto.way(), way(LaneKind::Quic, None));
        auto.handle_unreachable(); // As where packets of 1,200 bytes do not pass.
        assert_eq!(auto.way(), way(LaneKind::Tcp, Some(1_160)));
        assert_eq!(auto.handle_lost(now, lost_after(9)), way(LaneKind::Tcp, Some(1_160)));
        assert_eq!(auto.way(), way(LaneKind::Tcp, Some(536)));
        let mut quic = lost_after(10);
        quic.kind = LaneKind::Quic;
        let mut chosen = recovery(Transport::Auto);
        assert_eq!(chosen.handle_lost(now, quic), way(LaneKind::Quic, None));
        assert_eq!(chosen.way(), way(LaneKind::Tcp, None));
        let mut tcp = recovery(Transport::Tcp);
        for segment_max in [None, Some(1_160), Some(536)] {
            assert_eq!(tcp.handle_lost(now, lost_after(10)), way(LaneKind::Tcp, segment_max));
        }
        assert_eq!(tcp.way(), None, "all ways have failed: the connector chooses again");
        assert_eq!(recovery(Transport::Quic).handle_lost(now, quic), way(LaneKind::Quic, None));
    }

    #[test]
    fn a_connection_that_made_progress_is_replaced_in_the_same_way() {
        let now = Instant::now();
        let idle = LostConnection { was_receiving: false, ..lost_after(20) };
        let useful = LostConnection { has_verified: true, ..lost_after(30) };
        let by_server = LostConnection { is_by_path: false, ..lost_after(30) };
        for lost in [idle, useful, by_server, lost_after(1)] {
            let mut recovery = recovery(Transport::Auto);
            assert_eq!(recovery.handle_lost(now, lost), None, "{lost:?}");
            assert_eq!(recovery.way(), None);
        }
    }

    #[test]
    fn a_way_that_cuts_two_connections_in_a_row_has_failed() {
        let now = Instant::now();
        let useful = LostConnection { has_verified: true, ..lost_after(1) };
        let mut recovery = recovery(Transport::Auto);
        for lost in [lost_after(1), useful, lost_after(1)] {
            assert_eq!(recovery.handle_lost(now, lost), None);
        }
        assert_eq!(recovery.handle_lost(now, lost_after(1)), way(LaneKind::Tcp, None));
        assert_eq!(recovery.way(), way(LaneKind::Quic, None));
    }

    #[test]
    fn without_progress_the_waits_grow_and_the_session_ends() {
        let (began, mut now) = (Instant::now(), Instant::now());
        let mut recovery = recovery(Transport::Tcp);
        let mut connections = 0;
        while recovery.fruitless(now).is_none() {
            recovery.handle_lost(now, lost_after(0));
            now += recovery.next_wait(1.0);
            connections += 1;
        }
        assert_eq!(connections, 17, "0.1 s, doubling to 5 s, for a minute");
        assert!(now - began < TIMEOUT + Duration::from_secs(6));
        let useful = LostConnection { has_verified: true, ..lost_after(0) };
        recovery.handle_lost(now, useful);
        assert_eq!((recovery.fruitless(now), recovery.next_wait(1.0).as_millis()), (None, 100));
    }

    #[test]
    fn a_few_long_connections_are_no_reason_to_end() {
        let mut now = Instant::now();
        let mut recovery = recovery(Transport::Tcp);
        for _ in 1..FRUITLESS_MAX {
            recovery.handle_lost(now, lost_after(100));
            now += Duration::from_secs(100);
            assert_eq!(recovery.fruitless(now), None);
        }
        recovery.handle_lost(now, lost_after(100));
        assert_eq!(recovery.fruitless(now), Some(FRUITLESS_MAX));
    }
}
