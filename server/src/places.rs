//! [`Places`]: the places of named readers, kept for a while after a connection is lost, and taken over when the reader
//! reconnects.
//!
//! Pure: the time is an argument.

use crate::{bases::VersionKey, retention::ReaderId};
use std::{
    collections::{HashMap, HashSet, VecDeque},
    time::Duration,
};
use tensor_relay_protocol::ReaderName;
use tokio::time::Instant;

/// The maximum number of places of one topic that wait for their readers. Beyond it the oldest of the principal with
/// the most is removed, which bounds the memory for names.
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
    /// The places that were given up, oldest first, for readers that return: the first version that each had not
    /// acknowledged. At most [`LOST_MAX`], shared like those that wait.
    given_up: VecDeque<(PlaceName, VersionKey)>,
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

    /// Records that the holder was lost at `now`: the place waits for its reader. Beyond the maximum, returns the reader
    /// of the longest waiting place of the principal with the most, which is to be given up.
    pub(crate) fn handle_lost(
        &mut self,
        name: &PlaceName,
        holder: HolderId,
        now: Instant,
    ) -> Option<ReaderId> {
        let place = self.by_name.get_mut(name).filter(|place| place.holder == holder)?;
        place.lost = Some(now);
        let lost = || self.by_name.iter().filter_map(|(name, place)| Some((place.lost?, name)));
        if lost().count() <= LOST_MAX {
            return None;
        }
        let most = owners_with_most(lost().map(|(_, name)| name));
        let (_, longest) = lost().filter(|(_, name)| most.contains(name.owner.as_str())).min()?;
        self.reader(longest)
    }

    /// Removes the place, if the holder still has it; returns its reader.
    pub(crate) fn release(&mut self, name: &PlaceName, holder: HolderId) -> Option<ReaderId> {
        let reader = self.by_name.get(name).filter(|place| place.holder == holder)?.reader;
        self.by_name.remove(name);
        Some(reader)
    }

    /// Gives the place of a reader up, if it has a name. `version` is the first one that it has not acknowledged, if there
    /// is one; its reader is told when it returns.
    pub(crate) fn give_up(&mut self, reader: ReaderId, version: Option<VersionKey>) {
        let given_up = self.by_name.extract_if(|_, place| place.reader == reader);
        self.given_up.extend(given_up.filter_map(|(name, _)| Some((name, version?))));
        while self.given_up.len() > LOST_MAX {
            let most = owners_with_most(self.given_up.iter().map(|(name, _)| name));
            let oldest = self.given_up.iter().position(|(name, _)| most.contains(name.owner.as_str()));
            self.given_up.remove(oldest.unwrap_or_default());
        }
    }

    /// Takes the place called `name` that was given up: its first version that was not acknowledged.
    pub(crate) fn take_given_up(&mut self, name: &PlaceName) -> Option<VersionKey> {
        let index = self.given_up.iter().position(|(given_up, _)| given_up == name)?;
        self.given_up.remove(index).map(|(_, version)| version)
    }

    /// The readers whose places have waited for `linger` or longer, to be given up.
    pub(crate) fn expired(&self, now: Instant, linger: Duration) -> Vec<ReaderId> {
        let is_expired = |place: &&Place| place.lost.is_some_and(|lost| now >= lost + linger);
        self.by_name.values().filter(is_expired).map(|place| place.reader).collect()
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

/// The owners of most of the `names`.
fn owners_with_most<'a>(names: impl Iterator<Item = &'a PlaceName>) -> HashSet<&'a str> {
    let mut counts: HashMap<&str, usize> = HashMap::new();
    names.for_each(|name| *counts.entry(&name.owner).or_default() += 1);
    let most = counts.values().copied().max();
    counts
        .into_iter()
        .filter(|(_, count)| Some(*count) == most)
        .map(|(owner, _)| owner)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::retention::Retention;
    use tensor_relay_protocol::{Epoch, Version};

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
        assert_eq!(places.expired(now + LINGER_DURATION / 2, LINGER_DURATION), []);
        let (again, second) = places.claim(&named("a"), || retention.join(oldest));
        assert_eq!(again, reader);
        assert_eq!(places.expired(now + LINGER_DURATION * 2, LINGER_DURATION), [], "it is held again");
        assert_eq!(places.handle_lost(&named("a"), first, now), None, "the first holder has nothing to lose");
        assert!(places.is_held_by(&named("a"), second) && !places.is_held_by(&named("a"), first));
        places.handle_lost(&named("a"), second, now);
        assert_eq!(places.expired(now + LINGER_DURATION, LINGER_DURATION), [reader]);
        let version = (Epoch(1), Version(7));
        places.give_up(reader, Some(version));
        assert_eq!(places.reader(&named("a")), None);
        assert_eq!(places.take_given_up(&named("b")), None);
        assert_eq!([0, 1].map(|_| places.take_given_up(&named("a"))), [Some(version), None]);
    }

    /// Goal: a principal that leaves many places costs others none of theirs, while they wait and once they are given up.
    /// Method: the oldest place of another principal, and more than the maximum of one.
    #[test]
    fn lost_places_are_shared() {
        let (mut places, mut retention) = (Places::default(), Retention::<()>::default());
        let (now, oldest) = (Instant::now(), retention.oldest());
        let theirs = PlaceName { owner: "b".into(), ..named("r") };
        let names = (0..LOST_MAX + 10).map(|i| named(&format!("r{i}")));
        for (i, name) in std::iter::once(theirs.clone()).chain(names).enumerate() {
            let (_, holder) = places.claim(&name, || retention.join(oldest));
            if let Some(reader) = places.handle_lost(&name, holder, now + Duration::from_millis(i as u64)) {
                places.give_up(reader, Some((Epoch(1), Version(1))));
            }
        }
        assert!(places.reader(&theirs).is_some() && places.reader(&named("r0")).is_none());
        for name in [theirs.clone()]
            .into_iter()
            .chain((11..LOST_MAX + 10).map(|i| named(&format!("r{i}"))))
        {
            let reader = places.reader(&name).unwrap();
            places.give_up(reader, Some((Epoch(1), Version(2))));
        }
        assert_eq!(places.given_up.len(), LOST_MAX);
        assert!(places.take_given_up(&theirs).is_some() && places.take_given_up(&named("r0")).is_none());
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
            if let Some(reader) = lost {
                given_up += retention.leave(reader) as usize;
                places.give_up(reader, Some((Epoch(1), Version(i))));
            }
        }
        assert_eq!((places.by_name.len(), given_up), (LOST_MAX, 10));
        for reader in places.expired(now + LINGER_DURATION * 2, LINGER_DURATION) {
            places.give_up(reader, Some((Epoch(1), Version(1))));
        }
        assert_eq!((places.by_name.len(), places.given_up.len()), (0, LOST_MAX));
    }
}
