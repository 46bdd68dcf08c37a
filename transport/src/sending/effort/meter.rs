//! [`Meter`]: measures the sending to one address, and changes the effort as the facts change.

use super::choice::{Facts, Level};
use std::time::Duration;
use tensor_relay_protocol::{Effort, Pause, Pauses, Trial};
use tokio::time::Instant;

/// A moment, and the processor time that this process had used by then.
#[derive(Debug, Clone, Copy)]
pub(super) struct Moment {
    pub(super) at: Instant,
    pub(super) processor_time: Duration,
}

/// A written chunk.
#[derive(Debug, Clone, Copy)]
pub(super) struct Written {
    pub(super) effort: Effort,
    pub(super) raw_bytes: u64,
    pub(super) wire_bytes: u64,
    /// The time spent on encoding it; zero if another subscriber's encoding was used.
    pub(super) encode_time: Duration,
    /// Whether its encoding follows from the effort: it is no delta, and no codec was requested.
    pub(super) is_chosen: bool,
}

/// Measures windows of written chunks, and chooses an effort after each one.
///
/// The measure is the raw bytes of the chunks that were written to lanes, per second. Once a lane's windows are full,
/// it accepts bytes as fast as they are received, so the measure includes all influences: the load of the processors,
/// the link, the receiver. Levels are not tried: what they would bring is computed from samples of the payload
/// ([`Facts::choose`]), which may take [`SAMPLES_PER_CENT`] of the time of sending.
///
/// A change that does not make the sending faster is undone: the reason is not among the facts, such as a weak receiver
/// or a slow disk. So each change is a [`Trial`], in windows, whose score is the fastest recent window.
///
/// Pure: time is an argument.
#[derive(Debug)]
pub(super) struct Meter {
    /// The current level, and the seconds for each raw byte of the former one's fastest recent window.
    trial: Trial<Effort>,
    processors: f64,
    /// The estimate of each level, a moving average over the payload, and the bytes that it covers.
    levels: [Level; Effort::ALL.len()],
    estimated_bytes: f64,
    /// The time of sending, and of making samples.
    sent_time: Duration,
    sampled_time: Duration,
    /// When the last chunk was written, if the time since then was spent on the next one.
    last: Option<Moment>,
    window: Window,
    /// The seconds for each raw byte with the current effort, a moving average of windows.
    seconds: Option<f64>,
    /// Those of the fastest recent window with the current effort.
    fastest: f64,
    /// The number of windows in a row in which another level was expected to be faster.
    doubts: u32,
}

/// The window being measured: chunks of one level.
#[derive(Debug, Clone, Copy, Default)]
struct Window {
    time: Duration,
    processor_time: Duration,
    raw_bytes: u64,
    wire_bytes: u64,
    encode_time: Duration,
    /// The raw bytes of chunks whose encoding does not follow from the effort.
    other_bytes: u64,
}

/// The size and the duration at which a window ends; at the beginning of a version it may end at the minimum: less
/// would measure the scheduler.
const WINDOW_BYTES: u64 = 32 << 20;
const WINDOW_DURATION: Duration = Duration::from_millis(100);
const WINDOW_MIN_BYTES: u64 = 8 << 20;
const WINDOW_MIN_DURATION: Duration = Duration::from_millis(10);

/// The time of sending before windows are measured: the receiver's memory is new, and TCP's windows are small.
const WARM_UP_DURATION: Duration = Duration::from_millis(150);

/// The percentage of the time of sending that samples may take.
const SAMPLES_PER_CENT: u32 = 1;

/// The maximum number of raw bytes over which estimates of the payload are averaged.
const AVERAGED_BYTES: f64 = (64 << 20) as f64;

/// The maximum percentage of bytes in a window whose encoding does not follow from the effort.
const OTHER_MAX_PER_CENT: u64 = 5;

/// The number of windows in a row that must agree on another level.
const DOUBTS: u32 = 2;

/// The factor by which the fastest window after a change must be slower than the fastest before it for the change to be
/// undone, by the number of windows: a single one may be wrong by a third. In the end a higher level must have been
/// faster, and a lower one may be slower by [`LOWER_MIN`]. The fastest ones are compared, since others contain what
/// else the machine and the path did.
const UNDONE_FROM: [f64; 6] = [1.35, 1.2, 1.1, 1.05, 1.0, 0.97];
const LOWER_MIN: f64 = 1.05;

/// The factor by which the fastest window counts as slower with each later one.
const FORGOTTEN: f64 = 1.02;

/// The windows between changes.
const PAUSES: Pauses = Pauses { first: 2, growth: 2, max: 4096 };

impl Meter {
    /// A meter on a machine with `processors`, that begins with the level `first`.
    pub(super) fn new(first: Effort, processors: f64) -> Self {
        Self {
            trial: Trial::new(first, Pause::begun(PAUSES)),
            processors,
            levels: [Level::RAW; Effort::ALL.len()],
            estimated_bytes: 0.0,
            sent_time: Duration::ZERO,
            sampled_time: Duration::ZERO,
            last: None,
            window: Window::default(),
            seconds: None,
            fastest: f64::MAX,
            doubts: 0,
        }
    }

    /// The current level.
    pub(super) fn effort(&self) -> Effort {
        self.trial.arm
    }

    /// Whether a sample may be made now.
    pub(super) fn may_sample(&self) -> bool {
        self.sampled_time * 100 <= self.sent_time * SAMPLES_PER_CENT
    }

    /// Handles the time that a sample took.
    pub(super) fn handle_sampled(&mut self, took: Duration) {
        self.sampled_time += took;
    }

    /// Handles what each level would make of a chunk.
    pub(super) fn handle_estimate(&mut self, levels: [Level; Effort::ALL.len()], raw_bytes: u64) {
        self.estimated_bytes = (self.estimated_bytes + raw_bytes as f64).min(AVERAGED_BYTES);
        let weight = (raw_bytes as f64 / self.estimated_bytes).min(1.0);
        for (mean, level) in self.levels.iter_mut().zip(levels) {
            mean.share += (level.share - mean.share) * weight;
            mean.encode_s += (level.encode_s - mean.encode_s) * weight;
        }
    }

    /// Handles the beginning of a version: the time since the last chunk was not spent on sending.
    pub(super) fn handle_pause(&mut self) {
        self.last = None;
        if self.window.is_enough() {
            self.end_window();
        }
    }

    /// Handles a written chunk.
    pub(super) fn handle_written(&mut self, chunk: Written, now: Moment) {
        let last = self.last.replace(now);
        // Chunks that are in flight when the level changes are not measured.
        let Some(last) = last.filter(|_| chunk.effort == self.effort()) else { return };
        let time = now.at.saturating_duration_since(last.at);
        self.sent_time += time;
        self.window
            .add(chunk, time, now.processor_time.saturating_sub(last.processor_time));
        if self.window.is_full() {
            self.end_window();
        }
    }

    /// Evaluates the window, if it counts, and begins the next.
    fn end_window(&mut self) {
        let window = std::mem::take(&mut self.window);
        let is_mixed = window.other_bytes * 100 > window.raw_bytes * OTHER_MAX_PER_CENT;
        if self.sent_time < WARM_UP_DURATION || is_mixed {
            return;
        }
        let seconds = window.time.as_secs_f64() / window.raw_bytes as f64;
        self.fastest = seconds.min(self.fastest * FORGOTTEN);
        let seconds = self.seconds.map_or(seconds, |mean| f64::midpoint(mean, seconds));
        self.seconds = Some(seconds);
        self.trial.pause.pass(1);
        if let Some(keeps) = self.verdict() {
            self.trial.conclude(keeps);
            if !keeps {
                return self.begin_level();
            }
        }
        let facts = Facts {
            current: self.effort(),
            sent: window.level(),
            seconds,
            levels: self.levels,
            processors: self.processors,
            used: window.processor_time.as_secs_f64() / window.time.as_secs_f64(),
        };
        let chosen = facts.choose();
        self.doubts = if chosen == self.effort() { 0 } else { self.doubts + 1 };
        if self.doubts >= DOUBTS && self.trial.is_due() {
            self.trial.attempt(chosen, self.fastest);
            self.begin_level();
        }
    }

    /// Whether the last change made the sending faster, once that is known.
    fn verdict(&self) -> Option<bool> {
        let (former, before) = self.trial.incumbent()?;
        let Some(factor) = UNDONE_FROM.get(self.trial.pause.passed() as usize - 1) else { return Some(true) };
        let factor = if self.effort() > former { *factor } else { factor.max(LOWER_MIN) };
        (self.fastest > before * factor).then_some(false)
    }

    fn begin_level(&mut self) {
        self.trial.pause.begin();
        tracing::debug!(effort = ?self.effort(), "The encoding effort changes.");
        (self.seconds, self.fastest, self.doubts) = (None, f64::MAX, 0);
    }
}

impl Window {
    fn add(&mut self, chunk: Written, time: Duration, processor_time: Duration) {
        self.time += time;
        self.processor_time += processor_time;
        self.raw_bytes += chunk.raw_bytes;
        self.wire_bytes += chunk.wire_bytes;
        self.encode_time += chunk.encode_time;
        self.other_bytes += if chunk.is_chosen { 0 } else { chunk.raw_bytes };
    }

    fn is_enough(&self) -> bool {
        self.raw_bytes >= WINDOW_MIN_BYTES && self.time >= WINDOW_MIN_DURATION
    }

    fn is_full(&self) -> bool {
        self.is_enough() && (self.raw_bytes >= WINDOW_BYTES || self.time >= WINDOW_DURATION)
    }

    /// What the current level made of the payload.
    fn level(&self) -> Level {
        let raw_bytes = self.raw_bytes as f64;
        Level {
            share: self.wire_bytes as f64 / raw_bytes,
            encode_s: self.encode_time.as_secs_f64() / raw_bytes,
        }
    }
}
