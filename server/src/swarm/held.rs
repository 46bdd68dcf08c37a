//! [`Reports`]: what a client says that it holds of a version, until its subscription has handled it, a part at a time.

use crate::handshakes::pace;
use std::time::Duration;
use tensor_relay_protocol::RangeSet;
use tokio::time::Instant;

/// The interval between parts, several times shorter than that of the messages of an honest client.
const INTERVAL: Duration = Duration::from_millis(100);

/// The number of parts that need not wait: of the largest version.
const BURST: u32 = 256;

/// The chunks of one part, which takes about a millisecond: a version's other members wait for it.
const PART_CHUNKS: u32 = 1 << 12;

/// The most ranges that wait, beside those of the last message: of two messages, which come a second apart. What a client says
/// beyond is passed over: its peers hear from itself what it holds.
const RANGES_MAX: usize = 1 << 11;

/// What a member said and this server has not handled. No message keeps the members of its version waiting, however many
/// chunks it names, and nobody waits for a client that says more than it should: the last word about each chunk counts.
#[derive(Debug)]
pub(super) struct Reports {
    added: RangeSet,
    withdrawn: RangeSet,
    /// When the next part may be handled without waiting, beyond a burst.
    due: Instant,
}

impl Reports {
    pub(super) fn new(now: Instant) -> Self {
        Self { added: RangeSet::new(), withdrawn: RangeSet::new(), due: now }
    }

    /// Adds what a client says: that it can, or can no longer, send these chunks.
    pub(super) fn add(&mut self, added: &RangeSet, withdrawn: &RangeSet) {
        if self.added.ranges().len() + self.withdrawn.ranges().len() < RANGES_MAX {
            self.added = self.added.difference(withdrawn).union(added);
            self.withdrawn = self.withdrawn.difference(added).union(withdrawn);
        }
    }

    /// Takes the next part: of what is added, and then of what is withdrawn.
    ///
    /// # Errors
    /// When there will be one, if any is left.
    pub(super) fn take_part(&mut self, now: Instant) -> Result<(RangeSet, RangeSet), Option<Instant>> {
        if self.added.is_empty() && self.withdrawn.is_empty() {
            return Err(None);
        }
        let (begins, due) = pace(self.due, now, INTERVAL, BURST);
        if begins > now {
            return Err(Some(begins));
        }
        self.due = due;
        let added = self.added.take_first(PART_CHUNKS);
        let withdrawn = self.withdrawn.take_first(PART_CHUNKS - added.len());
        Ok((added, withdrawn))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the largest message is handled in small parts, as many as need not wait, and completely.
    #[test]
    fn parts_are_small_and_make_up_the_message() {
        let (now, whole, some) =
            (Instant::now(), RangeSet::from_range(100..1 << 20), RangeSet::from_range(0..100));
        let (mut reports, mut parts) = (Reports::new(now), vec![]);
        reports.add(&whole, &some);
        while let Ok(part) = reports.take_part(now) {
            parts.push(part);
        }
        assert_eq!(reports.take_part(now), Err(None), "nothing is left");
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
        let (mut now, chunk, none) = (Instant::now(), RangeSet::from_range(0..1), RangeSet::new());
        let mut reports = Reports::new(now);
        for _ in 0..BURST {
            reports.add(&chunk, &none);
            reports.add(&none, &chunk);
            assert_eq!(reports.take_part(now), Ok((none.clone(), chunk.clone())));
        }
        reports.add(&chunk, &none);
        let Err(Some(at)) = reports.take_part(now) else { panic!("it waits") };
        assert!(at > now && at <= now + INTERVAL);
        reports.add(&none, &chunk);
        now = at;
        assert_eq!(reports.take_part(now), Ok((none, chunk)));
    }

    /// Goal: memory is bounded whatever a client says.
    #[test]
    fn ranges_are_bounded() {
        const SAID: u32 = 1_024;
        let (mut reports, none) = (Reports::new(Instant::now()), RangeSet::new());
        for message in 0..1_000 {
            let said: RangeSet = (message * SAID..(message + 1) * SAID)
                .map(|number| 2 * number..2 * number + 1)
                .collect();
            reports.add(&said, &none);
        }
        assert_eq!(reports.added.ranges().len(), RANGES_MAX);
    }
}
