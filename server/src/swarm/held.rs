//! [`Reports`]: what a client says that it holds of a version, until its subscription has handled it, a part at a time.

use crate::handshakes::pace;
use std::time::Duration;
use tensor_relay_protocol::RangeSet;
use tokio::time::Instant;

/// The interval between units of handling, i.e. 100 ms for a whole part: to handle them takes a hundredth of a processor.
const INTERVAL: Duration = Duration::from_micros(6_250);

/// The units that need not wait: those of the largest version.
const BURST: u32 = (1 << 20) / UNIT_CHUNKS;

/// The chunks of one unit. A part of fewer counts as one: the lock of its version is taken for it.
const UNIT_CHUNKS: u32 = 1 << 8;

/// The chunks of one part, which takes about a millisecond: a version's other members wait for it.
const PART_CHUNKS: u32 = 1 << 12;

/// The interval between messages, of each of which merging its ranges takes up to a tenth of a millisecond. A client sends one
/// a second for each subscription.
const MESSAGE_INTERVAL: Duration = Duration::from_millis(2);

/// The messages that need not wait.
const MESSAGES_BURST: u32 = 1 << 12;

/// The ranges beyond which no new ones of added chunks wait: of two messages, which come a second apart. What a client says
/// beyond is passed over: its peers hear from itself what it holds.
const RANGES_MAX: usize = 1 << 11;

/// How much this server handles of what one session says, of all its subscriptions: a client may have many of one topic.
#[derive(Debug)]
pub(super) struct Pace {
    /// When the next unit may be handled without using the burst.
    units_due: Instant,
    /// The same of messages.
    messages_due: Instant,
}

impl Pace {
    pub(super) fn new(now: Instant) -> Self {
        Self { units_due: now, messages_due: now }
    }

    /// Whether a message is merged with what waits. One beyond the pace is discarded.
    pub(super) fn admits_message(&mut self, now: Instant) -> bool {
        let (begins, due) = pace(self.messages_due, now, MESSAGE_INTERVAL, MESSAGES_BURST);
        let is_admitted = begins <= now;
        if is_admitted {
            self.messages_due = due;
        }
        is_admitted
    }
}

/// What a member said and this server has not handled. No message keeps the members of its version waiting, however many
/// chunks it names, and nobody waits for a client that says more than it should: the last word about each chunk counts.
#[derive(Debug, Default)]
pub(super) struct Reports {
    added: RangeSet,
    withdrawn: RangeSet,
}

impl Reports {
    /// Adds what a client says: that it can, or can no longer, send these chunks.
    pub(super) fn add(&mut self, added: &RangeSet, withdrawn: &RangeSet) {
        self.withdraw(withdrawn);
        let is_full = self.added.ranges().len() + self.withdrawn.ranges().len() >= RANGES_MAX;
        let pending = self.withdrawn.intersection(added);
        let added = if is_full { &pending } else { added };
        let (added, withdrawn) = (self.added.union(added), self.withdrawn.difference(added));
        if !is_full || added.ranges().len() + withdrawn.ranges().len() <= 2 * RANGES_MAX {
            (self.added, self.withdrawn) = (added, withdrawn);
        }
    }

    /// Withdraws chunks. Those between very many ranges are withdrawn, too: to think that it holds less does no harm.
    fn withdraw(&mut self, withdrawn: &RangeSet) {
        self.withdrawn = self.withdrawn.union(withdrawn);
        if self.withdrawn.ranges().len() > RANGES_MAX
            && let [first, .., last] = self.withdrawn.ranges()
        {
            self.withdrawn = RangeSet::from_range(first.start..last.end);
        }
        self.added = self.added.difference(&self.withdrawn);
    }

    /// Takes the next part: of what is added, and then of what is withdrawn.
    ///
    /// # Errors
    /// When there will be one, if any is left.
    pub(super) fn take_part(
        &mut self,
        of_session: &mut Pace,
        now: Instant,
    ) -> Result<(RangeSet, RangeSet), Option<Instant>> {
        if self.added.is_empty() && self.withdrawn.is_empty() {
            return Err(None);
        }
        let (begins, due) = pace(of_session.units_due, now, INTERVAL, BURST);
        if begins > now {
            return Err(Some(begins));
        }
        let added = self.added.take_first(PART_CHUNKS);
        let withdrawn = self.withdrawn.take_first(PART_CHUNKS - added.len());
        let units = (added.len() + withdrawn.len()).div_ceil(UNIT_CHUNKS);
        of_session.units_due = due + INTERVAL * (units - 1);
        Ok((added, withdrawn))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The even numbers of a range.
    fn evens(range: std::ops::Range<u32>) -> RangeSet {
        range.step_by(2).map(|number| number..number + 1).collect()
    }

    fn range(range: std::ops::Range<u32>) -> RangeSet {
        RangeSet::from_range(range)
    }

    /// Goal: the largest message is handled in small parts, without waiting, and completely.
    #[test]
    fn parts_are_small_and_make_up_the_message() {
        let (now, whole, some) = (Instant::now(), range(100..1 << 20), range(0..100));
        let (mut pace, mut reports, mut parts) = (Pace::new(now), Reports::default(), vec![]);
        reports.add(&whole, &some);
        while let Ok(part) = reports.take_part(&mut pace, now) {
            parts.push(part);
        }
        assert_eq!(reports.take_part(&mut pace, now), Err(None), "nothing is left");
        assert!(
            parts
                .iter()
                .all(|(added, withdrawn)| added.len() + withdrawn.len() <= PART_CHUNKS)
        );
        let sum = |part: fn(&(RangeSet, RangeSet)) -> &RangeSet| {
            parts.iter().fold(RangeSet::new(), |sum, it| sum.union(part(it)))
        };
        assert_eq!((sum(|it| &it.0), sum(|it| &it.1)), (whole, some));
    }

    /// Goal: a client that says too much waits, alone, and is handled once for many messages about the same chunks.
    #[test]
    fn the_last_word_counts_at_a_bounded_rate() {
        let (mut now, chunk, none) = (Instant::now(), range(0..1), RangeSet::new());
        let (mut pace, mut reports) = (Pace::new(now), Reports::default());
        for _ in 0..BURST {
            reports.add(&chunk, &none);
            reports.add(&none, &chunk);
            assert_eq!(reports.take_part(&mut pace, now), Ok((none.clone(), chunk.clone())));
        }
        reports.add(&chunk, &none);
        let Err(Some(at)) = reports.take_part(&mut pace, now) else { panic!("it waits") };
        assert!(at > now && at <= now + INTERVAL);
        reports.add(&none, &chunk);
        now = at;
        assert_eq!(reports.take_part(&mut pace, now), Ok((none, chunk)));
    }

    /// Goal: the subscriptions of one session are handled within one budget, however many they are. Method: 100 of a largest
    /// version name all chunks at once, in the first ten seconds.
    #[test]
    fn the_subscriptions_of_a_session_have_one_budget() {
        const SECONDS: u32 = 10;
        let began = Instant::now();
        let mut pace = Pace::new(began);
        let mut all: Vec<Reports> = (0..100).map(|_| Reports::default()).collect();
        all.iter_mut()
            .for_each(|reports| reports.add(&range(0..1 << 20), &RangeSet::new()));
        let mut chunks = 0;
        for tenth in 0..SECONDS * 10 {
            let now = began + Duration::from_millis(100) * tenth;
            for reports in &mut all {
                while let Ok((added, _)) = reports.take_part(&mut pace, now) {
                    chunks += added.len();
                }
            }
        }
        let paced = SECONDS * 10 * PART_CHUNKS;
        assert!(((1 << 20) + paced / 2..=(1 << 20) + paced + PART_CHUNKS).contains(&chunks), "{chunks}");
    }

    /// Goal: small messages of many subscriptions wait for no whole parts.
    #[test]
    fn a_small_part_costs_less_than_a_whole_one() {
        let now = Instant::now();
        let mut pace = Pace::new(now);
        let of_one_chunk = || {
            let mut reports = Reports::default();
            reports.add(&range(0..1), &RangeSet::new());
            reports.take_part(&mut pace, now)
        };
        let handled = std::iter::repeat_with(of_one_chunk).take_while(Result::is_ok).count();
        assert_eq!(handled as u32, BURST);
    }

    /// Goal: merging takes a bounded share of a processor: what is said beyond the pace is discarded.
    #[test]
    fn messages_are_merged_at_a_bounded_rate() {
        let now = Instant::now();
        let mut pace = Pace::new(now);
        let admitted = (0..2 * MESSAGES_BURST).filter(|_| pace.admits_message(now)).count();
        assert_eq!(admitted as u32, MESSAGES_BURST);
        let later = now + Duration::from_secs(1);
        let admitted = (0..2 * MESSAGES_BURST).filter(|_| pace.admits_message(later)).count();
        assert_eq!(admitted, 500);
    }

    /// Goal: memory is bounded whatever a client says, and a withdrawal is never lost.
    #[test]
    fn ranges_are_bounded() {
        const SAID: u32 = 2_048;
        let (mut reports, none) = (Reports::default(), RangeSet::new());
        for message in 0..512 {
            reports.add(&evens(message * SAID..(message + 1) * SAID), &none);
        }
        assert_eq!(reports.added.ranges().len(), RANGES_MAX);
        for message in 0..512 {
            let withdrawn = evens(message * SAID..(message + 1) * SAID);
            reports.add(&none, &withdrawn);
            assert_eq!(withdrawn.difference(&reports.withdrawn), none);
            assert_eq!(withdrawn.intersection(&reports.added), none);
            assert!(reports.added.ranges().len() + reports.withdrawn.ranges().len() <= 2 * RANGES_MAX);
        }
        for message in 0..512 {
            reports.add(&evens(message * SAID..(message + 1) * SAID), &none);
            assert!(reports.added.ranges().len() + reports.withdrawn.ranges().len() <= 2 * RANGES_MAX);
            assert_eq!(reports.added.intersection(&reports.withdrawn), none);
        }
    }

    /// Goal: the last word counts about what waits, also when nothing new may be added.
    #[test]
    fn the_last_word_counts_when_it_is_full() {
        let (mut reports, none) = (Reports::default(), RangeSet::new());
        let (first, second, new) = (evens(0..2_048), evens(2_048..4_096), range(10_000..10_001));
        reports.add(&first, &none);
        reports.add(&second, &none);
        reports.add(&new, &none);
        assert_eq!(reports.added, first.union(&second), "it is full");
        reports.add(&none, &range(0..1));
        assert!(!reports.added.contains(0) && reports.withdrawn.contains(0));
        reports.add(&range(0..1), &range(7_000..7_001));
        assert!(reports.added.contains(0) && !reports.withdrawn.contains(0));
        assert!(reports.withdrawn.contains(7_000));
    }
}
