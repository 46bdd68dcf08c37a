//! Chooses a session's transport by measuring how fast each one receives large versions.

use crate::rate::{Measurement, Sample, Steps};
use std::time::Duration;
use tensor_relay_transport::LaneKind;
use tokio::time::Instant;

/// The minimum speed-up of the other transport: less may be noise.
const SPEEDUP_MIN: f64 = 1.1;

/// The fraction of its usual rate below which a path counts as changed.
const COLLAPSED_FRACTION: f64 = 0.5;

/// The number of consecutive measurements below that fraction that count as a change.
const COLLAPSED_MEASUREMENTS: u32 = 2;

/// The time with large versions before TCP is tried on a path on which the race chose QUIC: a long path, which may be
/// free of loss.
const FIRST_TCP_TRIAL_DELAY: Duration = Duration::from_secs(2);

/// The time with large versions before QUIC is tried on a path on which the race chose TCP: a short path, which is
/// seldom lossy.
const FIRST_QUIC_TRIAL_DELAY: Duration = Duration::from_secs(20);

/// The growth factor of the time between trials, since most paths do not change.
const TRIAL_INTERVAL_GROWTH: u32 = 4;

/// The longest time with large versions between trials.
const TRIAL_INTERVAL_MAX: Duration = Duration::from_secs(3_600);

/// Decides between the two transports of a session: measures the current one, tries the other one at growing
/// intervals and when the rate collapses, and keeps the faster one.
///
/// Pure: it receives samples and returns the wanted transport. It counts only the time with large versions, and waits
/// until the number of lanes is final, so that one trial runs at a time. A trial costs up to two connections, the
/// chunks in flight when the session changes its transport, and one and a half seconds at the other transport's rate.
#[derive(Debug)]
pub(crate) struct TransportTrial {
    kind: LaneKind,
    phase: Phase,
    steps: Steps,
    measurement: Measurement,
    /// The time with large versions until the next trial.
    due: Duration,
    /// `due` after the next trial.
    pause: Duration,
}

#[derive(Debug, Clone, Copy)]
enum Phase {
    /// The session keeps its transport.
    Steady {
        /// The highest rate of this phase, in bytes per second.
        usual: f64,
        /// The number of consecutive measurements far below it.
        collapsed: u32,
    },
    /// The other transport is measured.
    Trying {
        /// The other transport.
        kind: LaneKind,
        /// The rate to beat, in bytes per second.
        incumbent: f64,
    },
}

const STEADY: Phase = Phase::Steady { usual: 0.0, collapsed: 0 };

impl TransportTrial {
    /// Starts with the transport that the race chose.
    pub(crate) fn new(kind: LaneKind) -> Self {
        let first = match kind {
            LaneKind::Quic => FIRST_TCP_TRIAL_DELAY,
            LaneKind::Tcp => FIRST_QUIC_TRIAL_DELAY,
        };
        Self {
            kind,
            phase: STEADY,
            steps: Steps::default(),
            measurement: Measurement::new(),
            due: first,
            pause: first * TRIAL_INTERVAL_GROWTH,
        }
    }

    /// Records that the session has lost its connection, and that the race chose `kind` for the next one. If that is
    /// another transport than before, the race may have found a server that was just starting: the choice is made
    /// again, as for a new session.
    pub(crate) fn handle_reconnected(&mut self, kind: LaneKind) {
        match self.phase {
            Phase::Trying { .. } => self.end_trial(),
            Phase::Steady { .. } if kind != self.kind => *self = Self::new(kind),
            Phase::Steady { .. } => {}
        }
    }

    /// Records a new connection of the session, whatever its cause.
    pub(crate) fn handle_connected(&mut self, kind: LaneKind) {
        match self.phase {
            Phase::Trying { kind: tried, .. } if tried == kind => {}
            _ => self.phase = STEADY,
        }
        self.kind = kind;
        (self.steps, self.measurement) = (Steps::default(), Measurement::new());
    }

    /// Records that the wanted transport does not reach the server.
    pub(crate) fn handle_unreachable(&mut self) {
        self.end_trial();
    }

    /// Handles a sample; returns the transport that the session should change to, if any. `has_settled` is whether
    /// the number of lanes is final.
    pub(crate) fn handle_sample(
        &mut self,
        now: Instant,
        sample: Sample,
        has_settled: bool,
    ) -> Option<LaneKind> {
        let step = self.steps.next(now, sample).filter(|_| has_settled)?;
        self.due = self.due.saturating_sub(step.elapsed);
        let rate = self.measurement.add(step)?;
        self.measurement = Measurement::following();
        match self.phase {
            Phase::Steady { usual, collapsed } => {
                // Without any bytes the path itself is interrupted, for either transport.
                let has_collapsed = rate > 0.0 && rate < usual * COLLAPSED_FRACTION;
                let collapsed = if has_collapsed { collapsed + 1 } else { 0 };
                self.phase = Phase::Steady { usual: usual.max(rate), collapsed };
                let is_due = self.due.is_zero() && rate > 0.0 || collapsed == COLLAPSED_MEASUREMENTS;
                is_due.then(|| self.try_other(rate))
            }
            Phase::Trying { incumbent, .. } => {
                self.end_trial();
                (rate < incumbent * SPEEDUP_MIN).then(|| other(self.kind))
            }
        }
    }

    fn try_other(&mut self, incumbent: f64) -> LaneKind {
        let kind = other(self.kind);
        self.phase = Phase::Trying { kind, incumbent };
        kind
    }

    fn end_trial(&mut self) {
        self.phase = STEADY;
        self.due = self.pause;
        self.pause = (self.pause * TRIAL_INTERVAL_GROWTH).min(TRIAL_INTERVAL_MAX);
    }
}

fn other(kind: LaneKind) -> LaneKind {
    match kind {
        LaneKind::Quic => LaneKind::Tcp,
        LaneKind::Tcp => LaneKind::Quic,
    }
}

#[cfg(test)]
mod tests;
