//! Finds out by measurement how much encoding pays on the way to one subscriber.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tensor_relay_protocol::Effort;
use tokio::time::Instant;

/// A controlled experiment: which [`Effort`] brings most raw bytes per second to a subscriber.
///
/// Chunks are sent in blocks, and blocks take turns through the levels that are still compared. What is measured is the
/// only thing that matters, raw bytes that the subscriber took per second, and so includes what no model of a machine knows:
/// the processors and what else they do, the link, the receiver. After each round, levels that are clearly slower are
/// dropped; at last the cheapest of those that are as fast as the best stays. A trial is repeated when the rate moves far
/// from what it was, and from time to time. The trial of a 512 MiB version costs 0 to 5 % of its time, later versions none.
///
/// Pure: time is passed in. One for each subscription; a reconnected subscription begins again, since the path may differ.
#[derive(Debug)]
pub(crate) struct EffortTrial {
    /// The levels that are still compared, in the order of their turns. One is left when the trial is settled.
    candidates: Vec<Candidate>,
    /// Which candidate the present block belongs to.
    turn: usize,
    /// How many rounds were judged.
    rounds: u32,
    block: Block,
    in_flight_bytes: u64,
    measured: Option<Measurement>,
    standing: Standing,
}

#[derive(Debug, Clone, Copy)]
struct Candidate {
    effort: Effort,
    /// The sum of the logarithms of its rates.
    log_rates: f64,
    blocks: u32,
}

/// The block to which chunks are assigned.
#[derive(Debug, Clone, Copy)]
struct Block {
    number: u64,
    left_bytes: u64,
    /// Bytes at its begin that are not measured: what was in flight then belongs to the block before.
    warm_up_bytes: u64,
}

/// What was measured of one block.
#[derive(Debug, Clone, Copy)]
struct Measurement {
    block: u64,
    effort: Effort,
    warm_up_bytes: u64,
    /// When the last chunk arrived, if none but time for the next one passed since.
    last: Option<Instant>,
    bytes: u64,
    time: Duration,
}

/// What happens once a trial is settled.
#[derive(Debug, Clone, Copy)]
struct Standing {
    /// The rate that the chosen level had, in bytes per second.
    bytes_per_s: f64,
    /// How many blocks in a row were far from it.
    strayed: u32,
    /// How many blocks were sent since the last trial.
    age: u32,
    /// After how many blocks there is a trial even if nothing seems to have changed.
    rest: u32,
}

/// A chunk that is being sent, until this is dropped.
#[derive(Debug)]
#[must_use = "the chunk counts as sent when this is dropped"]
pub(crate) struct InFlight {
    trial: EffortMeter,
    block: u64,
    effort: Effort,
    raw_bytes: u64,
}

/// The least size of a block: eight chunks of the usual 4 MiB.
const BLOCK_MIN_BYTES: u64 = 32 << 20;

/// How long a block takes at least, at the rate of the one before: less would measure the scheduler.
const BLOCK_MIN: Duration = Duration::from_millis(25);

/// The least warm-up of a block: what buffers below the transport may hold.
const WARM_UP_MIN_BYTES: u64 = 8 << 20;

/// The least that is measured of a block, or it does not count.
const MEASURED_MIN_BYTES: u64 = 8 << 20;

/// How much slower than the best a level must be to be dropped, after the first, second, … round. One round alone may be
/// disturbed by half; after the last, what is left counts as equally fast.
const DROPPED_FROM: [f64; 6] = [1.35, 1.2, 1.15, 1.1, 1.07, 1.05];

/// Of levels whose rates differ less than this in the end, the cheapest is taken.
const ADVANTAGE_MIN: f64 = 1.03;

/// How far, up or down, the rate moves from what it was before there is another trial, and for how many blocks in a row.
const STRAYED: f64 = 1.5;
const STRAYED_BLOCKS: u32 = 3;

/// How many blocks there are between two trials, at least, and at first and at most where nothing seems to change.
const REST_MIN: u32 = 32;
const REST: u32 = 256;
const REST_MAX: u32 = 4096;

impl Default for EffortTrial {
    fn default() -> Self {
        let block = Block { number: 0, left_bytes: BLOCK_MIN_BYTES, warm_up_bytes: 0 };
        let standing = Standing { bytes_per_s: 0.0, strayed: 0, age: 0, rest: REST };
        let mut trial = Self {
            candidates: vec![],
            turn: 0,
            rounds: 0,
            block,
            in_flight_bytes: 0,
            measured: None,
            standing,
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
        (self.candidates[self.turn].effort, self.block.number)
    }

    /// A chunk of that block arrived.
    fn handle_sent(&mut self, block: u64, effort: Effort, raw_bytes: u64, now: Instant) {
        let measured = match &mut self.measured {
            Some(measured) if measured.block == block => measured,
            Some(measured) if measured.block > block => return, // A straggler of the block before.
            _ => {
                self.conclude();
                let warm_up_bytes = if block == self.block.number { self.block.warm_up_bytes } else { 0 };
                let begun =
                    Measurement { block, effort, warm_up_bytes, last: None, bytes: 0, time: Duration::ZERO };
                self.measured.insert(begun)
            }
        };
        let last = measured.last.replace(now);
        if measured.warm_up_bytes > 0 {
            measured.warm_up_bytes = measured.warm_up_bytes.saturating_sub(raw_bytes);
        } else if let Some(last) = last {
            measured.bytes += raw_bytes;
            measured.time += now.saturating_duration_since(last);
        }
    }

    /// A chunk is no longer in flight, sent or not.
    fn handle_ended(&mut self, raw_bytes: u64) {
        self.in_flight_bytes = self.in_flight_bytes.saturating_sub(raw_bytes);
    }

    /// A version begins: the time since the last chunk was not spent on sending.
    fn handle_pause(&mut self) {
        if let Some(measured) = &mut self.measured {
            measured.last = None;
        }
    }

    fn next_block(&mut self) {
        self.turn = (self.turn + 1) % self.candidates.len();
        let rate = self.measured.and_then(|measured| measured.bytes_per_s()).unwrap_or_default();
        let warm_up_bytes = self.in_flight_bytes.max(WARM_UP_MIN_BYTES);
        let long_bytes = (rate * BLOCK_MIN.as_secs_f64()) as u64;
        let left_bytes = BLOCK_MIN_BYTES.max(long_bytes).max(4 * warm_up_bytes);
        self.block = Block { number: self.block.number + 1, left_bytes, warm_up_bytes };
    }

    /// Judges the block that was measured last, if it says something.
    fn conclude(&mut self) {
        let Some(measured) = self.measured.take() else { return };
        let Some(bytes_per_s) = measured.bytes_per_s() else { return };
        if self.settled() == Some(measured.effort) {
            return self.handle_settled_block(bytes_per_s);
        }
        let Some(candidate) = self.candidates.iter_mut().find(|c| c.effort == measured.effort) else {
            return; // Dropped meanwhile.
        };
        candidate.log_rates += bytes_per_s.ln();
        candidate.blocks += 1;
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
        self.candidates.reverse(); // So that a steady change of the path favours nobody.
        self.turn = self.turn.min(self.candidates.len() - 1);
        if is_last {
            self.candidates.sort_by_key(|candidate| candidate.effort);
            self.candidates.truncate(1);
        }
        if let [only] = self.candidates[..] {
            self.turn = 0;
            self.standing =
                Standing { bytes_per_s: only.log_rate().exp(), strayed: 0, age: 0, ..self.standing };
            tracing::debug!(effort = ?only.effort, bytes_per_s = self.standing.bytes_per_s as u64,
                rounds = self.rounds, "A trial of encoding is settled.");
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
        let has_strayed = standing.strayed >= STRAYED_BLOCKS && standing.age >= REST_MIN;
        if has_strayed || standing.age >= standing.rest {
            standing.rest = if has_strayed { REST } else { (standing.rest * 2).min(REST_MAX) };
            self.begin(self.candidates[0].effort);
        }
    }

    /// Compares all levels, `first` first.
    fn begin(&mut self, first: Effort) {
        let candidate = |effort| Candidate { effort, log_rates: 0.0, blocks: 0 };
        self.candidates = Effort::ALL.map(candidate).into();
        self.candidates.sort_by_key(|candidate| candidate.effort != first);
        (self.turn, self.rounds) = (0, 0);
    }
}

impl Candidate {
    /// The logarithm of its rate, in the mean over its blocks.
    fn log_rate(&self) -> f64 {
        self.log_rates / f64::from(self.blocks.max(1))
    }
}

impl Measurement {
    fn bytes_per_s(&self) -> Option<f64> {
        let is_enough = self.bytes >= MEASURED_MIN_BYTES && !self.time.is_zero();
        is_enough.then(|| self.bytes as f64 / self.time.as_secs_f64())
    }
}

/// The trial of one subscription, shared by its sends. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct EffortMeter(Arc<Mutex<EffortTrial>>);

impl EffortMeter {
    /// A chunk is begun.
    pub(crate) fn begin(&self, raw_bytes: u64) -> InFlight {
        let (effort, block) = self.trial().assign(raw_bytes);
        InFlight { trial: self.clone(), block, effort, raw_bytes }
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

    /// The network took the chunk whole.
    pub(crate) fn handle_sent(&self) {
        self.trial
            .trial()
            .handle_sent(self.block, self.effort, self.raw_bytes, Instant::now());
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.trial.trial().handle_ended(self.raw_bytes);
    }
}

#[cfg(test)]
mod tests;
