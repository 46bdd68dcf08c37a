//! Finds out by measurement how much encoding pays on the way to a subscriber.

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

/// A controlled experiment: which [`Effort`] brings most raw bytes per second to the subscribers at one address.
///
/// Chunks are sent in blocks, and blocks take turns through the levels that are still compared. What is measured is the
/// only thing that matters, raw bytes that the subscriber took per second, and so includes what no model of a machine knows:
/// the processors and what else they do, the link, the receiver. A block counts for each level at which its chunks would
/// have been encoded alike, and for none where that is all of them: what cannot be compressed is not tried. After each round, levels that are clearly slower
/// are dropped; at last the cheapest of those that are as fast as the best stays. A trial is repeated when the rate moves far
/// from what it was, and from time to time. It mostly costs one block of each level that is slower.
///
/// Pure: time is passed in.
#[derive(Debug)]
pub(crate) struct EffortTrial {
    /// The levels that are still compared. One is left when the trial is settled.
    candidates: Vec<Candidate>,
    /// How many rounds were judged.
    rounds: u32,
    block: Block,
    measured: Measurement,
    /// Bytes of chunks that are in flight, of this block and of those before it.
    in_flight_bytes: u64,
    older_in_flight_bytes: u64,
    standing: Standing,
}

#[derive(Debug, Clone, Copy)]
struct Candidate {
    effort: Effort,
    /// How many blocks were assigned to it.
    assigned: u32,
    /// How many blocks were measured that count for it, and the sum of the logarithms of their rates.
    blocks: u32,
    log_rates: f64,
}

/// The block to which chunks are assigned.
#[derive(Debug, Clone, Copy)]
struct Block {
    number: u64,
    effort: Effort,
    left_bytes: u64,
}

/// What is measured of the present block, as long as none but its chunks are in flight.
#[derive(Debug, Clone, Copy, Default)]
struct Measurement {
    /// The bytes of all its chunks that arrived, and for each level those that it would have encoded alike.
    sent_bytes: u64,
    alike_bytes: [u64; Effort::ALL.len()],
    /// When the last chunk arrived, if the time since then was spent on the next one.
    last: Option<Instant>,
    /// The bytes that count, and the time that they took.
    bytes: u64,
    time: Duration,
}

/// What happens once a trial is settled.
#[derive(Debug, Clone, Copy)]
struct Standing {
    /// The rate that the chosen level has, in bytes per second.
    bytes_per_s: f64,
    /// How many blocks in a row were far from it.
    strayed: u32,
    /// How many blocks were sent since the last trial.
    age: u32,
    /// Before how many blocks there is no other trial, and after how many there is one even if nothing seems to change.
    rest_min: u32,
    rest: u32,
}

/// The least size of a block: eight chunks of the usual 4 MiB.
const BLOCK_MIN_BYTES: u64 = 32 << 20;

/// How many times as large a block is, at least, as what is in flight when it begins: until that has arrived, and once the
/// next block has begun, chunks of different levels share the processors, and nothing is measured.
const BLOCK_BY_IN_FLIGHT: u64 = 4;

/// How long a block takes at least, at the rate of the one before: less would measure the scheduler.
const BLOCK_MIN: Duration = Duration::from_millis(10);

/// The least that is measured of a block, or it does not count.
const MEASURED_MIN_BYTES: u64 = 8 << 20;

/// Of how much of a block, in per cent, a level must encode the same for the block to count for it.
const ALIKE_MIN_PER_CENT: u64 = 95;

/// How much slower than the best a level must be to be dropped, after the first, second, … round. One round alone may be
/// disturbed by a third; after the last, what is left counts as equally fast.
const DROPPED_FROM: [f64; 6] = [1.35, 1.2, 1.15, 1.1, 1.07, 1.05];

/// Of levels whose rates differ less than this in the end, the cheapest is taken.
const ADVANTAGE_MIN: f64 = 1.03;

/// How far, up or down, the rate moves from what it was before there is another trial, and for how many blocks in a row.
const STRAYED: f64 = 1.5;
const STRAYED_BLOCKS: u32 = 3;

/// How many blocks there are between two trials: at first at least; and where nothing seems to change at first, and at most.
const REST_MIN: u32 = 4;
const REST: u32 = 256;
const REST_MAX: u32 = 4096;

impl Default for EffortTrial {
    fn default() -> Self {
        let mut trial = Self {
            candidates: vec![],
            rounds: 0,
            block: Block { number: 0, effort: Effort::default(), left_bytes: 0 },
            measured: Measurement::default(),
            in_flight_bytes: 0,
            older_in_flight_bytes: 0,
            standing: Standing { bytes_per_s: 0.0, strayed: 0, age: 0, rest_min: REST_MIN, rest: REST },
        };
        trial.begin(Effort::default());
        trial
    }
}

impl EffortTrial {
    /// The level that the trial settled on, or `None` while it compares.
    pub(crate) fn settled(&self) -> Option<Effort> {
        match self.candidates[..] {
            [only] => Some(only.effort),
            _ => None,
        }
    }

    /// The next chunk is begun: with which effort, and in which block.
    fn assign(&mut self, raw_bytes: u64) -> (Effort, u64) {
        if self.block.left_bytes == 0 {
            self.next_block();
        }
        self.block.left_bytes = self.block.left_bytes.saturating_sub(raw_bytes);
        self.in_flight_bytes += raw_bytes;
        (self.block.effort, self.block.number)
    }

    /// A chunk of that block arrived, which the levels in `alike` would have encoded as it was.
    fn handle_sent(&mut self, block: u64, alike: &[Effort], raw_bytes: u64, now: Instant) {
        if block == self.block.number {
            self.measured
                .handle_sent(alike, raw_bytes, now, self.older_in_flight_bytes == 0);
        }
    }

    /// A chunk of that block is no longer in flight, sent or not.
    fn handle_ended(&mut self, block: u64, raw_bytes: u64) {
        let in_flight_bytes = match block == self.block.number {
            true => &mut self.in_flight_bytes,
            false => &mut self.older_in_flight_bytes,
        };
        *in_flight_bytes = in_flight_bytes.saturating_sub(raw_bytes);
    }

    /// A version begins: the time since the last chunk was not spent on sending. A block that says something already is
    /// over, so that the version benefits from it.
    fn handle_pause(&mut self) {
        self.measured.last = None;
        if self.in_flight_bytes == 0 && self.measured.bytes_per_s().is_some() {
            self.block.left_bytes = 0;
        }
    }

    /// Begins a block of the candidate that had fewest, of several the fastest.
    fn next_block(&mut self) {
        let rate = self.measured.bytes_per_s().unwrap_or_default();
        self.conclude();
        let count = |candidate: &Candidate| candidate.assigned.max(candidate.blocks);
        let order = |a: &Candidate, b: &Candidate| {
            count(a).cmp(&count(b)).then(b.log_rate().total_cmp(&a.log_rate()))
        };
        let next = self.candidates.iter_mut().min_by(|a, b| order(a, b));
        let candidate = next.expect("one candidate is always left");
        candidate.assigned += 1;
        let effort = candidate.effort;
        self.older_in_flight_bytes += std::mem::take(&mut self.in_flight_bytes);
        let long_bytes = (rate * BLOCK_MIN.as_secs_f64()) as u64;
        let clear_bytes = BLOCK_BY_IN_FLIGHT * self.older_in_flight_bytes;
        let left_bytes = BLOCK_MIN_BYTES.max(long_bytes).max(clear_bytes);
        self.block = Block { number: self.block.number + 1, effort, left_bytes };
    }

    /// Judges what was measured of the present block, if that says something.
    fn conclude(&mut self) {
        let measured = std::mem::take(&mut self.measured);
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
        if self.candidates.iter().all(|candidate| candidate.blocks > self.rounds) {
            self.judge();
        }
    }

    /// Drops what is clearly slower than the best, and in the end all but one.
    fn judge(&mut self) {
        let best = self.candidates.iter().map(Candidate::log_rate).fold(f64::MIN, f64::max);
        let dropped_from = DROPPED_FROM[self.rounds as usize];
        self.rounds += 1;
        let is_last = self.rounds as usize == DROPPED_FROM.len();
        let slack = if is_last { ADVANTAGE_MIN } else { dropped_from };
        self.candidates.retain(|candidate| candidate.log_rate() + slack.ln() >= best);
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
        if (standing.bytes_per_s / STRAYED..=standing.bytes_per_s * STRAYED).contains(&bytes_per_s) {
            standing.bytes_per_s += (bytes_per_s - standing.bytes_per_s) / 8.0;
            standing.strayed = 0;
        } else {
            standing.strayed += 1;
        }
        let has_strayed = standing.strayed >= STRAYED_BLOCKS && standing.age >= standing.rest_min;
        if has_strayed || standing.age >= standing.rest {
            (standing.rest_min, standing.rest) = match has_strayed {
                true => ((standing.rest_min * 2).min(REST), REST),
                false => (REST_MIN, (standing.rest * 2).min(REST_MAX)),
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
    /// The logarithm of its rate, in the mean over its blocks.
    fn log_rate(&self) -> f64 {
        self.log_rates / f64::from(self.blocks.max(1))
    }
}

impl Measurement {
    fn handle_sent(&mut self, alike: &[Effort], raw_bytes: u64, now: Instant, is_alone: bool) {
        self.sent_bytes += raw_bytes;
        for effort in alike {
            self.alike_bytes[*effort as usize] += raw_bytes;
        }
        let last = std::mem::replace(&mut self.last, is_alone.then_some(now));
        if let Some(last) = last {
            self.bytes += raw_bytes;
            self.time += now.saturating_duration_since(last);
        }
    }

    fn counts_for(&self, effort: Effort) -> bool {
        self.alike_bytes[effort as usize] * 100 >= self.sent_bytes * ALIKE_MIN_PER_CENT
    }

    fn bytes_per_s(&self) -> Option<f64> {
        let is_enough = self.bytes >= MEASURED_MIN_BYTES && !self.time.is_zero();
        is_enough.then(|| self.bytes as f64 / self.time.as_secs_f64())
    }
}

/// The trials of a server: one for each address, and kind of lane, of clients that took versions lately. So a new
/// subscription benefits from those before it. Bounded: what was not used longest is forgotten, and tried again.
#[derive(Debug)]
pub(crate) struct EffortTrials(Cache<(IpAddr, LaneKind), EffortMeter>);

/// How many trials are kept, each of about 300 bytes.
const TRIALS_MAX: usize = 4096;

impl Default for EffortTrials {
    fn default() -> Self {
        Self(Cache::new(TRIALS_MAX))
    }
}

impl EffortTrials {
    /// The trial of the way to `peer` by lanes of this kind.
    pub(crate) fn of(&self, peer: IpAddr, kind: LaneKind) -> EffortMeter {
        let Ok(meter) = self
            .0
            .get_or_insert_with(&(peer, kind), || Ok::<_, Infallible>(EffortMeter::default()));
        meter
    }
}

/// One trial, shared by all sends that it is about. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct EffortMeter(Arc<Mutex<EffortTrial>>);

/// A chunk that is being sent, until this is dropped.
#[derive(Debug)]
#[must_use = "the chunk is no longer in flight when this is dropped"]
pub(crate) struct InFlight {
    meter: EffortMeter,
    block: u64,
    effort: Effort,
    raw_bytes: u64,
}

impl EffortMeter {
    /// A chunk is begun.
    pub(crate) fn begin(&self, raw_bytes: u64) -> InFlight {
        let (effort, block) = self.trial().assign(raw_bytes);
        InFlight { meter: self.clone(), block, effort, raw_bytes }
    }

    /// A version is begun.
    pub(crate) fn handle_version(&self) {
        self.trial().handle_pause();
    }

    fn trial(&self) -> MutexGuard<'_, EffortTrial> {
        // Numbers cannot be left half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl InFlight {
    /// What encoding the chunk may cost.
    pub(crate) fn effort(&self) -> Effort {
        self.effort
    }

    /// The network took the chunk whole, which the levels in `alike` would have encoded as it was.
    pub(crate) fn handle_sent(&self, alike: &[Effort]) {
        let now = Instant::now();
        self.meter.trial().handle_sent(self.block, alike, self.raw_bytes, now);
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.meter.trial().handle_ended(self.block, self.raw_bytes);
    }
}

#[cfg(test)]
mod tests;
