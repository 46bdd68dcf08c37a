//! Chooses a session's transport by measuring how fast each one receives large versions.

use crate::rate::{Measurement, Sample, Steps, WARM_UP_DURATION, micros, pauses};
use std::time::Duration;
use tensor_relay_protocol::{Pause, Trial};
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

/// Decides between the two transports of a session: measures the current one, tries the other one at growing
/// intervals and when the rate collapses, and keeps the faster one.
///
/// Pure: it receives samples and returns the wanted transport. It counts only the time with large versions, and waits
/// until the number of lanes is final, so that one trial runs at a time. A trial costs up to two connections, the
/// chunks in flight when the session changes its transport, and one and a half seconds at the other transport's rate.
#[derive(Debug, Clone)]
pub(crate) struct TransportTrial {
    /// The wanted transport, by rates in bytes per second; in microseconds with large versions.
    trial: Trial<LaneKind>,
    /// The highest rate of the wanted transport between trials.
    usual: f64,
    /// The number of consecutive measurements far below it.
    collapsed: u32,
    steps: Steps,
    measurement: Measurement,
}

impl TransportTrial {
    /// Starts with the transport that the race chose.
    pub(crate) fn new(kind: LaneKind) -> Self {
        let first = match kind {
            LaneKind::Quic => FIRST_TCP_TRIAL_DELAY,
            LaneKind::Tcp | LaneKind::Unix => FIRST_QUIC_TRIAL_DELAY,
        };
        Self {
            trial: Trial::new(kind, Pause::begun(pauses(first))),
            usual: 0.0,
            collapsed: 0,
            steps: Steps::default(),
            measurement: Measurement::after(WARM_UP_DURATION),
        }
    }

    /// Records that the session has lost its connection, and that the race chose `kind` for the next one. If that is
    /// another transport than before, the race may have found a server that was just starting: the choice is made
    /// again, as for a new session.
    pub(crate) fn handle_reconnected(&mut self, kind: LaneKind) {
        if self.trial.incumbent().is_some() {
            self.end_trial(false);
        } else if kind != self.trial.arm {
            *self = Self::new(kind);
        }
    }

    /// Records a new connection of the session, whatever its cause.
    pub(crate) fn handle_connected(&mut self, kind: LaneKind) {
        if self.trial.incumbent().is_none() || self.trial.arm != kind {
            self.trial.conclude(false);
            self.trial.arm = kind;
            (self.usual, self.collapsed) = (0.0, 0);
        }
        (self.steps, self.measurement) = (Steps::default(), Measurement::after(WARM_UP_DURATION));
    }

    /// Records that the wanted transport does not reach the server: the session keeps the other one.
    pub(crate) fn handle_unreachable(&mut self) {
        let kept = other(self.trial.arm);
        self.end_trial(false);
        self.trial.arm = kept;
    }

    /// Handles a sample; returns the transport that the session should change to, if any.
    pub(crate) fn handle_sample(&mut self, now: Instant, sample: Sample) -> Option<LaneKind> {
        let step = self.steps.next(now, sample).filter(|_| sample.has_settled)?;
        self.trial.pause.pass(micros(step.elapsed));
        let rate = self.measurement.add(step)?.bytes_per_s;
        self.measurement = Measurement::following();
        if let Some((_, incumbent)) = self.trial.incumbent() {
            let keeps = rate >= incumbent * SPEEDUP_MIN;
            self.end_trial(keeps);
            return (!keeps).then_some(self.trial.arm);
        }
        // Without any bytes the path itself is interrupted, for either transport.
        let has_collapsed = rate > 0.0 && rate < self.usual * COLLAPSED_FRACTION;
        self.collapsed = if has_collapsed { self.collapsed + 1 } else { 0 };
        self.usual = self.usual.max(rate);
        let is_due = self.trial.is_due() && rate > 0.0 || self.collapsed == COLLAPSED_MEASUREMENTS;
        is_due.then(|| {
            self.trial.attempt(other(self.trial.arm), rate);
            (self.usual, self.collapsed) = (0.0, 0);
            self.trial.arm
        })
    }

    fn end_trial(&mut self, keeps: bool) {
        self.trial.conclude(keeps);
        self.trial.pause.begin();
    }
}

fn other(kind: LaneKind) -> LaneKind {
    match kind {
        LaneKind::Quic => LaneKind::Tcp,
        LaneKind::Tcp => LaneKind::Quic,
        LaneKind::Unix => LaneKind::Unix, // Not tried: the server's address is a socket.
    }
}

#[cfg(test)]
mod tests;
