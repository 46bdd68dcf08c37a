//! [`Probing`]: answers the probes of a session with filler bytes, to measure a lane.

use crate::shared::Shared;
use rustix::time::{ClockId, clock_gettime};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tensor_relay_protocol::{ProbeHeader, ProbeReport, ProtocolViolation};
use tensor_relay_transport::{Lane, LaneKind, send_probe};
use tokio::{task::JoinSet, time::timeout};

/// The maximum duration of a probe; then its stream is reset, and the client may request fewer bytes.
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);

/// The probes of one session, one at a time. They end with it.
#[derive(Debug, Default)]
pub(crate) struct Probing {
    newest: Option<u32>,
    /// Whether the newest probe was written except for its report: its client may request the next.
    is_over: Arc<AtomicBool>,
    running: JoinSet<()>,
}

impl Probing {
    /// Starts to answer a probe of `bytes` over `lane`, with none if the client may not probe. Without such a lane there
    /// is no answer; with too many probes, an empty one.
    ///
    /// # Errors
    /// [`ProtocolViolation`] for a probe while another is in progress, and for an id that is not new.
    pub(crate) fn begin(
        &mut self,
        (probe, bytes): (u32, Option<u32>),
        lane: Option<Lane>,
        holder: Arc<str>,
        shared: &Shared,
    ) -> Result<(), ProtocolViolation> {
        while self.running.try_join_next().is_some() {}
        let is_in_progress = !self.running.is_empty() && !self.is_over.load(Ordering::Acquire);
        if is_in_progress || self.newest.is_some_and(|newest| probe <= newest) {
            let expected = "one at a time, with rising ids";
            return Err(ProtocolViolation::OutOfTurn { found: "a second Probe", expected });
        }
        self.newest = Some(probe);
        let Some(lane) = lane else { return Ok(()) };
        let allowed = bytes.and_then(|bytes| Some((bytes, shared.places.probes.enter_fairly(holder)?)));
        let is_over = Arc::new(AtomicBool::new(false));
        self.is_over = Arc::clone(&is_over);
        self.running.spawn(async move {
            let (bytes, mut place) = allowed.map_or((0, None), |(bytes, place)| (bytes, Some(place)));
            let is_measured = place.is_some();
            let end_and_report = async {
                is_over.store(true, Ordering::Release);
                report(&lane, is_measured).await
            };
            let sent = send_probe(&lane, ProbeHeader { probe, bytes }, end_and_report);
            let evicted = async {
                match &mut place {
                    Some((_, eviction)) => eviction.evicted().await,
                    None => std::future::pending().await,
                }
            };
            // If the lane fails or the client does not read, there is nothing else to do.
            tokio::select! {
                _ = timeout(PROBE_TIMEOUT, sent) => {}
                () = evicted => {}
            }
        });
        Ok(())
    }
}

/// The counters of this process, and of `lane` unless the probe is empty; they wrap.
async fn report(lane: &Lane, is_measured: bool) -> ProbeReport {
    let (sent_packets, lost_packets) = match lane.kind() {
        LaneKind::Unix => (0, 0),
        _ if !is_measured => (0, 0),
        LaneKind::Quic => (lane.stats().sent_packets as u32, lane.stats().lost_packets as u32),
        LaneKind::Tcp => {
            let read = || std::fs::read_to_string("/proc/self/net/snmp");
            let counters = tokio::task::spawn_blocking(read).await; // The kernel adds up counters of all processors.
            let counters = counters.ok().and_then(Result::ok);
            counters.and_then(|counters| tcp_segments(&counters)).unwrap_or_default()
        }
    };
    let us = |id| {
        let time = clock_gettime(id);
        (time.tv_sec as u64 * 1_000_000 + time.tv_nsec as u64 / 1_000) as u32
    };
    ProbeReport {
        clock_us: us(ClockId::Monotonic),
        processor_us: us(ClockId::ProcessCPUTime),
        sent_packets,
        lost_packets,
    }
}

/// The segments sent and retransmitted by all TCP connections of this network namespace: those of one connection need a
/// system call without a safe interface. `counters` is `/proc/net/snmp` (proc_net(5)).
fn tcp_segments(counters: &str) -> Option<(u32, u32)> {
    let mut lines = counters.lines().filter_map(|line| line.strip_prefix("Tcp: "));
    let (names, values) = (lines.next()?, lines.next()?);
    let value = |wanted| {
        let mut all = names.split(' ').zip(values.split(' '));
        all.find(|(name, _)| *name == wanted)?.1.parse::<u64>().ok()
    };
    Some((value("OutSegs")? as u32, value("RetransSegs")? as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_of_tcp_segments_are_found_by_name() {
        let counters =
            "Ip: Forwarding\nIp: 1\nTcp: MaxConn InSegs OutSegs RetransSegs\nTcp: -1 7 4294967298 3\n";
        assert_eq!(tcp_segments(counters), Some((2, 3)));
        assert_eq!(tcp_segments("Tcp: OutSegs\nTcp: 5"), None);
        assert_eq!(tcp_segments(""), None);
        let own = std::fs::read_to_string("/proc/self/net/snmp").unwrap();
        assert!(tcp_segments(&own).is_some(), "{own}");
    }
}
