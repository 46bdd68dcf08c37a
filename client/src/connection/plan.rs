//! The automatic number of lanes.

use crate::rate::{Measurement, Rate, Sample, Step, Steps, WARM_UP_DURATION, micros, pauses};
use std::time::Duration;
use tensor_relay_protocol::{Pause, Trial};
use tokio::time::Instant;

/// The speed-up from which more lanes are kept: less may be noise, and each lane costs threads and memory. While this
/// process is not busy, a smaller gain may be taken from other programs: more threads get more turns.
const SPEEDUP_MIN: f64 = 1.1;
const SPEEDUP_IDLE_MIN: f64 = 1.25;

/// The fraction of the incumbent's rate below which a glance ends a trial.
const HOPELESS: f64 = 0.9;

/// The fraction of its former rate that each lane keeps where all of them are needed: fewer are not tried.
const LINEAR_MIN: f64 = 0.7;

/// The processors for each lane from which this process counts as busy. A lane that is as fast as its thread permits
/// uses 0.8 to 0.95.
const BUSY_MIN: f64 = 0.5;

/// The processors for each lane below which it counts as idle: its flow is limited on its way, or slow. On two cores a
/// lane over loopback uses 0.46, and 0.14 beside a dozen other programs.
const IDLE_MAX: f64 = 0.1;

/// The factor by which idle lanes are added.
const IDLE_GROWTH: u32 = 4;

/// The time for which each lane should be busy with the version for which it joins. Joining takes milliseconds.
const LANE_SHARE_S: f64 = 0.01;

/// The least payload for a lane: the size of a chunk, by default. A chunk travels on one lane.
const LANE_BYTES_MIN: f64 = (4 << 20) as f64;

/// The assumed rate of a lane where none was measured: the fastest seen, so that few join for a short time.
const LANE_BYTES_PER_S: f64 = 3.2e9;

/// The unmeasured time in which the first lanes, and those on a fast path, reach a speed that can be compared.
const FIRST_WARM_UP: Duration = Duration::from_millis(200);

/// The time to wait for lanes to join; then those that have joined are enough.
const JOIN_TIMEOUT: Duration = Duration::from_secs(5);

/// The time with large versions before the second row of trials.
const FIRST_PAUSE: Duration = Duration::from_secs(20);

/// What both ends know about lanes before any is measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Bounds {
    /// The processors that this process may use: its affinity and its cgroup's quota, rounded down.
    pub(crate) processors: u32,
    /// The maximum number of lanes: of the server's offer, of the configuration, and of this end's memory.
    pub(crate) max: u32,
    /// The maximum while this process is busy, so that each lane finds a free processor for the threads of both ends.
    pub(crate) busy_max: u32,
    /// What was measured before on this path.
    pub(crate) known: Option<Known>,
}

/// What was measured on a path: a number of lanes, and the rate of each.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Known {
    lanes: u32,
    lane_bytes_per_s: f64,
}

impl Bounds {
    /// The model: the number of lanes with which a version of `bytes` begins.
    ///
    /// The number that was best before on this path; otherwise a lane for every two processors, because each keeps
    /// nearly two threads busy: one at each end, which may be the same machine. But no more than the version keeps
    /// busy for [`LANE_SHARE_S`], or has [`LANE_BYTES_MIN`] for.
    pub(crate) fn first(&self, bytes: u64) -> u32 {
        let (lanes, rate) = match self.known {
            Some(known) => (known.lanes, known.lane_bytes_per_s),
            None => (self.processors / 2, LANE_BYTES_PER_S),
        };
        let by_size = bytes as f64 / (rate * LANE_SHARE_S).max(LANE_BYTES_MIN);
        lanes.min(by_size as u32).min(self.max).max(1)
    }
}

/// Determines the number of lanes for one connection: begins with that of the [model](Bounds::first), then tries more
/// and fewer as long as that gains, and again after pauses.
///
/// More lanes gain if they are faster by a tenth (by a quarter if this process is not busy), and by more than the
/// processor time for each byte rises. While it is busy, lanes are doubled up to a lane for every two processors. While
/// it is not, fewer may do as well; and while it is idle, each lane is limited on its way, as in clouds, and four times
/// as many are tried. A trial with a clear loss ends at a glance.
///
/// Pure: it receives samples and returns the wanted number of lanes. Small versions are sampled only if they take seconds.
#[derive(Debug)]
pub(crate) struct Plan {
    bounds: Bounds,
    trial: Trial<u32, Rate>,
    /// Whether the next trial is of more lanes, not of fewer.
    tries_more: bool,
    /// The number of directions in a row that gained nothing.
    failed: u32,
    /// Whether more lanes were added, and each is nearly as fast as before.
    are_all_needed: bool,
    /// The fastest rate of a number that was kept, and changes of the path since: with fewer lanes each time, small losses
    /// would add up.
    fastest: Rate,
    /// Whether the number follows the size of versions: nothing was measured on this connection.
    follows_size: bool,
    steps: Steps,
    waited: Duration,
    measurement: Measurement,
}

impl Plan {
    pub(crate) fn new(bounds: Bounds) -> Self {
        Self {
            bounds,
            trial: Trial::new(1, Pause::new(pauses(FIRST_PAUSE))),
            tries_more: false,
            failed: 0,
            are_all_needed: false,
            fastest: Rate::default(),
            follows_size: true,
            steps: Steps::default(),
            waited: Duration::ZERO,
            measurement: Measurement::after(FIRST_WARM_UP),
        }
    }

    /// The wanted number of lanes.
    pub(crate) fn lanes(&self) -> u32 {
        self.trial.arm
    }

    /// Whether the number is final until the next trial.
    pub(crate) fn is_settled(&self) -> bool {
        self.bounds.max <= 1 || self.trial.incumbent().is_none() && !self.trial.is_due()
    }

    /// What was measured on this path.
    pub(crate) fn known(&self) -> Option<Known> {
        self.bounds.known
    }

    /// Handles a sample.
    pub(crate) fn handle_sample(&mut self, now: Instant, sample: Sample) {
        if let Some(period) = sample.period.filter(|_| self.follows_size) {
            self.trial.arm = self.bounds.first(period.bytes).max(self.lanes());
        }
        let Some(step) = self.steps.next(now, sample) else { return };
        self.trial.pause.pass(micros(step.elapsed));
        if step.lanes != Some(self.lanes()) {
            return self.wait_for_lanes(step, sample.lanes);
        }
        self.waited = Duration::ZERO;
        if let Some(rate) = self.measure(step) {
            (self.follows_size, self.measurement) = (false, Measurement::following());
            self.decide(rate);
        }
    }

    /// Gives up lanes that do not join.
    fn wait_for_lanes(&mut self, step: Step, joined: u32) {
        self.waited += step.elapsed;
        if self.waited >= JOIN_TIMEOUT {
            (self.follows_size, self.measurement) = (false, Measurement::following());
            self.waited = Duration::ZERO;
            match self.trial.incumbent() {
                Some((_, before)) => self.end_trial(false, before),
                None => self.trial.arm = joined.max(1),
            }
        }
    }

    /// The rate, once it is known well enough for the decision to be made.
    fn measure(&mut self, step: Step) -> Option<Rate> {
        let measured = self.measurement.add(step);
        let is_clear = |rate: &Rate| match self.trial.incumbent() {
            Some((_, before)) => rate.bytes_per_s < before.bytes_per_s * HOPELESS,
            None => {
                let load_max = if self.lanes() > 1 { BUSY_MIN } else { IDLE_MAX };
                self.trial.is_due() && rate.each(self.lanes()).processors < load_max
            }
        };
        measured.or_else(|| self.measurement.glance().filter(is_clear))
    }

    fn decide(&mut self, rate: Rate) {
        let has_arrived = rate.bytes_per_s > 0.0;
        if let Some((lanes, before)) = self.trial.incumbent() {
            let gains = match lanes < self.lanes() {
                true => is_worth(rate, (lanes, before)),
                false => !is_worth(self.fastest, (self.lanes(), rate)),
            };
            self.end_trial(has_arrived && gains, rate);
        } else if has_arrived {
            self.note(rate);
            if self.trial.is_due() {
                self.try_next(rate);
            }
        }
    }

    /// Ends a trial in which the challenger had `rate`, and begins the next.
    fn end_trial(&mut self, keeps: bool, mut rate: Rate) {
        let Some((lanes, before)) = self.trial.conclude(keeps) else { return };
        if keeps {
            let [each, each_before] = [rate.each(self.lanes()), before.each(lanes)];
            let is_linear = each.bytes_per_s >= LINEAR_MIN * each_before.bytes_per_s;
            (self.failed, self.are_all_needed) = (0, self.lanes() > lanes && is_linear);
        } else {
            self.turn();
            rate = before;
        }
        self.note(rate);
        self.try_next(rate);
    }

    /// Tries another number, in either direction; without one, pauses.
    fn try_next(&mut self, rate: Rate) {
        while self.failed < 2 {
            if let Some(lanes) = self.challenger(rate) {
                if self.tries_more {
                    let is_slow = rate.each(self.lanes()).processors < IDLE_MAX; // Or its path is long: windows grow.
                    let warm_up = if is_slow { WARM_UP_DURATION } else { FIRST_WARM_UP };
                    self.measurement = Measurement::after(warm_up);
                }
                return self.trial.attempt(lanes, rate);
            }
            self.turn();
        }
        (self.failed, self.are_all_needed) = (0, false);
        self.trial.pause.begin();
    }

    /// The next number in the current direction, after `rate` was measured.
    fn challenger(&self, rate: Rate) -> Option<u32> {
        let (lanes, Bounds { max, busy_max, .. }) = (self.lanes(), self.bounds);
        let load = rate.each(lanes).processors;
        if self.tries_more {
            let growth = if load < IDLE_MAX { IDLE_GROWTH } else { 2 };
            let more = (growth * lanes).min(if load < BUSY_MIN { max } else { busy_max.min(max) });
            return (more > lanes).then_some(more);
        }
        let are_needed = self.are_all_needed || load >= BUSY_MIN && lanes <= busy_max;
        (lanes > 1 && !are_needed).then_some(lanes / 2)
    }

    fn turn(&mut self) {
        self.failed += 1;
        self.tries_more = !self.tries_more;
    }

    /// Records the rate of the number in use. What it changed since the last time, others changed as well.
    fn note(&mut self, rate: Rate) {
        let (lanes, lane_bytes_per_s) = (self.lanes(), rate.each(self.lanes()).bytes_per_s);
        let known = self.bounds.known.replace(Known { lanes, lane_bytes_per_s });
        if let Some(known) = known.filter(|known| known.lanes == lanes) {
            self.fastest.bytes_per_s *= lane_bytes_per_s / known.lane_bytes_per_s;
        }
        if self.fastest.bytes_per_s < rate.bytes_per_s {
            self.fastest = rate;
        }
    }
}

/// Whether more lanes with the rate `more` are worth their price, compared with `lanes`.
fn is_worth(more: Rate, (lanes, fewer): (u32, Rate)) -> bool {
    let is_busy = fewer.each(lanes).processors >= BUSY_MIN;
    let speedup_min = if is_busy { SPEEDUP_MIN } else { SPEEDUP_IDLE_MIN };
    more.bytes_per_s >= fewer.bytes_per_s * speedup_min.max(more.cost_by(fewer))
}

#[cfg(test)]
mod tests;
