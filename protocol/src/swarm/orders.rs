//! [`Orders`]: the chunks that a taker has ordered, and how many more each source may be asked for.

use super::pace::{Pace, Usual};
use crate::SubscriptionId;
use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

/// For this time a source has orders, at the rate at which it delivers, beside the first one: longer than most round
/// trips, so that a fast source never waits for an order.
const AHEAD: Duration = Duration::from_millis(250);

/// The most orders of one source.
const ORDERS_MAX: usize = 32;

/// The time that a chunk is thought to take before any has come.
const USUAL_AT_FIRST: Duration = Duration::from_secs(1);

/// After so many usual times an order is late, so that an idle source is asked for the chunk, too.
const LATE: f64 = 2.0;

/// After so many usual times, and at least [`LOST_MIN`], an order is taken away: its chunk is ordered as if it had not
/// been.
const LOST: f64 = 4.0;

/// See [`LOST`].
const LOST_MIN: Duration = Duration::from_secs(1);

/// A source is slower than another one if its chunks take more than so many times as long: so much that it is not only busy.
const SLOWER: u32 = 4;

/// The number of oldest orders that are looked through for a late one.
const LATE_LOOKS: usize = 16;

/// The orders of one taker. Every operation is logarithmic in their number.
#[derive(Debug, Default)]
pub(super) struct Orders {
    by_source: BTreeMap<SubscriptionId, Ordered>,
    by_chunk: BTreeMap<u32, Places>,
    /// The ordered chunks by their age.
    by_age: BTreeSet<(Instant, u32)>,
    usual: Usual,
}

/// What one source was asked for.
#[derive(Debug, Default)]
struct Ordered {
    chunks: BTreeMap<u32, Instant>,
    pace: Pace,
    usual: Usual,
}

/// Of whom one chunk was ordered.
#[derive(Debug, Default)]
struct Places {
    /// The sources, in the order in which they were asked.
    sources: Vec<SubscriptionId>,
    /// The time of the last order, unless it was taken away.
    age: Option<Instant>,
}

impl Orders {
    pub(super) fn add_source(&mut self, source: SubscriptionId) {
        self.by_source.entry(source).or_default();
    }

    /// Removes a source. Returns the chunks that nobody else was asked for.
    pub(super) fn remove_source(&mut self, source: SubscriptionId) -> Vec<u32> {
        let chunks = self.of(source);
        let free = chunks.into_iter().filter(|chunk| self.end(source, *chunk)).collect();
        self.by_source.remove(&source);
        free
    }

    /// The chunks that were ordered of a source.
    pub(super) fn of(&self, source: SubscriptionId) -> Vec<u32> {
        let ordered = self.by_source.get(&source);
        ordered.into_iter().flat_map(|ordered| ordered.chunks.keys()).copied().collect()
    }

    /// The number of chunks that were ordered of a source.
    pub(super) fn count_of(&self, source: SubscriptionId) -> usize {
        self.by_source.get(&source).map_or(0, |ordered| ordered.chunks.len())
    }

    /// Whether a chunk was ordered of this source.
    pub(super) fn has(&self, source: SubscriptionId, chunk: u32) -> bool {
        self.by_source
            .get(&source)
            .is_some_and(|ordered| ordered.chunks.contains_key(&chunk))
    }

    /// Whether a chunk was ordered of a source, and not taken away.
    pub(super) fn is_placed(&self, chunk: u32) -> bool {
        self.by_chunk.get(&chunk).is_some_and(|places| places.age.is_some())
    }

    /// Whether a source may be asked for one more chunk.
    pub(super) fn has_room(&self, source: SubscriptionId, now: Instant) -> bool {
        let Some(ordered) = self.by_source.get(&source) else { return false };
        let ahead = || (ordered.pace.rate(now) * AHEAD.as_secs_f64()) as usize;
        ordered.chunks.is_empty() || ordered.chunks.len() < (1 + ahead()).min(ORDERS_MAX)
    }

    /// Records an order.
    pub(super) fn insert(&mut self, source: SubscriptionId, chunk: u32, now: Instant) {
        let Some(ordered) = self.by_source.get_mut(&source) else { return };
        if ordered.chunks.insert(chunk, now).is_none() {
            let places = self.by_chunk.entry(chunk).or_default();
            places.sources.push(source);
            self.set_age(chunk, Some(now));
        }
    }

    /// Records that a chunk came from a source, which was asked for it.
    pub(super) fn handle_delivered(&mut self, source: SubscriptionId, chunk: u32, now: Instant) {
        let Some(ordered) = self.by_source.get_mut(&source) else { return };
        if let Some(since) = ordered.chunks.get(&chunk) {
            let took = now.saturating_duration_since(*since);
            self.usual.note(took);
            ordered.usual.note(took);
            ordered.pace.handle_delivered(now);
        }
        self.end(source, chunk);
    }

    /// Ends an order. Returns whether no other source was asked for the chunk.
    pub(super) fn end(&mut self, source: SubscriptionId, chunk: u32) -> bool {
        let ordered = self.by_source.get_mut(&source);
        if ordered.and_then(|ordered| ordered.chunks.remove(&chunk)).is_none() {
            return false;
        }
        let Some(places) = self.by_chunk.get_mut(&chunk) else { return false };
        places.sources.retain(|other| *other != source);
        // What is left was asked for earlier, and is late.
        let left = places.sources.last().copied();
        let since = left.and_then(|left| self.by_source.get(&left)?.chunks.get(&chunk).copied());
        let is_taken_away = places.age.is_none();
        self.set_age(chunk, since.filter(|_| !is_taken_away));
        if left.is_none() {
            self.by_chunk.remove(&chunk);
        }
        left.is_none()
    }

    /// Takes away the oldest order that counts as lost, and returns its chunk.
    pub(super) fn take_lost(&mut self, now: Instant) -> Option<u32> {
        let (since, chunk) = self.by_age.first().copied()?;
        self.is_lost(since, now).then(|| {
            self.set_age(chunk, None);
            chunk
        })
    }

    /// Looks after orders of a chunk no longer, which is not wanted any more.
    pub(super) fn forget_age(&mut self, chunk: u32) {
        self.set_age(chunk, None);
    }

    /// A chunk whose only order is late, for a source that `can_send` it.
    pub(super) fn late(&self, now: Instant, can_send: impl Fn(u32) -> bool) -> Option<u32> {
        let late = self.usual_times(LATE);
        self.by_age
            .iter()
            .take(LATE_LOOKS)
            .take_while(|(since, _)| now.saturating_duration_since(*since) >= late)
            .map(|(_, chunk)| *chunk)
            .find(|chunk| {
                self.by_chunk.get(chunk).is_some_and(|places| places.sources.len() == 1) && can_send(*chunk)
            })
    }

    /// Whether an order of a source counts as lost, taken away or not.
    pub(super) fn is_behind(&self, source: SubscriptionId, now: Instant) -> bool {
        let ordered = self.by_source.get(&source);
        let first = ordered.and_then(|ordered| ordered.chunks.values().min());
        first.is_some_and(|since| self.is_lost(*since, now))
    }

    /// Whether the chunks of a source take much longer than those of another one, as far as is known. One that delivered nothing
    /// yet is tried, with one order, if chunks of the source take so long that an order could be lost.
    pub(super) fn is_slower(&self, source: SubscriptionId, other: SubscriptionId) -> bool {
        let usual =
            |source: SubscriptionId| self.by_source.get(&source).and_then(|ordered| ordered.usual.get());
        match usual(other) {
            Some(other) => usual(source) > Some(other * SLOWER),
            None => usual(source) >= Some(LOST_MIN) && self.count_of(other) == 0,
        }
    }

    /// The usual time from an order to its chunk; `None` before the first one.
    pub(super) fn usual(&self) -> Option<Duration> {
        self.usual.get()
    }

    /// Whether an order of this time counts as lost.
    fn is_lost(&self, since: Instant, now: Instant) -> bool {
        now.saturating_duration_since(since) >= self.usual_times(LOST).max(LOST_MIN)
    }

    fn usual_times(&self, times: f64) -> Duration {
        self.usual.get().unwrap_or(USUAL_AT_FIRST).mul_f64(times)
    }

    fn set_age(&mut self, chunk: u32, age: Option<Instant>) {
        let Some(places) = self.by_chunk.get_mut(&chunk) else { return };
        if let Some(before) = std::mem::replace(&mut places.age, age) {
            self.by_age.remove(&(before, chunk));
        }
        self.by_age.extend(age.map(|age| (age, chunk)));
    }
}
