//! Which consumers have loaded a version, by their reports (PROTOCOL.md §3.18).

use crate::{
    consumers::{ConsumerId, Consumers},
    topic::TopicState,
};
use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
};
use tensor_relay_device::Lock;
use tensor_relay_protocol::{Epoch, SubscriptionId, Version, VersionDigest};
use tokio::sync::watch;

/// The loads of one version.
#[derive(Debug, Default)]
pub(crate) struct Loads {
    /// Those that loaded what was sent to them.
    consumers: Consumers,
    /// The digests that were sent, at most [`DIGESTS_MAX`].
    sent: Lock<HashSet<VersionDigest>>,
    /// The number of reports with another digest.
    differing: AtomicU64,
}

/// The most digests of a version that are remembered. There is one for each selection, and a model is read by tens of
/// ranks at most. Beyond it, loads of other selections are not counted.
const DIGESTS_MAX: usize = 256;

/// The most reports of another digest that are logged for a version, so that a client cannot flood the log.
const WARNINGS_MAX: u64 = 64;

/// The result of a report.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Report {
    /// The consumer is counted, unless it was before.
    Loaded,
    /// The digest is none of these, which were sent.
    Differs(Vec<VersionDigest>),
    /// It means nothing: nothing was sent, or it is one of very many with another digest.
    Ignored,
}

impl Loads {
    /// Watches the number of consumers. Closes when this is dropped.
    pub(crate) fn watch(&self) -> watch::Receiver<u64> {
        self.consumers.watch()
    }

    /// Records the digest in a `Complete` that is sent.
    pub(crate) fn note_sent(&self, digest: VersionDigest) {
        let mut sent = self.sent.lock();
        if sent.len() < DIGESTS_MAX {
            sent.insert(digest);
        }
    }

    /// Handles the report that `consumer` loaded content with this digest.
    pub(crate) fn handle_report(&self, consumer: &ConsumerId, digest: VersionDigest) -> Report {
        let sent = self.sent.lock();
        if sent.contains(&digest) {
            drop(sent);
            self.consumers.count(consumer);
            return Report::Loaded;
        }
        let is_known_to_differ = !sent.is_empty() && sent.len() < DIGESTS_MAX;
        match is_known_to_differ && self.differing.fetch_add(1, Ordering::Relaxed) < WARNINGS_MAX {
            true => Report::Differs(sent.iter().copied().collect()),
            false => Report::Ignored,
        }
    }
}

/// The loads of the last versions of a topic, also of those that left retention: an engine may take its time.
#[derive(Debug, Default)]
pub(crate) struct RecentLoads(VecDeque<(Epoch, Version, Arc<Loads>)>);

/// The number of versions whose loads are counted. Each takes some KB, and at most 4 MB ([`Consumers`]).
const VERSIONS_MAX: usize = 16;

impl RecentLoads {
    pub(crate) fn push(&mut self, epoch: Epoch, version: Version, loads: Arc<Loads>) {
        if self.0.len() >= VERSIONS_MAX {
            self.0.pop_front();
        }
        self.0.push_back((epoch, version, loads));
    }

    pub(crate) fn find(&self, epoch: Epoch, version: Version) -> Option<Arc<Loads>> {
        let mut newest_first = self.0.iter().rev();
        let (.., loads) = newest_first.find(|(e, v, _)| (*e, *v) == (epoch, version))?;
        Some(Arc::clone(loads))
    }
}

/// Of which topic, and for whom, the subscriptions of a session report loads: all that run, and the last that ended.
#[derive(Debug, Default)]
pub(crate) struct LoadReporters {
    known: HashMap<SubscriptionId, (Weak<TopicState>, ConsumerId)>,
    ended: VecDeque<SubscriptionId>,
}

/// The most ended subscriptions whose reports are accepted: those of clients that receive one version with each, and
/// load them afterwards.
const ENDED_MAX: usize = 64;

impl LoadReporters {
    pub(crate) fn insert(&mut self, id: SubscriptionId, topic: &Arc<TopicState>, consumer: ConsumerId) {
        self.known.insert(id, (Arc::downgrade(topic), consumer));
    }

    pub(crate) fn handle_ended(&mut self, id: SubscriptionId) {
        self.ended.push_back(id);
        if self.ended.len() > ENDED_MAX {
            self.ended.pop_front().map(|oldest| self.known.remove(&oldest));
        }
    }

    /// The topic, if it still exists, and the consumer.
    pub(crate) fn get(&self, id: SubscriptionId) -> Option<(Arc<TopicState>, &ConsumerId)> {
        let (topic, consumer) = self.known.get(&id)?;
        Some((topic.upgrade()?, consumer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SENT: VersionDigest = VersionDigest([1; 32]);
    const OTHER: VersionDigest = VersionDigest([2; 32]);

    fn named(id: u8) -> ConsumerId {
        ConsumerId::Named("p".into(), [id; 16])
    }

    #[test]
    fn what_was_sent_counts_once_for_each_consumer() {
        let loads = Loads::default();
        assert_eq!(loads.handle_report(&named(1), SENT), Report::Ignored, "nothing was sent");
        loads.note_sent(SENT);
        for consumer in [named(1), named(1), named(2), ConsumerId::Nobody] {
            assert_eq!(loads.handle_report(&consumer, SENT), Report::Loaded);
        }
        assert_eq!(loads.handle_report(&named(3), OTHER), Report::Differs(vec![SENT]));
        assert_eq!(*loads.watch().borrow(), 2);
    }

    /// With as many selections as are remembered, unknown digests are no evidence; and warnings are bounded.
    #[test]
    fn reports_of_other_content_are_bounded() {
        let loads = Loads::default();
        loads.note_sent(SENT);
        let differ =
            (0..2 * WARNINGS_MAX).filter(|_| loads.handle_report(&named(1), OTHER) != Report::Ignored);
        assert_eq!(differ.count() as u64, WARNINGS_MAX);
        let loads = Loads::default();
        for selection in 0..2 * DIGESTS_MAX as u16 {
            let mut digest = [9; 32];
            digest[..2].copy_from_slice(&selection.to_le_bytes());
            loads.note_sent(VersionDigest(digest));
        }
        assert_eq!(loads.handle_report(&named(1), OTHER), Report::Ignored);
    }

    #[test]
    fn the_last_versions_are_remembered() {
        let mut recent = RecentLoads::default();
        let last = VERSIONS_MAX as u64 + 3;
        for version in 1..=last {
            recent.push(Epoch(1), Version(version), Arc::default());
        }
        assert!(
            recent.find(Epoch(1), Version(3)).is_none() && recent.find(Epoch(2), Version(last)).is_none()
        );
        assert!((4..=last).all(|version| recent.find(Epoch(1), Version(version)).is_some()));
    }
}
