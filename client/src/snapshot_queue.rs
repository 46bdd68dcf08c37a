//! The queue of received snapshots, from a session to a subscription.

use crate::{Gap, Snapshot, SubscriptionError};
use std::collections::VecDeque;
use tensor_relay_device::Lock;
use tensor_relay_protocol::{AbortReason, Mode, VersionId};
use tokio::{sync::Notify, time::Instant};

/// Holds the snapshots that the user has not taken.
///
/// In mode `latest` that is at most one snapshot: a newer one replaces it and counts it as skipped, so a slow user
/// receives the newest. In mode `every` the subscription's window bounds the queue.
#[derive(Debug)]
pub(crate) struct SnapshotQueue {
    mode: Mode,
    state: Lock<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    announced: bool,
    /// When the wait for the topic began: when the subscription was sent to the server, or when the server last aborted
    /// a version while the user had none; `None` without a connection.
    waiting_since: Option<Instant>,
    /// The announced version that the server aborted, if the user has no version and no other was announced since.
    given_up: Option<(VersionId, AbortReason)>,
    ready: VecDeque<Item>,
    ended: Option<SubscriptionError>,
}

/// One item for the user.
#[derive(Debug)]
enum Item {
    Snapshot(Box<Snapshot>),
    Gap(Box<Gap>),
    Failure(SubscriptionError),
}

/// The result of taking from the queue.
#[derive(Debug)]
pub(crate) enum Found {
    /// A snapshot.
    Snapshot(Box<Snapshot>),
    /// Versions are missing before the next snapshot.
    Gap(Box<Gap>),
    /// A version was aborted; others will follow.
    Failure(SubscriptionError),
    /// A snapshot is queued, but the user holds too many.
    NotYet,
    /// The end, after everything delivered before it.
    Ended(SubscriptionError),
    /// Nothing yet, from an existing topic.
    Nothing,
    /// Nothing yet, and the topic may not exist. `waiting_since` is when the wait for it began, if connected.
    Unknown { waiting_since: Option<Instant> },
}

impl State {
    /// The snapshot of mode `latest`.
    fn snapshot_mut(&mut self) -> Option<&mut Snapshot> {
        self.ready.iter_mut().find_map(|item| match item {
            Item::Snapshot(snapshot) => Some(&mut **snapshot),
            _ => None,
        })
    }

    fn take_snapshot(&mut self) -> Option<Box<Snapshot>> {
        let index = self.ready.iter().position(|item| matches!(item, Item::Snapshot(_)))?;
        match self.ready.remove(index) {
            Some(Item::Snapshot(snapshot)) => Some(snapshot),
            _ => None,
        }
    }
}

impl SnapshotQueue {
    pub(crate) fn new(mode: Mode) -> Self {
        Self { mode, state: Lock::default(), changed: Notify::new() }
    }

    /// Records that the topic exists. A user who knows that already is not woken.
    pub(crate) fn announce(&self) {
        let mut state = self.state.lock();
        let was_known = state.announced && state.given_up.is_none();
        (state.announced, state.given_up) = (true, None);
        if !was_known {
            self.changed.notify_one();
        }
    }

    /// Records that the topic may not exist any more.
    pub(crate) fn forget_topic(&self) {
        self.state.lock().announced = false;
    }

    /// Records that the server aborted an announced version while the user has none yet, and restarts the wait for the
    /// topic.
    pub(crate) fn handle_given_up(&self, id: VersionId, reason: AbortReason) {
        let mut state = self.state.lock();
        (state.announced, state.given_up) = (false, Some((id, reason)));
        state.waiting_since = Some(Instant::now());
        self.changed.notify_one();
    }

    /// The aborted version, if no other was announced since.
    pub(crate) fn given_up(&self) -> Option<(VersionId, AbortReason)> {
        self.state.lock().given_up.clone()
    }

    /// Records when the subscription was sent to the server, or that there is no connection.
    pub(crate) fn set_subscribe_sent(&self, at: Option<Instant>) {
        let mut state = self.state.lock();
        (state.waiting_since, state.given_up) = (at, None);
        self.changed.notify_one();
    }

    /// Queues a snapshot for the user, unless the end was queued.
    pub(crate) fn put(&self, mut snapshot: Snapshot) {
        let mut state = self.state.lock();
        if state.ended.is_some() {
            return; // The user gets nothing after the end.
        }
        if self.mode == Mode::Latest
            && let Some(replaced) = state.take_snapshot()
        {
            snapshot.skipped = snapshot.skipped.saturating_add(replaced.skipped).saturating_add(1);
            snapshot.new_epoch |= replaced.new_epoch;
        }
        state.ready.push_back(Item::Snapshot(Box::new(snapshot)));
        self.changed.notify_one();
    }

    /// Puts back an undelivered snapshot, and the gap before it. In mode `latest` a newer snapshot received meanwhile
    /// replaces it.
    pub(crate) fn put_back(&self, snapshot: Option<Box<Snapshot>>, gap: Option<Box<Gap>>) {
        let mut state = self.state.lock();
        match (snapshot, state.snapshot_mut()) {
            (Some(snapshot), Some(newer)) if self.mode == Mode::Latest => {
                newer.skipped = newer.skipped.saturating_add(snapshot.skipped).saturating_add(1);
                newer.new_epoch |= snapshot.new_epoch;
            }
            (snapshot, _) => {
                let items = gap.map(Item::Gap).into_iter().chain(snapshot.map(Item::Snapshot));
                items.rev().for_each(|item| state.ready.push_front(item));
            }
        }
        self.changed.notify_one();
    }

    /// Drops the snapshot of this version, but not the gap before it. Returns whether it was queued.
    pub(crate) fn discard(&self, id: &VersionId) -> bool {
        let Some((_, gap)) = self.take_if(|snapshot| snapshot.id == *id) else { return false };
        if gap.is_some() {
            self.put_back(None, gap);
        }
        true
    }

    /// Takes the snapshot for which `is_wanted` holds, and the gap before it.
    pub(crate) fn take_if(
        &self,
        is_wanted: impl Fn(&Snapshot) -> bool,
    ) -> Option<(Box<Snapshot>, Option<Box<Gap>>)> {
        let mut state = self.state.lock();
        let is_wanted = |item: &Item| matches!(item, Item::Snapshot(snapshot) if is_wanted(snapshot));
        let index = state.ready.iter().position(is_wanted)?;
        let Some(Item::Snapshot(snapshot)) = state.ready.remove(index) else { return None };
        let before = index
            .checked_sub(1)
            .filter(|before| matches!(state.ready[*before], Item::Gap(_)));
        match before.and_then(|before| state.ready.remove(before)) {
            Some(Item::Gap(gap)) => Some((snapshot, Some(gap))),
            _ => Some((snapshot, None)),
        }
    }

    /// Whether the queue is empty.
    pub(crate) fn is_empty(&self) -> bool {
        self.state.lock().ready.is_empty()
    }

    /// Whether the next item is a snapshot.
    pub(crate) fn has_snapshot(&self) -> bool {
        matches!(self.state.lock().ready.front(), Some(Item::Snapshot(_)))
    }

    /// Queues a gap, unless the end was queued: versions are missing before the next snapshot.
    pub(crate) fn put_gap(&self, gap: Gap) {
        let mut state = self.state.lock();
        if state.ended.is_none() {
            state.ready.push_back(Item::Gap(Box::new(gap)));
            self.changed.notify_one();
        }
    }

    /// Queues the error of an aborted version that others will follow. In mode `latest` only the last one is kept.
    pub(crate) fn put_failure(&self, error: SubscriptionError) {
        let mut state = self.state.lock();
        if self.mode == Mode::Latest {
            state.ready.retain(|item| !matches!(item, Item::Failure(_)));
        }
        state.ready.push_back(Item::Failure(error));
        self.changed.notify_one();
    }

    /// Queues the end; only the first reason is kept.
    pub(crate) fn end(&self, error: SubscriptionError) {
        self.state.lock().ended.get_or_insert(error);
        self.changed.notify_one();
    }

    /// Takes the next item; a snapshot only if `may_take_snapshot`.
    pub(crate) fn take(&self, may_take_snapshot: bool) -> Found {
        let mut state = self.state.lock();
        if !may_take_snapshot && matches!(state.ready.front(), Some(Item::Snapshot(_))) {
            return Found::NotYet;
        }
        match (state.ready.pop_front(), &state.ended) {
            (Some(Item::Snapshot(snapshot)), _) => Found::Snapshot(snapshot),
            (Some(Item::Gap(gap)), _) => Found::Gap(gap),
            (Some(Item::Failure(error)), _) => Found::Failure(error),
            (None, Some(error)) => Found::Ended(error.clone()),
            (None, None) if state.announced => Found::Nothing,
            (None, None) => Found::Unknown { waiting_since: state.waiting_since },
        }
    }

    /// Waits until the queue has changed since the last wait. Cancel safe.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use tensor_relay_protocol::{EndReason, Epoch, Topic, Version};

    fn id(version: u64) -> VersionId {
        VersionId { topic: Topic::new("t").unwrap(), epoch: Epoch(1), version: Version(version) }
    }

    fn snapshot(version: u64, skipped: u64) -> Snapshot {
        Snapshot { id: id(version), skipped, ..Snapshot::empty() }
    }

    #[test]
    fn a_slow_user_receives_the_newest_and_the_skipped_count() {
        let queue = SnapshotQueue::new(Mode::Latest);
        assert!(matches!(queue.take(true), Found::Unknown { waiting_since: None }));
        queue.put(snapshot(1, 0));
        queue.put(snapshot(4, 2));
        queue.put(snapshot(5, 0));
        let Found::Snapshot(found) = queue.take(true) else { panic!("a snapshot is there") };
        assert_eq!((found.id.version, found.skipped), (Version(5), 4), "1 to 4 were published and not seen");
    }

    #[test]
    fn an_announcement_wakes_only_a_user_who_does_not_know_the_topic() {
        let queue = SnapshotQueue::new(Mode::Latest);
        let is_woken = || queue.changed().now_or_never().is_some();
        queue.announce();
        assert!(is_woken());
        queue.announce();
        assert!(!is_woken());
        queue.forget_topic();
        queue.announce();
        assert!(is_woken());
        queue.handle_given_up(id(1), AbortReason::SourceLost);
        assert!(is_woken());
        queue.announce();
        assert!(is_woken());
    }

    #[test]
    fn in_mode_every_nothing_is_replaced_and_gaps_keep_their_place() {
        let queue = SnapshotQueue::new(Mode::Every);
        queue.put(snapshot(1, 0));
        queue.put_gap(Gap { after: Some(id(1)), found: id(4) });
        queue.put(snapshot(4, 0));
        assert!(matches!(queue.take(false), Found::NotYet));
        assert!(matches!(queue.take(true), Found::Snapshot(s) if s.id == id(1)));
        assert!(matches!(queue.take(false), Found::Gap(gap) if gap.found == id(4)));
        assert!(matches!(queue.take(true), Found::Snapshot(s) if s.id == id(4)));
    }

    #[test]
    fn a_snapshot_put_back_keeps_its_place_or_is_counted() {
        let latest = SnapshotQueue::new(Mode::Latest);
        latest.put(snapshot(1, 2));
        let Found::Snapshot(taken) = latest.take(true) else { panic!("a snapshot is there") };
        latest.put(snapshot(2, 0));
        latest.put_back(Some(taken), None);
        assert!(
            matches!(latest.take(true), Found::Snapshot(s) if (s.id.version, s.skipped) == (Version(2), 3))
        );

        let every = SnapshotQueue::new(Mode::Every);
        every.put(snapshot(4, 0));
        let Found::Snapshot(taken) = every.take(true) else { panic!("a snapshot is there") };
        every.put(snapshot(5, 0));
        every.put_back(Some(taken), Some(Box::new(Gap { after: Some(id(1)), found: id(4) })));
        assert!(matches!(every.take(true), Found::Gap(gap) if gap.found == id(4)));
        assert!(matches!(every.take(true), Found::Snapshot(s) if s.id == id(4)));
        assert!(matches!(every.take(true), Found::Snapshot(s) if s.id == id(5)));

        every.put(snapshot(7, 0));
        every.put_back(None, Some(Box::new(Gap { after: Some(id(5)), found: id(7) })));
        assert!(matches!(every.take(true), Found::Gap(gap) if gap.found == id(7)));
        assert!(matches!(every.take(true), Found::Snapshot(s) if s.id == id(7)));
    }

    #[test]
    fn only_the_discarded_snapshot_is_dropped() {
        for mode in [Mode::Latest, Mode::Every] {
            let queue = SnapshotQueue::new(mode);
            queue.put(snapshot(1, 0));
            assert!(!queue.discard(&id(2)));
            assert!(queue.discard(&id(1)) && !queue.discard(&id(1)));
            queue.put(snapshot(2, 0));
            assert!(matches!(queue.take(true), Found::Snapshot(s) if s.id == id(2)));
        }
    }

    #[test]
    fn the_end_comes_after_queued_snapshots_and_stays() {
        let queue = SnapshotQueue::new(Mode::Latest);
        let ended = |reason| SubscriptionError::Ended { topic: Topic::new("t").unwrap(), reason };
        queue.put(snapshot(1, 0));
        queue.end(ended(EndReason::TopicEnded));
        queue.end(ended(EndReason::Evicted));
        queue.put_gap(Gap { after: Some(id(1)), found: id(4) });
        assert!(matches!(queue.take(true), Found::Snapshot(_)));
        for _ in 0..2 {
            let Found::Ended(SubscriptionError::Ended { reason, .. }) = queue.take(true) else {
                panic!("the end")
            };
            assert_eq!(reason, EndReason::TopicEnded);
        }
    }
}
