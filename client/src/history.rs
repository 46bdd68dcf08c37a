//! What a subscription has been through: which versions it committed, which its user is done with, what is missing.
//!
//! Pure. It outlives connections, and is what a reader brings along when it subscribes again.

use crate::{Gap, Request};
use std::collections::VecDeque;
use tensor_relay_protocol::{Epoch, Misbehaved, Mode, Start, Version, VersionId};

/// How many ended epochs of a connection are known. Chunks come late by seconds; epochs take a restart of the publisher each.
const EPOCHS_MAX: usize = 16;

/// The versions of one subscription, as far as they are past.
#[derive(Debug)]
pub(crate) struct History {
    mode: Mode,
    start: Start,
    window: u32,
    /// The version that ended last on this connection, however it did.
    last: Option<(Epoch, Version)>,
    /// The last version of each epoch before that one, on this connection: chunks of it may still be on their way over a
    /// slow lane. Of the last [`EPOCHS_MAX`] alone, so that a server cannot make it grow.
    epochs: VecDeque<(Epoch, Version)>,
    /// The version that was committed last.
    committed: Option<VersionId>,
    /// The version that the user was done with last, in mode `every`.
    acknowledged: Option<(Epoch, Version)>,
    /// What was committed and not acknowledged, in mode `every`: the window bounds it.
    waiting: VecDeque<(Epoch, Version)>,
    /// How many of those came over earlier connections. A server that was restarted knows nothing of them.
    carried: usize,
}

impl History {
    /// The history of somebody who has nothing yet.
    pub(crate) fn of(request: &Request) -> Self {
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

    /// The newest version that need not come again.
    pub(crate) fn have(&self) -> Option<(Epoch, Version)> {
        self.last
    }

    /// What the user was done with last: told again on each connection, for it may have been lost with the one before.
    pub(crate) fn acknowledged(&self) -> Option<(Epoch, Version)> {
        self.acknowledged
    }

    /// Whether any version was committed.
    pub(crate) fn has_committed(&self) -> bool {
        self.committed.is_some()
    }

    /// Whether this version, or a later one of its epoch, has ended.
    pub(crate) fn is_past(&self, (epoch, version): (Epoch, Version)) -> bool {
        let ended = self.last.iter().chain(&self.epochs);
        ended
            .into_iter()
            .any(|(ended_epoch, last)| *ended_epoch == epoch && version <= *last)
    }

    /// Whether this is the version that ended last.
    pub(crate) fn is_last(&self, version: (Epoch, Version)) -> bool {
        self.last == Some(version)
    }

    /// Checks that `id` may be announced now.
    ///
    /// # Errors
    /// [`Misbehaved`] when it does not rise, or lies far beyond the window. Up to twice the window is let pass, because
    /// acknowledgements of a subscription that this one took over from may still be heard.
    pub(crate) fn check_announced(&self, id: &VersionId) -> Result<(), Misbehaved> {
        let rises = |(epoch, last): &(Epoch, Version)| *epoch != id.epoch || *last < id.version;
        if let Some((_, after)) = self.last.filter(|last| !rises(last)) {
            return Err(Misbehaved::VersionNotRising { found: id.version, after });
        }
        match self.waiting.len() >= 2 * self.window as usize + self.carried {
            true => Err(Misbehaved::OverWindow(self.window)),
            false => Ok(()),
        }
    }

    /// Takes the end of a version, however it ended.
    pub(crate) fn handle_ended(&mut self, id: &VersionId) {
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

    /// Takes the commit of a version; returns whether it is of another epoch than the one before.
    pub(crate) fn handle_committed(&mut self, id: VersionId) -> bool {
        if self.mode == Mode::Every {
            self.waiting.push_back((id.epoch, id.version));
        }
        let epoch = id.epoch;
        self.committed.replace(id).is_some_and(|before| before.epoch != epoch)
    }

    /// Takes the user's word that it is done with a version and all before it.
    pub(crate) fn handle_acknowledged(&mut self, epoch: Epoch, version: Version) {
        self.acknowledged = Some((epoch, version));
        if let Some(at) = self.waiting.iter().position(|of| *of == (epoch, version)) {
            self.waiting.drain(..=at);
        }
    }

    /// The connection is gone. A version that was given up is not held: the next server counts it as skipped, or sends it
    /// after all.
    pub(crate) fn handle_detached(&mut self) {
        self.carried = self.waiting.len();
        self.epochs.clear();
        self.last = self.committed.as_ref().map(|id| (id.epoch, id.version));
    }

    /// What is missing right before `id`, in mode `every`.
    pub(crate) fn gap_before(&self, id: &VersionId) -> Option<Gap> {
        if self.mode != Mode::Every {
            return None;
        }
        let after = match (&self.committed, self.start) {
            (Some(committed), _) => Some(committed.clone()),
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
    use tensor_relay_protocol::Topic;

    fn id(epoch: u64, version: u64) -> VersionId {
        VersionId { topic: Topic::new("t").unwrap(), epoch: Epoch(epoch), version: Version(version) }
    }

    fn history(start: Start) -> History {
        History::of(&Request::every(Topic::new("t").unwrap()).from(start).window(2))
    }

    fn commit(history: &mut History, id: VersionId) -> bool {
        history.check_announced(&id).unwrap();
        history.handle_ended(&id);
        history.handle_committed(id)
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
            history.check_announced(&id(1, 4)),
            Err(Misbehaved::VersionNotRising { found: Version(4), after: Version(4) })
        );
        assert_eq!(history.check_announced(&id(1, 5)), Err(Misbehaved::OverWindow(2)));
        history.handle_acknowledged(Epoch(1), Version(3));
        assert_eq!(history.check_announced(&id(1, 5)), Ok(()));
        history.handle_detached();
        assert_eq!(
            (history.have(), history.acknowledged()),
            (Some((Epoch(1), Version(4))), Some((Epoch(1), Version(3))))
        );
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
        assert_eq!(history.have(), Some((Epoch(1), Version(1))));
    }
}
