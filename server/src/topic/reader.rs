//! [`Reader`]: a reader in mode `every`, with its place and its acknowledgements.

use super::{State, TopicState, start_of};
use crate::{
    places::{HolderId, PlaceName},
    retention::ReaderId,
};
use std::sync::Arc;
use tensor_relay_protocol::{Epoch, Place, Seq, Start, Version, VersionId};
use tokio::time::Instant;

/// A reader of a topic. After a drop, the place of a named reader is kept for it, unless it was
/// [released](Self::release_place).
#[derive(Debug)]
pub(crate) struct Reader {
    topic: Arc<TopicState>,
    id: ReaderId,
    place: Option<(PlaceName, HolderId)>,
    keep_place: bool,
}

/// The state of a reader's place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReaderState {
    /// It has its place.
    Reading,
    /// It was evicted: the publisher could not wait any longer.
    Evicted,
    /// Another subscription took its place over.
    Replaced,
}

impl Reader {
    /// Takes a place in `topic`: that of `name`, or a new one. Returns the position of the first version, and the place
    /// that `name` had before it was given up, if the client knows no other version to begin after.
    pub(crate) fn join(
        topic: Arc<TopicState>,
        name: Option<PlaceName>,
        have: Option<(Epoch, Version)>,
        start: Start,
    ) -> (Self, Seq, Option<Place>) {
        let starts_at = matches!(start, Start::At(..) | Start::Exactly(..));
        let names_first = have.is_some() || starts_at;
        let (id, place, begin, lost) = {
            let mut guard = topic.state.lock();
            let has_other_content = have.is_some_and(|held| guard.is_behind(held));
            let State { retention, places, .. } = &mut *guard;
            let wanted = match has_other_content {
                true => retention.oldest(),
                false => start_of(retention, have, start),
            };
            let named = name.as_ref().and_then(|name| places.reader(name));
            let unacknowledged = named.and_then(|reader| retention.place(reader));
            let begin = match unacknowledged {
                // Reconnected without naming a version: continue after the last acknowledged version.
                Some(first) if !names_first => first,
                _ => wanted,
            };
            match name {
                Some(name) => {
                    let lost = places.take_given_up(&name).filter(|_| !names_first);
                    let (id, holder) = places.claim(&name, || retention.join(begin));
                    if have.is_none() && starts_at {
                        retention.advance(id, begin); // This acknowledges all earlier versions.
                    }
                    (id, Some((name, holder)), begin, lost)
                }
                None => (retention.join(begin), None, begin, None),
            }
        };
        topic.changed.send_replace(());
        topic.room.send_replace(());
        let lost = lost.map(|(epoch, version)| Place { epoch, version });
        (Self { topic, id, place, keep_place: true }, begin, lost)
    }

    /// The state of its place.
    pub(crate) fn state(&self) -> ReaderState {
        let state = self.topic.state.lock();
        let is_held = |(name, holder): &(PlaceName, HolderId)| state.places.is_held_by(name, *holder);
        match state.retention.place(self.id) {
            None => ReaderState::Evicted,
            Some(_) if self.place.as_ref().is_none_or(is_held) => ReaderState::Reading,
            Some(_) => ReaderState::Replaced,
        }
    }

    /// Handles the reader's acknowledgement of this version and all before it. One that was never published here covers
    /// no version of this server.
    pub(crate) fn acknowledge(&self, epoch: Epoch, version: Version) {
        {
            let mut state = self.topic.state.lock();
            if state.is_behind((epoch, version)) {
                return;
            }
            let mut versions = state.retention.iter();
            // If the version left retention already, this acknowledges the earlier ones of its epoch.
            let is_covered = |id: &VersionId| id.epoch == epoch && id.version <= version;
            let found = versions.rfind(|(_, retained)| is_covered(&retained.id));
            let Some(seq) = found.map(|(seq, _)| seq) else { return };
            drop(versions);
            state.retention.acknowledge(self.id, seq);
        }
        self.topic.room.send_replace(());
    }

    /// The number of unacknowledged versions before `seq`, without those in `given_up`.
    pub(crate) fn unacknowledged(&self, seq: Seq, given_up: &mut Vec<Seq>) -> usize {
        self.topic.state.lock().retention.unacknowledged(self.id, seq, given_up)
    }

    /// Marks the place for release on drop: the reader will not reconnect.
    pub(crate) fn release_place(&mut self) {
        self.keep_place = false;
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        {
            let mut guard = self.topic.state.lock();
            let state = &mut *guard;
            let leaving = match &self.place {
                Some((name, holder)) if self.keep_place => {
                    state.places.handle_lost(name, *holder, Instant::now())
                }
                Some((name, holder)) => state.places.release(name, *holder),
                None => Some(self.id),
            };
            if let Some(reader) = leaving {
                state.give_up(reader);
            }
        }
        self.topic.room.send_replace(());
    }
}
