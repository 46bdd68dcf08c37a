//! Where a session leaves snapshots and a subscription takes them: one place, always the newest.

use crate::{Snapshot, SubscriptionError};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

/// Holds at most one snapshot that the user has not taken. A newer one replaces it and counts it as skipped, so a user
/// who is slow gets the newest and never a queue of stale ones.
#[derive(Debug, Default)]
pub(crate) struct Delivery {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    announced: bool,
    ready: Option<Snapshot>,
    ended: Option<SubscriptionError>,
}

/// What a subscription finds.
#[derive(Debug)]
pub(crate) enum Found {
    /// A snapshot.
    Snapshot(Box<Snapshot>),
    /// The end, after everything that was delivered before it was taken.
    Ended(SubscriptionError),
    /// Nothing yet, and whether the topic is known to exist.
    Nothing { announced: bool },
}

impl Delivery {
    /// Says that the topic exists.
    pub(crate) fn announce(&self) {
        self.state().announced = true;
        self.changed.notify_one();
    }

    /// Leaves a snapshot for the user, unless the end was told.
    pub(crate) fn put(&self, mut snapshot: Snapshot) {
        let mut state = self.state();
        if state.ended.is_some() {
            return; // The user was told that nothing more comes.
        }
        if let Some(replaced) = state.ready.take() {
            snapshot.skipped += replaced.skipped + 1;
        }
        state.ready = Some(snapshot);
        self.changed.notify_one();
    }

    /// Says that nothing more will come; the first reason counts.
    pub(crate) fn end(&self, error: SubscriptionError) {
        self.state().ended.get_or_insert(error);
        self.changed.notify_one();
    }

    /// Takes what is there.
    pub(crate) fn take(&self) -> Found {
        let mut state = self.state();
        match (state.ready.take(), &state.ended) {
            (Some(snapshot), _) => Found::Snapshot(Box::new(snapshot)),
            (None, Some(error)) => Found::Ended(error.clone()),
            (None, None) => Found::Nothing { announced: state.announced },
        }
    }

    /// Waits until something changed since the last wait. Cancel safe.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Receipt;
    use std::{sync::Arc, time::Duration};
    use tensor_relay_protocol::{EndReason, Epoch, Limits, Manifest, Topic, Version, VersionId};

    fn snapshot(version: u64, skipped: u64) -> Snapshot {
        Snapshot {
            id: VersionId { topic: Topic::new("t").unwrap(), epoch: Epoch(1), version: Version(version) },
            manifest: Arc::new(Manifest::layout(vec![], vec![], 256, &Limits::default()).unwrap()),
            payload: bytes::Bytes::new(),
            metadata: vec![],
            skipped,
            receipt: Receipt { duration: Duration::ZERO, wire_bytes: 0, chunks: 0 },
        }
    }

    #[test]
    fn a_slow_user_gets_the_newest_and_the_count() {
        let delivery = Delivery::default();
        assert!(matches!(delivery.take(), Found::Nothing { announced: false }));
        delivery.put(snapshot(1, 0));
        delivery.put(snapshot(4, 2));
        delivery.put(snapshot(5, 0));
        let Found::Snapshot(found) = delivery.take() else { panic!("a snapshot is there") };
        assert_eq!((found.id.version, found.skipped), (Version(5), 4), "1 to 4 were published and not seen");
    }

    #[test]
    fn the_end_comes_after_what_was_delivered_and_stays() {
        let delivery = Delivery::default();
        let ended = |reason| SubscriptionError::Ended { topic: Topic::new("t").unwrap(), reason };
        delivery.put(snapshot(1, 0));
        delivery.end(ended(EndReason::TopicEnded));
        delivery.end(ended(EndReason::Evicted));
        assert!(matches!(delivery.take(), Found::Snapshot(_)));
        for _ in 0..2 {
            let Found::Ended(SubscriptionError::Ended { reason, .. }) = delivery.take() else {
                panic!("the end")
            };
            assert_eq!(reason, EndReason::TopicEnded);
        }
    }
}
