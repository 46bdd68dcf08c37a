//! [`Places`]: the places of named readers, kept for a while after a connection is lost, and taken over when the reader
//! reconnects.
//!
//! Pure: the time is an argument.

use crate::retention::ReaderId;
use std::{collections::HashMap, time::Duration};
use tensor_relay_protocol::ReaderName;
use tokio::time::Instant;

/// The maximum number of places of one topic that wait for their readers. Beyond it the oldest is removed, which
/// bounds the memory for names.
const LOST_MAX: usize = 1024;

/// Identifies one holder of a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HolderId(u64);

/// The name of a reader, scoped by its principal: no other principal can take over its place.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct PlaceName {
    /// The principal of the reader.
    pub(crate) owner: String,
    pub(crate) name: ReaderName,
}

/// The named readers of a topic.
#[derive(Debug, Default)]
pub(crate) struct Places {
    by_name: HashMap<PlaceName, Place>,
    holders_ever: u64,
}

#[derive(Debug)]
struct Place {
    reader: ReaderId,
    holder: HolderId,
    /// When its holder was lost.
    lost: Option<Instant>,
}

impl Places {
    /// Gives the place called `name` to a new holder, replacing the current one.
    pub(crate) fn claim(
        &mut self,
        name: &PlaceName,
        or_new: impl FnOnce() -> ReaderId,
    ) -> (ReaderId, HolderId) {
        let holder = HolderId(self.holders_ever);
        self.holders_ever += 1;
        let place = self.by_name.entry(name.clone()).or_insert_with(|| Place {
            reader: or_new(),
            holder,
            lost: None,
        });
        (place.holder, place.lost) = (holder, None);
        (place.reader, holder)
    }

    /// The reader of the place called `name`, held or waiting.
    pub(crate) fn reader(&self, name: &PlaceName) -> Option<ReaderId> {
        self.by_name.get(name).map(|place| place.reader)
    }

    /// Whether the holder still has the place.
    pub(crate) fn is_held_by(&self, name: &PlaceName, holder: HolderId) -> bool {
        self.by_name.get(name).is_some_and(|place| place.holder == holder)
    }

    /// Records that the holder was lost at `now`: the place waits for its reader. Beyond the maximum, removes the
    /// longest waiting place and returns its reader.
    pub(crate) fn handle_lost(
        &mut self,
        name: &PlaceName,
        holder: HolderId,
        now: Instant,
    ) -> Option<ReaderId> {
        let place = self.by_name.get_mut(name).filter(|place| place.holder == holder)?;
        place.lost = Some(now);
        let lost = self.by_name.iter().filter_map(|(name, place)| Some((place.lost?, name)));
        let (count, longest) = lost.fold((0, None), |(count, longest), lost| match longest {
            Some(before) if before <= lost => (count + 1, Some(before)),
            _ => (count + 1, Some(lost)),
        });
        let name = longest.filter(|_| count > LOST_MAX)?.1.clone();
        self.by_name.remove(&name).map(|place| place.reader)
    }

    /// Removes the place, if the holder still has it; returns its reader.
    pub(crate) fn release(&mut self, name: &PlaceName, holder: HolderId) -> Option<ReaderId> {
        let reader = self.by_name.get(name).filter(|place| place.holder == holder)?.reader;
        self.by_name.remove(name);
        Some(reader)
    }

    /// Removes the place of an evicted reader.
    pub(crate) fn remove(&mut self, reader: ReaderId) {
        self.by_name.retain(|_, place| place.reader != reader);
    }

    /// Removes every place that has waited for `linger` or longer; returns the readers.
    pub(crate) fn expire(&mut self, now: Instant, linger: Duration) -> Vec<ReaderId> {
        let is_expired = |place: &Place| place.lost.is_some_and(|lost| now >= lost + linger);
        let expired = self.by_name.extract_if(|_, place| is_expired(place));
        expired.map(|(_, place)| place.reader).collect()
    }

    /// When the next waiting place expires.
    pub(crate) fn next_expiry(&self, linger: Duration) -> Option<Instant> {
        self.by_name
            .values()
            .filter_map(|place| place.lost)
            .min()
            .map(|lost| lost + linger)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::retention::Retention;

    const LINGER_DURATION: Duration = Duration::from_secs(30);

    fn named(name: &str) -> PlaceName {
        PlaceName { owner: "a".into(), name: ReaderName::new(name).unwrap() }
    }

    #[test]
    fn readers_of_different_owners_have_separate_places() {
        let (mut places, mut retention) = (Places::default(), Retention::<()>::default());
        let oldest = retention.oldest();
        let (mine, holder) = places.claim(&named("r"), || retention.join(oldest));
        let theirs = PlaceName { owner: "b".into(), ..named("r") };
        assert_eq!(places.reader(&theirs), None);
        assert_ne!(places.claim(&theirs, || retention.join(oldest)).0, mine);
        assert!(places.is_held_by(&named("r"), holder), "it was not taken over");
    }

    #[test]
    fn a_reader_that_reconnects_before_the_timeout_gets_its_place() {
        let (mut places, mut retention) = (Places::default(), Retention::<()>::default());
        let now = Instant::now();
        let oldest = retention.oldest();
        let (reader, first) = places.claim(&named("a"), || retention.join(oldest));
        assert_eq!(places.handle_lost(&named("a"), first, now), None);
        assert_eq!(places.next_expiry(LINGER_DURATION), Some(now + LINGER_DURATION));
        assert_eq!(places.expire(now + LINGER_DURATION / 2, LINGER_DURATION), []);
        let (again, second) = places.claim(&named("a"), || retention.join(oldest));
        assert_eq!(again, reader);
        assert_eq!(places.expire(now + LINGER_DURATION * 2, LINGER_DURATION), [], "it is held again");
        assert_eq!(places.handle_lost(&named("a"), first, now), None, "the first holder has nothing to lose");
        assert!(places.is_held_by(&named("a"), second) && !places.is_held_by(&named("a"), first));
        places.handle_lost(&named("a"), second, now);
        assert_eq!(places.expire(now + LINGER_DURATION, LINGER_DURATION), [reader]);
        assert_eq!(places.reader(&named("a")), None);
    }

    #[test]
    fn lost_places_are_bounded() {
        let (mut places, mut retention) = (Places::default(), Retention::<()>::default());
        let now = Instant::now();
        let oldest = retention.oldest();
        let mut given_up = 0;
        for i in 0..LOST_MAX as u64 + 10 {
            let name = named(&format!("r{i}"));
            let (_, holder) = places.claim(&name, || retention.join(oldest));
            let lost = places.handle_lost(&name, holder, now + Duration::from_millis(i));
            given_up += lost.is_some_and(|reader| retention.leave(reader)) as usize;
        }
        assert_eq!((places.by_name.len(), given_up), (LOST_MAX, 10));
    }
}
