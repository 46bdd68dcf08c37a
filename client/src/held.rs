//! [`HeldReport`]: when to tell the origin which chunks of a shared version this client holds (PROTOCOL.md §3.15).

use std::time::Duration;
use tensor_relay_protocol::{Epoch, Held, PARTIAL_RANGES_MAX, RangeSet, SubscriptionId, Version};
use tokio::time::Instant;

/// The time between two reports while the chunks change.
const INTERVAL: Duration = Duration::from_secs(1);

/// The time between two reports while they do not: the origin sees progress in them.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// What the origin knows of the chunks that this client holds of a subscription's version. Pure.
#[derive(Debug, Default)]
pub(crate) struct HeldReport {
    /// `None` unless the version is shared, and was announced on the current connection.
    version: Option<(Epoch, Version)>,
    reported: RangeSet,
    /// Whether other chunks may be held than were reported.
    has_changed: bool,
    /// When the last report was sent.
    sent_at: Option<Instant>,
}

impl HeldReport {
    /// Begins a version that was announced; `None` for one that is not shared.
    pub(crate) fn begin(&mut self, version: Option<(Epoch, Version)>) {
        *self = Self { version, has_changed: true, ..Self::default() };
    }

    /// Ends the version: it was given up, or the connection to the origin was lost, whose successor knows nothing.
    pub(crate) fn end(&mut self) {
        *self = Self::default();
    }

    /// Records that the chunks may have changed.
    pub(crate) fn note_change(&mut self) {
        self.has_changed = true;
    }

    /// Makes the next report due at once: the version is complete, and nothing more will change.
    pub(crate) fn hasten(&mut self) {
        (self.has_changed, self.sent_at) = (true, None);
    }

    /// When the next report is due; `None` if none will be.
    pub(crate) fn due_at(&self, now: Instant) -> Option<Instant> {
        self.version?;
        let Some(sent_at) = self.sent_at else { return Some(now) };
        Some(sent_at + if self.has_changed { INTERVAL } else { SILENCE_MAX })
    }

    /// The report that is due, if one is, of the chunks `held`. What does not fit a message follows in the next.
    pub(crate) fn take(
        &mut self,
        subscription: SubscriptionId,
        now: Instant,
        held: impl FnOnce((Epoch, Version)) -> RangeSet,
    ) -> Option<Held> {
        let (epoch, version) = self.version?;
        self.due_at(now).filter(|due_at| *due_at <= now)?;
        let held = held((epoch, version));
        let (all_added, all_withdrawn) = (held.difference(&self.reported), self.reported.difference(&held));
        let (added, withdrawn) = (first_ranges(&all_added), first_ranges(&all_withdrawn));
        self.sent_at = Some(now);
        self.has_changed = added.len() < all_added.len() || withdrawn.len() < all_withdrawn.len();
        self.reported = self.reported.union(&added).difference(&withdrawn);
        Some(Held { subscription, epoch, version, added, withdrawn })
    }
}

/// As many ranges as fit a message.
fn first_ranges(chunks: &RangeSet) -> RangeSet {
    let first = chunks.ranges().iter().take(PARTIAL_RANGES_MAX);
    RangeSet::from_ranges(first.cloned()).expect("the ranges of a set are in order and apart")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const VERSION: (Epoch, Version) = (Epoch(1), Version(2));

    fn take(report: &mut HeldReport, now: Instant, held: &RangeSet) -> Option<Held> {
        report.take(SubscriptionId(7), now, |_| held.clone())
    }

    #[test]
    fn reports_are_a_second_apart_while_something_changes_and_ten_otherwise() {
        let (began, mut report) = (Instant::now(), HeldReport::default());
        let at = |seconds| began + Duration::from_secs(seconds);
        assert_eq!((report.due_at(began), take(&mut report, began, &RangeSet::new())), (None, None));
        report.begin(Some(VERSION));
        assert_eq!(report.due_at(at(1)), Some(at(1)));
        let held = RangeSet::from_range(3..9);
        assert_eq!(take(&mut report, at(1), &held).unwrap().added, held);
        assert_eq!(report.due_at(at(1)), Some(at(11)));
        report.note_change();
        assert_eq!((report.due_at(at(1)), take(&mut report, at(1), &held)), (Some(at(2)), None));
        let changed = take(&mut report, at(2), &RangeSet::from_range(5..10)).unwrap();
        assert_eq!(
            (changed.added, changed.withdrawn),
            (RangeSet::from_range(9..10), RangeSet::from_range(3..5))
        );
        let silent = take(&mut report, at(12), &RangeSet::from_range(5..10)).unwrap();
        assert!(silent.added.is_empty() && silent.withdrawn.is_empty());
        report.hasten();
        assert!(take(&mut report, at(12), &RangeSet::from_range(0..10)).is_some(), "it is complete");
        report.end();
        assert_eq!(report.due_at(at(99)), None);
        report.begin(None);
        report.note_change();
        assert_eq!(report.due_at(at(99)), None, "it is not shared");
    }

    proptest! {
        /// Whatever is held and withdrawn in between, the origin learns all of it, in messages that fit.
        #[test]
        fn the_origin_learns_what_is_held(
            steps in prop::collection::vec(prop::collection::btree_set(0u32..4_000, 0..1_500), 1..6),
        ) {
            let (mut report, mut now, mut known) = (HeldReport::default(), Instant::now(), RangeSet::new());
            report.begin(Some(VERSION));
            for step in steps {
                let ranges = step.into_iter().map(|chunk| chunk..chunk + 1);
                let mut held = RangeSet::new();
                ranges.for_each(|range| { held.insert(range.start); });
                report.note_change();
                for _ in 0..4 {
                    now += INTERVAL;
                    let Some(message) = take(&mut report, now, &held) else { break };
                    prop_assert!(message.added.ranges().len() <= PARTIAL_RANGES_MAX);
                    prop_assert!(message.withdrawn.ranges().len() <= PARTIAL_RANGES_MAX);
                    prop_assert!(message.added.intersection(&message.withdrawn).is_empty());
                    known = known.union(&message.added).difference(&message.withdrawn);
                }
                prop_assert_eq!(&known, &held);
            }
        }
    }
}
