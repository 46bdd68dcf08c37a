//! The automatic number of lanes.

use crate::rate::{Measurement, Rate, Sample, Step, Steps, WARM_UP_DURATION, micros};
use std::time::Duration;
use tensor_relay_protocol::{Pauses, Trial};
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

/// The time with large versions between trials, in microseconds.
const PAUSES: Pauses = Pauses { first: 20_000_000, growth: 4, max: 3_600_000_000 };

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

/// The direction of the next trial.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    More,
    Fewer,
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
    direction: Direction,
    /// The number of directions in a row that gained nothing.
    failed: u32,
    /// Whether more lanes were added, and each is nearly as fast as before.
    are_all_needed: bool,
    /// The fastest rate of a number that was kept, and changes of the path since: with fewer lanes each time, small losses
    /// would add up.
    fastest: Option<Rate>,
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
            trial: Trial::new(1, PAUSES),
            direction: Direction::Fewer,
            failed: 0,
            are_all_needed: false,
            fastest: None,
            follows_size: true,
            steps: Steps::default(),
            waited: Duration::ZERO,
            measurement: Measurement::after(FIRST_WARM_UP),
        }
    }

    /// The wanted number of lanes.
    pub(crate) fn lanes(&self) -> u32 {
        self.trial.arm()
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
        if sample.period.is_some() && self.follows_size {
            let first = self.bounds.first(sample.version_bytes);
            self.trial.take(first.max(self.lanes()));
        }
        let Some(step) = self.steps.next(now, sample) else { return };
        self.trial.pass(micros(step.elapsed));
        if step.lanes != Some(self.lanes()) {
            return self.wait_for_lanes(step, sample.lanes);
        }
        self.waited = Duration::ZERO;
        if let Some(rate) = self.measure(step) {
            self.decide(rate);
        }
    }

    /// Gives up lanes that do not join.
    fn wait_for_lanes(&mut self, step: Step, joined: u32) {
        self.waited += step.elapsed;
        if self.waited >= JOIN_TIMEOUT {
            self.follows_size = false;
            (self.waited, self.measurement) = (Duration::ZERO, Measurement::following());
            match self.trial.incumbent() {
                Some((_, before)) => self.end_trial(false, before),
                None => self.trial.take(joined.max(1)),
            }
        }
    }

    /// The rate, once it is known well enough for the decision to be made.
    fn measure(&mut self, step: Step) -> Option<Rate> {
        let measured = self.measurement.add(step);
        let is_clear = |rate: &Rate| match self.trial.incumbent() {
            Some((_, before)) => rate.bytes_per_s < before.bytes_per_s * HOPELESS,
            None => {
                self.trial.is_due()
                    && !is_busy(self.lanes(), *rate)
                    && (self.lanes() > 1 || is_idle(self.lanes(), *rate))
            }
        };
        measured.or_else(|| self.measurement.glance().filter(is_clear))
    }

    fn decide(&mut self, rate: Rate) {
        self.follows_size = false;
        self.measurement = Measurement::following();
        match self.trial.incumbent() {
            Some((_, before)) if rate.bytes_per_s == 0.0 => self.end_trial(false, before),
            Some((lanes, before)) => match lanes < self.lanes() {
                true => self.end_trial(is_worth(rate, (lanes, before)), rate),
                false => {
                    let more = self.fastest.unwrap_or(before);
                    self.end_trial(!is_worth(more, (self.lanes(), rate)), rate);
                }
            },
            None if rate.bytes_per_s == 0.0 => {}
            None => {
                self.note(rate);
                if self.trial.is_due() {
                    self.try_next(rate);
                }
            }
        }
    }

    /// Ends a trial in which the challenger had `rate`, and begins the next.
    fn end_trial(&mut self, keeps: bool, rate: Rate) {
        let Some((lanes, before)) = self.trial.incumbent() else { return };
        self.trial.conclude(keeps);
        if keeps {
            let of_each = |rate: Rate, lanes: u32| rate.bytes_per_s / f64::from(lanes);
            self.failed = 0;
            self.are_all_needed =
                self.lanes() > lanes && of_each(rate, self.lanes()) >= LINEAR_MIN * of_each(before, lanes);
        } else {
            self.turn();
        }
        let rate = if keeps { rate } else { before };
        self.note(rate);
        self.try_next(rate);
    }

    /// Tries another number, in either direction; without one, pauses.
    fn try_next(&mut self, rate: Rate) {
        self.measurement = Measurement::following();
        while self.failed < 2 {
            if let Some(lanes) = self.challenger(rate) {
                if self.direction == Direction::More {
                    let is_slow = is_idle(self.lanes(), rate); // Or its path is long: windows grow.
                    let warm_up = if is_slow { WARM_UP_DURATION } else { FIRST_WARM_UP };
                    self.measurement = Measurement::after(warm_up);
                }
                return self.trial.attempt(lanes, rate);
            }
            self.turn();
        }
        (self.failed, self.are_all_needed) = (0, false);
        self.trial.pause();
    }

    /// The next number in the current direction, after `rate` was measured.
    fn challenger(&self, rate: Rate) -> Option<u32> {
        let (lanes, Bounds { max, busy_max, .. }) = (self.lanes(), self.bounds);
        let is_busy = is_busy(lanes, rate);
        match self.direction {
            Direction::More if is_busy => Some((2 * lanes).min(busy_max).min(max)),
            Direction::More if is_idle(lanes, rate) => Some((IDLE_GROWTH * lanes).min(max)),
            Direction::More => Some((2 * lanes).min(max)),
            Direction::Fewer if self.are_all_needed || is_busy && lanes <= busy_max => None,
            Direction::Fewer => return (lanes > 1).then_some(lanes / 2),
        }
        .filter(|more| *more > lanes)
    }

    fn turn(&mut self) {
        self.failed += 1;
        self.direction = match self.direction {
            Direction::More => Direction::Fewer,
            Direction::Fewer => Direction::More,
        };
    }

    /// Records the rate of the number in use. What it changed since the last time, others changed as well.
    fn note(&mut self, rate: Rate) {
        let lanes = self.lanes();
        let lane_bytes_per_s = rate.bytes_per_s / f64::from(lanes);
        let known = self.bounds.known.replace(Known { lanes, lane_bytes_per_s });
        let change = known
            .filter(|known| known.lanes == lanes)
            .map_or(1.0, |known| lane_bytes_per_s / known.lane_bytes_per_s);
        let fastest = self.fastest.map(|fastest| fastest.bytes_per_s * change).unwrap_or_default();
        self.fastest = match (self.fastest, fastest >= rate.bytes_per_s) {
            (Some(then), true) => Some(Rate { bytes_per_s: fastest, ..then }),
            _ => Some(rate),
        };
    }
}

/// Whether this process was busy with so many lanes.
fn is_busy(lanes: u32, rate: Rate) -> bool {
    rate.processors >= BUSY_MIN * f64::from(lanes)
}

/// Whether this process was idle with so many lanes.
fn is_idle(lanes: u32, rate: Rate) -> bool {
    rate.processors < IDLE_MAX * f64::from(lanes)
}

/// Whether more lanes with the rate `more` are worth their price, compared with `lanes`.
fn is_worth(more: Rate, (lanes, fewer): (u32, Rate)) -> bool {
    let speedup_min = if is_busy(lanes, fewer) { SPEEDUP_MIN } else { SPEEDUP_IDLE_MIN };
    more.bytes_per_s >= fewer.bytes_per_s * speedup_min.max(more.cost_by(fewer))
}

#[cfg(test)]
mod tests;
