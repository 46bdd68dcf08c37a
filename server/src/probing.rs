//! Answers the probes of a session: bytes without meaning, to measure a lane.

use crate::shared::Shared;
use rustix::time::{ClockId, clock_gettime};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tensor_relay_protocol::{Misbehaved, ProbeHeader, ProbeReport};
use tensor_relay_transport::{Lane, send_probe};
use tokio::{task::JoinSet, time::timeout};

/// How many probes of all clients a server answers at once. Further ones are refused: they would measure each other.
const PROBES_MAX: u64 = 4;

/// How long one may take; then its stream is reset. A client asks for less where that is too short.
const PROBE_MAX: Duration = Duration::from_secs(10);

/// The probes of one session, one at a time. They end with it.
#[derive(Debug, Default)]
pub(crate) struct Probing {
    newest: Option<u32>,
    /// Whether all of the newest one was written but its report, so that its client may ask for the next.
    is_over: Arc<AtomicBool>,
    running: JoinSet<()>,
}

impl Probing {
    /// Begins to answer a probe over `lane`. Where the client has no such lane, it gets none; where too many are
    /// answered already, an empty one.
    ///
    /// # Errors
    /// [`Misbehaved`] for a probe while one is under way, and for an id that is not new.
    pub(crate) fn begin(
        &mut self,
        (probe, bytes): (u32, u32),
        lane: Option<Lane>,
        shared: &Shared,
    ) -> Result<(), Misbehaved> {
        while self.running.try_join_next().is_some() {}
        let is_under_way = !self.running.is_empty() && !self.is_over.load(Ordering::Acquire);
        if is_under_way || self.newest.is_some_and(|newest| probe <= newest) {
            let expected = "one at a time, with rising ids";
            return Err(Misbehaved::OutOfTurn { found: "a second Probe", expected });
        }
        self.newest = Some(probe);
        let Some(lane) = lane else { return Ok(()) };
        let counted = shared.probes.count_below(PROBES_MAX);
        let bytes = if counted.is_some() { bytes } else { 0 };
        let is_over = Arc::new(AtomicBool::new(false));
        self.is_over = Arc::clone(&is_over);
        let report = move || {
            is_over.store(true, Ordering::Release);
            report()
        };
        self.running.spawn(async move {
            let _counted = counted;
            // A lane that fails, or a client that reads nothing, has its answer.
            let _ = timeout(PROBE_MAX, send_probe(&lane, ProbeHeader { probe, bytes }, report)).await;
        });
        Ok(())
    }
}

/// The counters of this process, which wrap.
fn report() -> ProbeReport {
    let us = |id| {
        let time = clock_gettime(id);
        (time.tv_sec as u64 * 1_000_000 + time.tv_nsec as u64 / 1_000) as u32
    };
    ProbeReport {
        clock_us: us(ClockId::Monotonic),
        processor_us: us(ClockId::ProcessCPUTime),
        ..ProbeReport::default()
    }
}
