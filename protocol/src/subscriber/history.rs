//! The history of a subscription: committed versions, acknowledged versions, gaps.
//!
//! It outlives connections, and provides what a client states when it subscribes again.

use super::Gap;
use crate::{Epoch, Have, Misbehaved, Mode, Start, Subscribe, Version, VersionDigest, VersionId};
use std::collections::VecDeque;

/// The number of ended epochs remembered per connection. Chunks come late by seconds; epochs take a restart of the
/// publisher each.
const EPOCHS_MAX: usize = 16;

/// The past versions of one subscription.
#[derive(Debug)]
pub(super) struct History {
    mode: Mode,
    start: Start,
    window: u32,
    /// The version that last ended on this connection, in whatever way.
    last: Option<(Epoch, Version)>,
    /// The last version of each earlier epoch on this connection: late chunks of it may come over a slow lane. Bounded
    /// by [`EPOCHS_MAX`], so that a server cannot make it grow.
    epochs: VecDeque<(Epoch, Version)>,
    /// The last committed version and its digest.
    committed: Option<(VersionId, VersionDigest)>,
    /// The last acknowledged version, in mode `every`.
    acknowledged: Option<(Epoch, Version)>,
    /// Committed but unacknowledged versions, in mode `every`: the window bounds them.
    waiting: VecDeque<(Epoch, Version)>,
    /// The number of those that came over earlier connections. A restarted server does not count them.
    carried: usize,
}

impl History {
    /// An empty history.
    pub(super) fn new(request: &Subscribe) -> Self {
        Self {
            mode: request.mode,
            start: request.start,
            window: request.window,
            last: None,
            epochs: VecDeque::new(),
            committed: None,
            acknowledged: None,
            waiting: VecDeque::new(),
            carried: 0,
        }
    }

    /// The newest version that need not come again, with its digest.
    pub(super) fn have(&self) -> Option<Have> {
        let (id, digest) = self.committed.as_ref()?;
        Some(Have { epoch: id.epoch, version: id.version, digest: *digest })
    }

    /// The last acknowledged version: repeated on each connection, for it may have been lost with the last one.
    pub(super) fn acknowledged(&self) -> Option<(Epoch, Version)> {
        self.acknowledged
    }

    /// Whether any version was committed.
    pub(super) fn has_committed(&self) -> bool {
        self.committed.is_some()
    }

    /// Whether this version, or a later one of its epoch, ended on this connection.
    pub(super) fn is_past(&self, (epoch, version): (Epoch, Version)) -> bool {
        let ended = self.last.iter().chain(&self.epochs);
        ended
            .into_iter()
            .any(|(ended_epoch, last)| *ended_epoch == epoch && version <= *last)
    }

    /// Whether this version was the last to end on this connection.
    pub(super) fn is_last(&self, version: (Epoch, Version)) -> bool {
        self.last == Some(version)
    }

    /// Checks that `id` may be announced now. `part` is the version partly received over another connection; `afresh`
    /// says that the server's content differs from what `have` or `partial` named.
    ///
    /// # Errors
    /// [`Misbehaved`] when it does not rise, when it was not named and is announced afresh, or when it lies far beyond
    /// the window. Up to twice the window is let pass, because acknowledgements of a subscription that this one took
    /// over from may still be heard.
    pub(super) fn check_announced(
        &self,
        id: &VersionId,
        part: Option<&VersionId>,
        afresh: bool,
    ) -> Result<(), Misbehaved> {
        let (is_part, have) = (part == Some(id), self.have().map(|have| have.of()));
        let is_named = self.last.is_none() && (is_part || have == Some((id.epoch, id.version)));
        if afresh && !is_named {
            return Err(Misbehaved::NothingAfresh(id.version));
        }
        let rises = |(epoch, last): &(Epoch, Version)| *epoch != id.epoch || *last < id.version;
        // A partly received version is newer than `have`, though its number may be the same.
        let have = have.filter(|_| !afresh && !is_part);
        if let Some((_, after)) = self.last.into_iter().chain(have).find(|last| !rises(last)) {
            return Err(Misbehaved::VersionNotRising { found: id.version, after });
        }
        match self.waiting.len() >= 2 * self.window as usize + self.carried {
            true => Err(Misbehaved::OverWindow(self.window)),
            false => Ok(()),
        }
    }

    /// Records the end of a version, in whatever way.
    pub(super) fn handle_ended(&mut self, id: &VersionId) {
        self.epochs.retain(|(epoch, _)| *epoch != id.epoch);
        if let Some(before) = self
            .last
            .replace((id.epoch, id.version))
            .filter(|(epoch, _)| *epoch != id.epoch)
        {
            self.epochs.push_back(before);
        }
        if self.epochs.len() > EPOCHS_MAX {
            self.epochs.pop_front();
        }
    }

    /// Records the commit of a version with this digest.
    pub(super) fn handle_committed(&mut self, id: VersionId, digest: VersionDigest) {
        if self.mode == Mode::Every {
            self.waiting.push_back((id.epoch, id.version));
        }
        self.committed = Some((id, digest));
    }

    /// Whether `id` does not continue the last committed version: another epoch, or other content under the same
    /// number.
    pub(super) fn is_new_epoch(&self, id: &VersionId) -> bool {
        let before = self.committed.as_ref();
        before.is_some_and(|(before, _)| before.epoch != id.epoch || before.version == id.version)
    }

    /// Records that the user acknowledged a version and all before it.
    pub(super) fn handle_acknowledged(&mut self, epoch: Epoch, version: Version) {
        self.acknowledged = Some((epoch, version));
        if let Some(at) = self.waiting.iter().position(|of| *of == (epoch, version)) {
            self.waiting.drain(..=at);
        }
    }

    /// Records the loss of the connection. A version that was given up is not held: the next server counts it as
    /// skipped, or sends it after all. No version has ended on the next connection yet: chunks of the last committed
    /// version may precede its `afresh` announcement.
    pub(super) fn handle_detached(&mut self) {
        self.carried = self.waiting.len();
        self.epochs.clear();
        self.last = None;
    }

    /// The versions missing right before `id`, in mode `every`.
    pub(super) fn gap_before(&self, id: &VersionId) -> Option<Gap> {
        if self.mode != Mode::Every {
            return None;
        }
        let after = match (&self.committed, self.start) {
            (Some((committed, _)), _) => Some(committed.clone()),
            (None, Start::At(epoch, version)) => version.0.checked_sub(1).map(|before| VersionId {
                epoch: epoch.unwrap_or(id.epoch),
                version: Version(before),
                ..id.clone()
            }),
            (None, _) => None,
        }?;
        let follows = after.epoch == id.epoch && after.version.next() >= id.version;
        (!follows).then(|| Gap { after: Some(after), found: id.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{SubscriptionId, Topic};

    fn id(epoch: u64, version: u64) -> VersionId {
        VersionId { topic: Topic::new("t").unwrap(), epoch: Epoch(epoch), version: Version(version) }
    }

    fn history(start: Start) -> History {
        let latest = Subscribe::latest(SubscriptionId(1), Topic::new("t").unwrap(), 0);
        History::new(&Subscribe { mode: Mode::Every, start, window: 2, ..latest })
    }

    const DIGEST: VersionDigest = VersionDigest([7; 32]);

    fn commit(history: &mut History, id: VersionId) -> bool {
        history.check_announced(&id, None, false).unwrap();
        history.handle_ended(&id);
        let is_new_epoch = history.is_new_epoch(&id);
        history.handle_committed(id, DIGEST);
        is_new_epoch
    }

    #[test]
    fn gaps_are_what_is_missing_since_the_last_commit() {
        let mut history = history(Start::Oldest);
        assert_eq!(history.gap_before(&id(1, 5)), None, "nobody knows what came before");
        assert!(!commit(&mut history, id(1, 5)));
        assert_eq!(history.gap_before(&id(1, 6)), None);
        assert_eq!(history.gap_before(&id(1, 9)).unwrap().missing(), Some(3));
        assert_eq!(history.gap_before(&id(2, 6)).unwrap().missing(), None, "another epoch");
        assert!(commit(&mut history, id(2, 1)));
    }

    #[test]
    fn who_names_a_version_misses_what_comes_after_it() {
        let history = history(Start::At(Some(Epoch(1)), Version(5)));
        assert_eq!(history.gap_before(&id(1, 5)), None);
        assert_eq!(history.gap_before(&id(1, 7)).unwrap().missing(), Some(2));
        assert!(history.gap_before(&id(2, 5)).is_some());
    }

    #[test]
    fn versions_rise_and_stay_near_the_window() {
        let mut history = history(Start::Oldest);
        for version in 1..=4 {
            commit(&mut history, id(1, version));
        }
        assert_eq!(
            history.check_announced(&id(1, 4), None, false),
            Err(Misbehaved::VersionNotRising { found: Version(4), after: Version(4) })
        );
        assert_eq!(history.check_announced(&id(1, 5), None, false), Err(Misbehaved::OverWindow(2)));
        history.handle_acknowledged(Epoch(1), Version(3));
        assert_eq!(history.check_announced(&id(1, 5), None, false), Ok(()));
        history.handle_detached();
        assert_eq!(
            (history.have().map(|have| have.of()), history.acknowledged()),
            (Some((Epoch(1), Version(4))), Some((Epoch(1), Version(3))))
        );
        assert!(history.check_announced(&id(1, 4), None, false).is_err(), "it is held");
        assert_eq!(history.check_announced(&id(1, 4), None, true), Ok(()), "other content is not");
        assert!(history.is_new_epoch(&id(1, 4)));
    }

    #[test]
    fn what_comes_late_of_epochs_before_is_past() {
        let mut history = history(Start::Oldest);
        history.handle_ended(&id(1, 7));
        history.handle_ended(&id(2, 3));
        assert!(history.is_past((Epoch(1), Version(7))) && history.is_past((Epoch(2), Version(3))));
        assert!(!history.is_past((Epoch(1), Version(8))) && !history.is_past((Epoch(3), Version(1))));
        for epoch in 3..100 {
            history.handle_ended(&id(epoch, 1));
        }
        assert!(history.is_past((Epoch(98), Version(1))) && !history.is_past((Epoch(1), Version(7))));
        assert_eq!(history.epochs.len(), EPOCHS_MAX);
        history.handle_detached();
        assert!(!history.is_past((Epoch(98), Version(1))), "that was another connection");
    }

    #[test]
    fn what_was_given_up_is_not_held_on_another_connection() {
        let mut history = history(Start::Oldest);
        commit(&mut history, id(1, 1));
        history.handle_ended(&id(1, 2));
        assert!(history.is_last((Epoch(1), Version(2))) && history.is_past((Epoch(1), Version(2))));
        history.handle_detached();
        let have = Have { epoch: Epoch(1), version: Version(1), digest: DIGEST };
        assert_eq!(history.have(), Some(have));
    }

    /// PROTOCOL.md §6.6: only a version named on this connection may be announced again, and only with other content.
    #[test]
    fn what_is_held_comes_again_afresh_alone() {
        let mut history = history(Start::Oldest);
        commit(&mut history, id(1, 3));
        let nothing = |version| Err(Misbehaved::NothingAfresh(Version(version)));
        assert_eq!(history.check_announced(&id(1, 4), None, true), nothing(4), "it was named to nobody");
        history.handle_detached();
        let not_rising =
            |found| Err(Misbehaved::VersionNotRising { found: Version(found), after: Version(3) });
        assert_eq!(history.check_announced(&id(1, 3), None, false), not_rising(3));
        assert_eq!(history.check_announced(&id(1, 3), None, true), Ok(()));
        assert_eq!(history.check_announced(&id(1, 2), None, true), nothing(2));
        assert_eq!(history.check_announced(&id(1, 4), None, true), nothing(4));
        assert_eq!(history.check_announced(&id(1, 4), Some(&id(1, 4)), true), Ok(()));
        assert_eq!(history.check_announced(&id(1, 3), Some(&id(1, 3)), false), Ok(()), "its other content");
        assert_eq!(history.check_announced(&id(1, 2), Some(&id(1, 3)), false), not_rising(2));
        assert!(!history.is_past((Epoch(1), Version(3))), "its chunks may come before the word");

        commit(&mut history, id(1, 4));
        assert_eq!(
            history.check_announced(&id(1, 4), Some(&id(1, 4)), true),
            nothing(4),
            "it is not the first"
        );
    }
}
