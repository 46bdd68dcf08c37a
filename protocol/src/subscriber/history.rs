//! The history of a subscription: committed versions, acknowledged versions, gaps.
//!
//! The history outlives connections. From it come the fields of `Subscribe` that name complete versions.

use super::Gap;
use crate::{
    Epoch, Have, Mode, Place, ProtocolViolation, Start, Subscribe, Version, VersionDigest, VersionId,
};
use std::collections::VecDeque;

/// The maximum number of earlier epochs remembered per connection. Late chunks arrive within seconds, while each new
/// epoch requires a restart of the publisher.
const EPOCHS_MAX: usize = 16;

/// The past versions of one subscription.
#[derive(Debug)]
pub(super) struct History {
    mode: Mode,
    /// The requested first version, or the place that was lost.
    start: Start,
    /// The requested window of mode `every`, in versions.
    window: u32,
    /// The version that last ended on this connection, committed or given up.
    last: Option<(Epoch, Version)>,
    /// The version that last ended in each earlier epoch on this connection: late chunks of these epochs may arrive
    /// over a slow lane. At most [`EPOCHS_MAX`], so that a server cannot make the list grow without limit.
    epochs: VecDeque<(Epoch, Version)>,
    /// The last committed version and its digest.
    committed: Option<(VersionId, VersionDigest)>,
    /// The last acknowledged version, in mode `every`.
    acknowledged: Option<(Epoch, Version)>,
    /// In mode `every`: committed versions that are not acknowledged. [`check_announced`](Self::check_announced) limits
    /// their number.
    unacknowledged: VecDeque<(Epoch, Version)>,
    /// The length of `unacknowledged` when the last connection was lost: a restarted server does not count these
    /// versions in its window.
    carried: usize,
    /// Whether a committed number came again, of other content.
    has_fallen: bool,
}

impl History {
    /// The history of a new subscription, whose client has at most what its `request` names in `have`.
    pub(super) fn new(request: &Subscribe) -> Self {
        Self {
            mode: request.mode,
            start: request.start,
            window: request.window,
            last: None,
            epochs: VecDeque::new(),
            committed: request.have.map(|have| {
                let (epoch, version) = have.key();
                (VersionId { topic: request.topic.clone(), epoch, version }, have.digest)
            }),
            acknowledged: None,
            unacknowledged: VecDeque::new(),
            carried: 0,
            has_fallen: false,
        }
    }

    /// The last committed version, for `Subscribe.have`.
    pub(super) fn have(&self) -> Option<Have> {
        let (id, digest) = self.committed.as_ref()?;
        Some(Have { epoch: id.epoch, version: id.version, digest: *digest })
    }

    /// The last acknowledged version.
    pub(super) fn acknowledged(&self) -> Option<(Epoch, Version)> {
        self.acknowledged
    }

    /// Whether any version was committed.
    pub(super) fn has_committed(&self) -> bool {
        self.committed.is_some()
    }

    /// Whether this version, or a later one of its epoch, ended on this connection.
    pub(super) fn is_past(&self, (epoch, version): (Epoch, Version)) -> bool {
        let mut ended = self.last.iter().chain(&self.epochs);
        ended.any(|(ended_epoch, last)| *ended_epoch == epoch && version <= *last)
    }

    /// Whether this version was the last to end on this connection.
    pub(super) fn is_last(&self, version: (Epoch, Version)) -> bool {
        self.last == Some(version)
    }

    /// Checks that `id` may be announced now. `part` is the version partly received over an earlier connection;
    /// `afresh` says that the server's content differs from the version that `have` or `partial` named, or that the
    /// server never had a version as new as `have`.
    ///
    /// # Errors
    /// [`ProtocolViolation`] when the version does not rise, when it is announced afresh without having been named, and
    /// when twice the window is unacknowledged, versions of earlier connections not counted. Twice, because
    /// acknowledgements of an earlier subscription of the same reader may still be in flight.
    pub(super) fn check_announced(
        &self,
        id: &VersionId,
        part: Option<&VersionId>,
        afresh: bool,
    ) -> Result<(), ProtocolViolation> {
        let (is_part, have) = (part == Some(id), self.have().map(|have| have.key()));
        let is_held = have.is_some_and(|(epoch, held)| epoch == id.epoch && held >= id.version);
        let is_named = self.last.is_none() && (is_part || is_held);
        if afresh && !is_named {
            return Err(ProtocolViolation::UnexpectedAfresh(id.version));
        }
        let rises = |(epoch, last): &(Epoch, Version)| *epoch != id.epoch || *last < id.version;
        // A partly received version is newer than `have`, though its number may be the same.
        let have = have.filter(|_| !afresh && !is_part);
        if let Some((_, after)) = self.last.into_iter().chain(have).find(|last| !rises(last)) {
            return Err(ProtocolViolation::VersionNotRising { found: id.version, after });
        }
        match self.unacknowledged.len() >= 2 * self.window as usize + self.carried {
            true => Err(ProtocolViolation::WindowExceeded(self.window)),
            false => Ok(()),
        }
    }

    /// Handles an announcement that passed [`check_announced`](Self::check_announced). If the number has not risen,
    /// what was committed from there on is other content than the server's of these numbers: it is not acknowledged any
    /// more, because the server would count that for its own.
    pub(super) fn handle_announced(&mut self, id: &VersionId, afresh: bool) {
        let committed = self.committed.as_ref().filter(|(last, _)| last.epoch == id.epoch);
        if afresh && committed.is_some_and(|(last, _)| last.version >= id.version) {
            self.unacknowledged
                .retain(|(epoch, version)| *epoch != id.epoch || *version < id.version);
            (self.carried, self.has_fallen) = (self.unacknowledged.len(), true);
        }
    }

    /// Records the place that this reader had before it was given up: versions from there on may be missing.
    pub(super) fn handle_lost_place(&mut self, Place { epoch, version }: Place) {
        if self.committed.is_none() && !matches!(self.start, Start::At(..)) {
            self.start = Start::At(Some(epoch), version);
        }
    }

    /// Records the end of a version that was committed or given up.
    pub(super) fn handle_ended(&mut self, id: &VersionId) {
        // If it was given up, it is missing before the first one that is committed.
        self.handle_lost_place(Place { epoch: id.epoch, version: id.version });
        self.epochs.retain(|(epoch, _)| *epoch != id.epoch);
        let previous = self.last.replace((id.epoch, id.version));
        if let Some(last_of_epoch) = previous.filter(|(epoch, _)| *epoch != id.epoch) {
            self.epochs.push_back(last_of_epoch);
        }
        if self.epochs.len() > EPOCHS_MAX {
            self.epochs.pop_front();
        }
    }

    /// Records the commit of a version with this digest.
    pub(super) fn handle_committed(&mut self, id: VersionId, digest: VersionDigest) {
        if self.mode == Mode::Every {
            self.unacknowledged.push_back((id.epoch, id.version));
        }
        self.committed = Some((id, digest));
    }

    /// Whether `id` does not continue the last committed version: another epoch, or other content under the same
    /// number or a lower one.
    pub(super) fn is_new_epoch(&self, id: &VersionId) -> bool {
        let committed = self.committed.as_ref();
        committed.is_some_and(|(last, _)| last.epoch != id.epoch || last.version >= id.version)
    }

    /// Records that the user acknowledged a version and all before it; returns whether the server is to be told.
    pub(super) fn handle_acknowledged(&mut self, epoch: Epoch, version: Version) -> bool {
        let acknowledged = self.unacknowledged.iter().position(|of| *of == (epoch, version));
        if let Some(at) = acknowledged {
            self.unacknowledged.drain(..=at);
        }
        let is_told = acknowledged.is_some() || !self.has_fallen;
        if is_told {
            self.acknowledged = Some((epoch, version));
        }
        is_told
    }

    /// Records the loss of the connection. On the next one, no version counts as ended: a version that was given up may
    /// be sent again, and chunks of the last committed version may arrive before its `afresh` announcement.
    pub(super) fn handle_detached(&mut self) {
        self.carried = self.unacknowledged.len();
        self.epochs.clear();
        self.last = None;
    }

    /// In mode `every`: the gap right before `id`; `None` if no version is known to be missing.
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
        // Other content under the same number follows the version before it.
        let follows = after.epoch == id.epoch && [after.version, after.version.next()].contains(&id.version);
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

    fn new_history(start: Start) -> History {
        let latest = Subscribe::latest(SubscriptionId(1), Topic::new("t").unwrap(), 0);
        History::new(&Subscribe { mode: Mode::Every, start, window: 3, ..latest })
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
    fn a_gap_begins_after_the_last_commit() {
        let mut history = new_history(Start::Oldest);
        assert_eq!(history.gap_before(&id(1, 5)), None, "earlier versions are unknown");
        assert!(!commit(&mut history, id(1, 5)));
        assert_eq!(history.gap_before(&id(1, 6)), None);
        assert_eq!(history.gap_before(&id(1, 9)).unwrap().missing(), Some(3));
        assert_eq!(history.gap_before(&id(2, 6)).unwrap().missing(), None, "another epoch");
        assert_eq!([id(1, 6), id(2, 6)].map(|id| history.is_new_epoch(&id)), [false, true]);
        assert!(commit(&mut history, id(2, 1)));
    }

    #[test]
    fn a_gap_begins_at_the_requested_start() {
        let history = new_history(Start::At(Some(Epoch(1)), Version(5)));
        assert_eq!(history.gap_before(&id(1, 5)), None);
        assert_eq!(history.gap_before(&id(1, 7)).unwrap().missing(), Some(2));
        assert!(history.gap_before(&id(2, 5)).is_some());
    }

    #[test]
    fn a_gap_begins_at_a_lost_place() {
        let place = Place { epoch: Epoch(1), version: Version(5) };
        let mut history = new_history(Start::Oldest);
        history.handle_lost_place(place);
        assert_eq!(history.gap_before(&id(1, 5)), None);
        assert_eq!(history.gap_before(&id(1, 7)).unwrap().missing(), Some(2));
        let mut history = new_history(Start::At(Some(Epoch(1)), Version(7)));
        history.handle_lost_place(place);
        assert_eq!(history.gap_before(&id(1, 7)), None, "the reader named its first version");
    }

    /// PROTOCOL.md §6.6: the server continued from an older record than the client.
    #[test]
    fn a_number_may_fall_afresh() {
        let mut history = new_history(Start::Oldest);
        commit(&mut history, id(1, 5));
        assert!(history.check_announced(&id(1, 3), None, true).is_err(), "not on this connection");
        history.handle_detached();
        assert!(history.check_announced(&id(1, 3), None, false).is_err());
        assert_eq!(history.check_announced(&id(1, 3), None, true), Ok(()));
        assert!(history.is_new_epoch(&id(1, 3)));
        let gap = history.gap_before(&id(1, 3)).unwrap();
        assert_eq!((gap.missing(), gap.after), (None, Some(id(1, 5))));
    }

    /// A server that goes on from an older record publishes numbers again. What was received of earlier ones is not
    /// acknowledged any more, since that would count for the new ones.
    #[test]
    fn numbers_that_come_again_are_acknowledged() {
        let mut history = new_history(Start::Oldest);
        for version in 1..=4 {
            commit(&mut history, id(1, version));
        }
        for _ in 0..10 {
            history.handle_detached();
            for version in 2..=4 {
                let afresh = version == 2;
                assert_eq!(history.check_announced(&id(1, version), None, afresh), Ok(()));
                history.handle_announced(&id(1, version), afresh);
                assert!(!afresh || !history.handle_acknowledged(Epoch(1), Version(4)));
                history.handle_ended(&id(1, version));
                history.handle_committed(id(1, version), DIGEST);
                assert!(history.handle_acknowledged(Epoch(1), Version(version)));
            }
        }
    }

    /// The server has other content under the number that was committed last, and counts an acknowledgement for its own.
    #[test]
    fn a_number_of_other_content_is_acknowledged_once_that_is_committed() {
        let mut history = new_history(Start::Oldest);
        for earlier in [id(7, 4), id(1, 2), id(1, 3)] {
            commit(&mut history, earlier);
        }
        history.handle_detached();
        assert_eq!(history.check_announced(&id(1, 3), None, true), Ok(()));
        history.handle_announced(&id(1, 3), true);
        assert!(!history.handle_acknowledged(Epoch(1), Version(3)), "the user has processed the old content");
        assert_eq!((history.unacknowledged.len(), history.carried), (2, 2));
        for (epoch, version) in [(7, 4), (1, 2)] {
            assert!(
                history.handle_acknowledged(Epoch(epoch), Version(version)),
                "its content is the server's"
            );
        }
        history.handle_ended(&id(1, 3));
        history.handle_committed(id(1, 3), DIGEST);
        assert!(history.handle_acknowledged(Epoch(1), Version(3)));
    }

    /// The part of a version has other content. The versions before it have not, as far as both ends know.
    #[test]
    fn versions_before_a_part_of_other_content_are_acknowledged() {
        let mut history = new_history(Start::Oldest);
        commit(&mut history, id(1, 3));
        history.handle_detached();
        assert_eq!(history.check_announced(&id(1, 4), Some(&id(1, 4)), true), Ok(()));
        history.handle_announced(&id(1, 4), true);
        assert!(history.handle_acknowledged(Epoch(1), Version(3)));
        assert_eq!(history.acknowledged(), Some((Epoch(1), Version(3))));
    }

    #[test]
    fn versions_rise_and_at_most_twice_the_window_is_unacknowledged() {
        let mut history = new_history(Start::Oldest);
        for version in 1..=6 {
            commit(&mut history, id(1, version));
        }
        assert_eq!(
            history.check_announced(&id(1, 6), None, false),
            Err(ProtocolViolation::VersionNotRising { found: Version(6), after: Version(6) })
        );
        assert_eq!(
            history.check_announced(&id(1, 7), None, false),
            Err(ProtocolViolation::WindowExceeded(3))
        );
        history.handle_acknowledged(Epoch(1), Version(5));
        assert_eq!(history.check_announced(&id(1, 7), None, false), Ok(()));
        history.handle_detached();
        assert_eq!(
            (history.have().map(|have| have.key()), history.acknowledged()),
            (Some((Epoch(1), Version(6))), Some((Epoch(1), Version(5))))
        );
        assert!(history.check_announced(&id(1, 6), None, false).is_err(), "version 6 is held");
        assert_eq!(history.check_announced(&id(1, 6), None, true), Ok(()), "other content is not held");
        assert!(history.is_new_epoch(&id(1, 6)));
    }

    #[test]
    fn versions_of_earlier_epochs_are_past() {
        let mut history = new_history(Start::Oldest);
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
        assert!(!history.is_past((Epoch(98), Version(1))), "the epochs ended on another connection");
    }

    #[test]
    fn a_version_that_was_given_up_is_not_held() {
        let mut history = new_history(Start::Oldest);
        commit(&mut history, id(1, 1));
        history.handle_ended(&id(1, 2));
        assert!(history.is_last((Epoch(1), Version(2))) && history.is_past((Epoch(1), Version(2))));
        history.handle_detached();
        let have = Have { epoch: Epoch(1), version: Version(1), digest: DIGEST };
        assert_eq!(history.have(), Some(have));
    }

    /// PROTOCOL.md §6.6: only a version named on this connection may be announced again, and only with other content.
    #[test]
    fn a_held_version_is_announced_again_only_afresh() {
        let mut history = new_history(Start::Oldest);
        commit(&mut history, id(1, 3));
        let not_named = |version| Err(ProtocolViolation::UnexpectedAfresh(Version(version)));
        assert_eq!(history.check_announced(&id(1, 4), None, true), not_named(4));
        history.handle_detached();
        let not_rising =
            |found| Err(ProtocolViolation::VersionNotRising { found: Version(found), after: Version(3) });
        assert_eq!(history.check_announced(&id(1, 3), None, false), not_rising(3));
        assert_eq!(history.check_announced(&id(1, 3), None, true), Ok(()));
        assert_eq!(history.check_announced(&id(1, 4), None, true), not_named(4));
        assert_eq!(history.check_announced(&id(1, 4), Some(&id(1, 4)), true), Ok(()));
        assert_eq!(
            history.check_announced(&id(1, 3), Some(&id(1, 3)), false),
            Ok(()),
            "a part of its other content"
        );
        assert_eq!(history.check_announced(&id(1, 2), Some(&id(1, 3)), false), not_rising(2));
        assert!(!history.is_past((Epoch(1), Version(3))), "its chunks may arrive before its announcement");

        commit(&mut history, id(1, 4));
        assert_eq!(
            history.check_announced(&id(1, 4), Some(&id(1, 4)), true),
            not_named(4),
            "it was named on the connection before"
        );
    }
}
