//! [`EffortTrial`]: measures which encoding effort gives a subscriber the highest rate.

use quick_cache::sync::Cache;
use std::{
    convert::Infallible,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tensor_relay_protocol::Effort;
use tensor_relay_transport::LaneKind;
use tokio::time::Instant;

/// A trial that finds the [`Effort`] with the most raw bytes per second for the subscribers at one address, over one
/// kind of lane.
///
/// Chunks are sent in blocks, which alternate between the levels still compared. The measure is the raw bytes of the
/// chunks that were written to lanes, per second. Once a lane's windows are full, it accepts bytes as fast as they are
/// received, so the measure includes all influences: the load of the processors, the link, the receiver. A block counts
/// for each level that would have encoded its chunks in the same way; a block that counts for every level is ignored:
/// incompressible data is not tried. After each round, clearly slower levels are dropped; after the last round, the
/// cheapest of the remaining ones is chosen. A trial is repeated when the rate changes much, and at growing intervals.
/// It mostly costs a part of a block of each slower level: a block that is clearly slower than another level ends early,
/// and full effort is not tried if light effort is clearly slower than none.
///
/// The first level is kept, without measurements, for the first [`WARM_UP_DURATION`] of sending: the receiver's memory is
/// new, and TCP's windows are small. So a short first version, often the only one of a new process, is no experiment.
///
/// Pure: the time is an argument.
#[derive(Debug)]
pub(crate) struct EffortTrial {
    /// The levels still compared; one if the trial is settled.
    candidates: Vec<Candidate>,
    /// The number of judged rounds.
    rounds: u32,
    /// The rest of the time before blocks are measured.
    warm_up: Duration,
    block: Block,
    measured: Measurement,
    /// Bytes of chunks in flight, of this block and of earlier ones.
    in_flight_bytes: u64,
    older_in_flight_bytes: u64,
    standing: Standing,
}

#[derive(Debug, Clone, Copy)]
struct Candidate {
    effort: Effort,
    /// The number of blocks assigned to it.
    assigned: u32,
    /// The number of measured blocks that count for it, and the sum of the logarithms of their rates.
    blocks: u32,
    log_rates: f64,
}

/// The block to which chunks are assigned.
#[derive(Debug, Clone, Copy)]
struct Block {
    /// Successive blocks of one level have one number: the chunks in flight between them need not be told apart.
    number: u64,
    effort: Effort,
    bytes: u64,
}

/// The measurement of the current block, while only its chunks are in flight.
#[derive(Debug, Clone, Copy, Default)]
struct Measurement {
    /// The bytes of its written chunks; and for each level, of those that it would have encoded in the same way.
    sent_bytes: u64,
    equivalent_bytes: [u64; Effort::ALL.len()],
    /// When the last chunk was written, if the time since then was spent on the next one.
    last: Option<Instant>,
    /// The measured bytes, and the time that they took.
    bytes: u64,
    time: Duration,
}

/// The state of a settled trial.
#[derive(Debug, Clone, Copy)]
struct Standing {
    /// The rate of the chosen level, in bytes per second.
    bytes_per_s: f64,
    /// The number of consecutive blocks with a very different rate.
    strayed: u32,
    /// The number of measured blocks since the last trial.
    age: u32,
    /// The minimum number of blocks before the next trial, and the number after which it begins without a change.
    rest_min: u32,
    rest: u32,
}

/// The size at which a block ends once it is measured, and the measured time, on a slow link.
const BLOCK_BYTES: u64 = 32 << 20;
const BLOCK_DURATION: Duration = Duration::from_millis(100);

/// The size at which a block ends even without a measurement, as when a stalled subscriber holds chunks of an earlier
/// block in flight.
const BLOCK_MAX_BYTES: u64 = 512 << 20;

/// The minimum of measured bytes, and of the time that they took: less would measure the scheduler. Until the chunks of
/// the previous level are written, and after the next block begins, chunks of different levels share the processors, and
/// nothing is measured.
const MEASURED_MIN_BYTES: u64 = 8 << 20;
const MEASURED_MIN_DURATION: Duration = Duration::from_millis(10);

/// The time of sending before blocks are measured.
const WARM_UP_DURATION: Duration = Duration::from_millis(150);

/// The factor by which a block must be slower than the rate of another level to end early.
const ENDED_FROM: f64 = 1.5;

/// The percentage of a block that a level must encode in the same way for the block to count for it.
const ALIKE_MIN_PER_CENT: u64 = 95;

/// The factor by which a level must be slower than the best to be dropped, after the first, second, … round. A single
/// round's rate may be wrong by a third.
const DROPPED_FROM: [f64; 6] = [1.35, 1.2, 1.15, 1.1, 1.07, ADVANTAGE_MIN];

/// The ratio of final rates below which levels count as equally fast; the cheapest is chosen.
const ADVANTAGE_MIN: f64 = 1.03;

/// The factor, up or down, by which the rate must change to start another trial, and for how many consecutive blocks.
const STRAYED_FACTOR: f64 = 1.5;
const STRAYED_BLOCKS: u32 = 3;

/// The number of blocks between two trials: `rest_min` begins with the first; `rest` begins with the second, and grows
/// to the third.
const REST_MIN_BLOCKS: u32 = 8;
const REST_BLOCKS: u32 = 1024;
const REST_MAX_BLOCKS: u32 = 16_384;

impl EffortTrial {
    /// A trial that begins with `first`.
    fn new(first: Effort) -> Self {
        let mut trial = Self {
            candidates: vec![],
            rounds: 0,
            warm_up: WARM_UP_DURATION,
            block: Block { number: 0, effort: first, bytes: 0 },
            measured: Measurement::default(),
            in_flight_bytes: 0,
            older_in_flight_bytes: 0,
            standing: Standing {
                bytes_per_s: 0.0,
                strayed: 0,
                age: 0,
                rest_min: REST_MIN_BLOCKS,
                rest: REST_BLOCKS,
            },
        };
        trial.begin(first);
        trial
    }

    /// The level that the trial settled on, or `None` while it compares.
    pub(crate) fn settled(&self) -> Option<Effort> {
        match self.candidates[..] {
            [only] => Some(only.effort),
            _ => None,
        }
    }

    /// Begins the next chunk: returns its effort and its block.
    fn assign(&mut self, raw_bytes: u64) -> (Effort, u64) {
        if self.is_block_over() || self.is_clearly_slower() {
            self.next_block();
        }
        self.block.bytes += raw_bytes;
        self.in_flight_bytes += raw_bytes;
        (self.block.effort, self.block.number)
    }

    /// Handles a written chunk of `block`. The levels in `equivalent` would have encoded it in the same way.
    fn handle_sent(&mut self, block: u64, equivalent: &[Effort], raw_bytes: u64, now: Instant) {
        if block == self.block.number {
            self.measured
                .handle_sent(equivalent, raw_bytes, now, self.older_in_flight_bytes == 0);
        }
    }

    /// Handles a chunk of `block` that is no longer in flight, written or not.
    fn handle_ended(&mut self, block: u64, raw_bytes: u64) {
        let in_flight_bytes = match block == self.block.number {
            true => &mut self.in_flight_bytes,
            false => &mut self.older_in_flight_bytes,
        };
        *in_flight_bytes = in_flight_bytes.saturating_sub(raw_bytes);
    }

    /// Handles the beginning of a version: the time since the last chunk was not spent on sending. Ends a block that is
    /// already measured, so that the version benefits from the result.
    fn handle_pause(&mut self) {
        self.measured.last = None;
        if self.in_flight_bytes == 0 && self.measured.bytes_per_s().is_some() {
            self.next_block();
        }
    }

    fn is_block_over(&self) -> bool {
        let is_long = self.block.bytes >= BLOCK_BYTES || self.measured.time >= BLOCK_DURATION;
        is_long && self.measured.bytes_per_s().is_some() || self.block.bytes >= BLOCK_MAX_BYTES
    }

    /// Whether the current block is clearly slower than another level, so that the rest of it would only cost time.
    fn is_clearly_slower(&self) -> bool {
        let Some(bytes_per_s) = self.measured.bytes_per_s() else { return false };
        let log_rate = (bytes_per_s * ENDED_FROM).ln();
        let is_faster = |other: &Candidate| {
            other.blocks > 0 && other.log_rate() > log_rate && !self.measured.counts_for(other.effort)
        };
        self.candidates.iter().any(is_faster)
    }

    /// Begins a block of the candidate with the fewest blocks; of several, the fastest.
    fn next_block(&mut self) {
        self.conclude();
        let count = |candidate: &Candidate| candidate.assigned.max(candidate.blocks);
        let order = |a: &Candidate, b: &Candidate| {
            count(a).cmp(&count(b)).then(b.log_rate().total_cmp(&a.log_rate()))
        };
        let next = self.candidates.iter_mut().min_by(|a, b| order(a, b));
        let candidate = next.expect("one candidate is always left");
        candidate.assigned += u32::from(self.warm_up.is_zero());
        let effort = candidate.effort;
        let is_same = effort == self.block.effort;
        if !is_same {
            self.older_in_flight_bytes += std::mem::take(&mut self.in_flight_bytes);
        }
        let number = self.block.number + u64::from(!is_same);
        self.block = Block { number, effort, bytes: 0 };
    }

    /// Evaluates the measurement of the current block, if it counts.
    fn conclude(&mut self) {
        let measured = std::mem::take(&mut self.measured);
        if !self.warm_up.is_zero() {
            self.warm_up = self.warm_up.saturating_sub(measured.time);
            return;
        }
        let Some(bytes_per_s) = measured.bytes_per_s() else { return };
        if Effort::ALL.into_iter().all(|effort| measured.counts_for(effort)) {
            return;
        }
        if let Some(effort) = self.settled() {
            if measured.counts_for(effort) {
                self.handle_settled_block(bytes_per_s);
            }
            return;
        }
        for candidate in self
            .candidates
            .iter_mut()
            .filter(|candidate| measured.counts_for(candidate.effort))
        {
            candidate.log_rates += bytes_per_s.ln();
            candidate.blocks += 1;
        }
        if self.is_light_clearly_slower() {
            self.candidates.retain(|candidate| candidate.effort != Effort::Full);
        }
        if self.candidates.iter().all(|candidate| candidate.blocks > self.rounds) {
            self.judge();
        }
    }

    /// Whether light effort is clearly slower than none. Then the processors bound the rate, and full effort, which
    /// needs more of them, is slower still.
    fn is_light_clearly_slower(&self) -> bool {
        let of = |effort| {
            let mut measured = self.candidates.iter().filter(|candidate| candidate.blocks > 0);
            measured.find(|candidate| candidate.effort == effort).map(Candidate::log_rate)
        };
        let (none, light) = (of(Effort::None), of(Effort::Light));
        none.zip(light).is_some_and(|(none, light)| light + DROPPED_FROM[0].ln() < none)
    }

    /// Drops the levels that are clearly slower than the best; after the last round, all but one.
    fn judge(&mut self) {
        let best = self.candidates.iter().map(Candidate::log_rate).fold(f64::MIN, f64::max);
        let dropped_from = DROPPED_FROM[self.rounds as usize];
        self.rounds += 1;
        let is_last = self.rounds as usize == DROPPED_FROM.len();
        self.candidates
            .retain(|candidate| candidate.log_rate() + dropped_from.ln() >= best);
        if is_last {
            self.candidates.sort_by_key(|candidate| candidate.effort);
            self.candidates.truncate(1);
        }
        if let [only] = self.candidates[..] {
            let bytes_per_s = only.log_rate().exp();
            self.standing = Standing { bytes_per_s, strayed: 0, age: 0, ..self.standing };
            let (effort, rounds) = (only.effort, self.rounds);
            tracing::debug!(?effort, bytes_per_s, rounds, "A trial of encoding is settled.");
        }
    }

    fn handle_settled_block(&mut self, bytes_per_s: f64) {
        let standing = &mut self.standing;
        standing.age += 1;
        if (standing.bytes_per_s / STRAYED_FACTOR..=standing.bytes_per_s * STRAYED_FACTOR)
            .contains(&bytes_per_s)
        {
            standing.bytes_per_s += (bytes_per_s - standing.bytes_per_s) / 8.0;
            standing.strayed = 0;
        } else {
            standing.strayed += 1;
        }
        let has_strayed = standing.strayed >= STRAYED_BLOCKS && standing.age >= standing.rest_min;
        if has_strayed || standing.age >= standing.rest {
            (standing.rest_min, standing.rest) = match has_strayed {
                true => ((standing.rest_min * 2).min(REST_BLOCKS), REST_BLOCKS),
                false => (REST_MIN_BLOCKS, (standing.rest * 2).min(REST_MAX_BLOCKS)),
            };
            self.begin(self.candidates[0].effort);
        }
    }

    /// Compares all levels, `first` first.
    fn begin(&mut self, first: Effort) {
        let candidate = |effort| Candidate { effort, assigned: 0, blocks: 0, log_rates: 0.0 };
        self.candidates = Effort::ALL.map(candidate).into();
        self.candidates.sort_by_key(|candidate| candidate.effort != first);
        self.rounds = 0;
    }
}

impl Candidate {
    /// The mean logarithm of the rates of its blocks.
    fn log_rate(&self) -> f64 {
        self.log_rates / f64::from(self.blocks.max(1))
    }
}

impl Measurement {
    fn handle_sent(&mut self, equivalent: &[Effort], raw_bytes: u64, now: Instant, is_alone: bool) {
        self.sent_bytes += raw_bytes;
        for effort in equivalent {
            self.equivalent_bytes[*effort as usize] += raw_bytes;
        }
        let last = std::mem::replace(&mut self.last, is_alone.then_some(now));
        if let Some(last) = last {
            self.bytes += raw_bytes;
            self.time += now.saturating_duration_since(last);
        }
    }

    fn counts_for(&self, effort: Effort) -> bool {
        self.equivalent_bytes[effort as usize] * 100 >= self.sent_bytes * ALIKE_MIN_PER_CENT
    }

    fn bytes_per_s(&self) -> Option<f64> {
        let is_enough = self.bytes >= MEASURED_MIN_BYTES && self.time >= MEASURED_MIN_DURATION;
        is_enough.then(|| self.bytes as f64 / self.time.as_secs_f64())
    }
}

/// The trials of a server: one for each recent client address and kind of lane, so that a new subscription benefits
/// from earlier ones. A bounded cache, which drops trials that were not used recently.
#[derive(Debug)]
pub(crate) struct EffortTrials(Cache<(IpAddr, LaneKind), EffortMeter>);

/// The maximum number of cached trials, each of about 300 bytes.
const TRIALS_MAX: usize = 4096;

impl Default for EffortTrials {
    fn default() -> Self {
        Self(Cache::new(TRIALS_MAX))
    }
}

impl EffortTrials {
    /// The meter of the trial for `peer` over lanes of this kind.
    pub(crate) fn meter(&self, peer: IpAddr, kind: LaneKind) -> EffortMeter {
        let Ok(meter) = self.0.get_or_insert_with(&(peer, kind), || {
            Ok::<_, Infallible>(EffortMeter::beginning_with(first_effort(kind)))
        });
        meter
    }
}

/// The level with which the trials of lanes of this kind begin, and which versions have that are too small to be
/// measured. TCP is used on short paths, whose links are usually faster than encoding.
fn first_effort(kind: LaneKind) -> Effort {
    match kind {
        LaneKind::Quic => Effort::Light,
        LaneKind::Tcp => Effort::None,
    }
}

/// A handle to one trial, shared by all sends that it measures. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct EffortMeter(Arc<Mutex<EffortTrial>>);

/// A chunk in flight, until this is dropped.
#[derive(Debug)]
#[must_use = "the chunk is no longer in flight when this is dropped"]
pub(crate) struct InFlight {
    meter: EffortMeter,
    block: u64,
    effort: Effort,
    raw_bytes: u64,
}

impl EffortMeter {
    fn beginning_with(first: Effort) -> Self {
        Self(Arc::new(Mutex::new(EffortTrial::new(first))))
    }

    /// Begins a chunk.
    pub(crate) fn begin(&self, raw_bytes: u64) -> InFlight {
        let (effort, block) = self.trial().assign(raw_bytes);
        InFlight { meter: self.clone(), block, effort, raw_bytes }
    }

    /// Handles the beginning of a version.
    pub(crate) fn handle_version(&self) {
        self.trial().handle_pause();
    }

    fn trial(&self) -> MutexGuard<'_, EffortTrial> {
        // A panic cannot leave the numbers inconsistent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl InFlight {
    /// The encoding effort of the chunk.
    pub(crate) fn effort(&self) -> Effort {
        self.effort
    }

    /// Handles the written chunk. The levels in `equivalent` would have encoded it in the same way.
    pub(crate) fn handle_sent(&self, equivalent: &[Effort]) {
        let now = Instant::now();
        self.meter.trial().handle_sent(self.block, equivalent, self.raw_bytes, now);
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.meter.trial().handle_ended(self.block, self.raw_bytes);
    }
}

#[cfg(test)]
mod tests;
