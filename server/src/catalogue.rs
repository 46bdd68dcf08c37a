//! The catalogue: the topics of a server by name.
//!
//! Synchronous and small. A topic's state is in [`topic`].

use crate::{
    bases::Bases,
    retained::Retained,
    topic::{self, TopicState},
};
use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tensor_relay_device::Lock;
use tensor_relay_protocol::{EndReason, Topic, TopicEntry};
use tensor_relay_transport::{CodecStats, sending::Offered};
use tokio::sync::{broadcast, watch};

/// The maximum number of new topics queued for a slow watch. A watch that missed some scans all topics again.
const APPEARANCES_MAX: usize = 1024;

/// All topics of a server.
#[derive(Debug)]
pub(crate) struct Catalogue {
    topics: Lock<BTreeMap<Topic, Arc<TopicState>>>,
    appeared: broadcast::Sender<Topic>,
    linger: Duration,
    bases: Arc<Bases>,
    /// Versions published by removed topics.
    published_before: AtomicU64,
}

impl Catalogue {
    /// An empty catalogue. For `linger`, named readers keep their places, and topics without followers their bases.
    pub(crate) fn new(linger: Duration, bases: Arc<Bases>) -> Self {
        Self {
            topics: Lock::default(),
            appeared: broadcast::Sender::new(APPEARANCES_MAX),
            linger,
            bases,
            published_before: AtomicU64::new(0),
        }
    }

    /// Registers a publisher of the topic called `name`; `None` if the topic already has one, or was withdrawn but is
    /// still in the catalogue.
    pub(crate) fn open(&self, name: &Topic) -> Option<Arc<TopicState>> {
        let mut topics = self.topics.lock(); // Locked until the topic is open, so that it is not removed meanwhile.
        let topic = self.entry(&mut topics, name);
        topic.open().then_some(topic)
    }

    /// Follows the topic called `name`, which need not exist yet.
    pub(crate) fn follow(self: &Arc<Self>, name: &Topic) -> Follower {
        let mut topics = self.topics.lock();
        let topic = self.entry(&mut topics, name);
        topic.add_follower();
        let changes = topic.changes();
        Follower { catalogue: Arc::clone(self), topic, changes }
    }

    /// The bases of all topics.
    pub(crate) fn bases(&self) -> &Bases {
        &self.bases
    }

    /// Notifies watches that `name` has its first version.
    pub(crate) fn announce(&self, name: &Topic) {
        let _ = self.appeared.send(name.clone()); // There may be no watch.
    }

    /// Subscribes to the names of new topics.
    pub(crate) fn appearances(&self) -> broadcast::Receiver<Topic> {
        self.appeared.subscribe()
    }

    /// Ends `topic` and removes it. Its name is free immediately; its followers receive the reason.
    pub(crate) fn remove(&self, topic: &Arc<TopicState>, reason: EndReason) {
        let mut topics = self.topics.lock();
        topic.end(reason);
        if topics.get(topic.name()).is_some_and(|current| Arc::ptr_eq(current, topic)) {
            topics.remove(topic.name());
            self.published_before.fetch_add(topic.published_count(), Ordering::Relaxed);
        }
    }

    /// Removes `topic` if it is no longer needed.
    pub(crate) fn remove_unneeded(&self, topic: &Arc<TopicState>) {
        let mut topics = self.topics.lock();
        let is_current = topics.get(topic.name()).is_some_and(|current| Arc::ptr_eq(current, topic));
        if is_current && !topic.is_needed() {
            topics.remove(topic.name());
            self.published_before.fetch_add(topic.published_count(), Ordering::Relaxed);
        }
    }

    /// Every topic that `is_wanted` and has a version, in order of name.
    pub(crate) fn list(&self, is_wanted: impl Fn(&Topic) -> bool) -> Vec<TopicEntry> {
        self.map_topics(is_wanted, |topic, current| {
            let manifest = current.payload.manifest();
            TopicEntry {
                id: current.id.clone(),
                tensors: manifest.tensors().len() as u64,
                payload_bytes: manifest.payload_bytes(),
                subscribers: topic.followers(),
                relays: current.relays().clone(),
            }
        })
    }

    /// The counters of every topic that has a version.
    pub(crate) fn sent(&self) -> Vec<(Topic, CodecStats)> {
        self.map_topics(|_| true, |topic, _| (topic.name().clone(), topic.tally().stats()))
    }

    /// The results of `describe` for every topic that `is_wanted` and has a version, in order of name. Its second
    /// argument is the version that new clients are sent.
    pub(crate) fn map_topics<R>(
        &self,
        is_wanted: impl Fn(&Topic) -> bool,
        describe: impl Fn(&TopicState, &Retained) -> R,
    ) -> Vec<R> {
        let topics = self.topics.lock();
        let wanted = topics.values().filter(|topic| is_wanted(topic.name()));
        let described = wanted.filter_map(|topic| Some(describe(topic, &topic.current(|_| true)?.1)));
        described.collect()
    }

    /// The number of versions ever published.
    pub(crate) fn published(&self) -> u64 {
        let topics = self.topics.lock();
        let current: u64 = topics.values().map(|topic| topic.published_count()).sum();
        current + self.published_before.load(Ordering::Relaxed)
    }

    /// The name of every topic that `is_wanted` and has a version.
    pub(crate) fn names(&self, is_wanted: impl Fn(&Topic) -> bool) -> Vec<Topic> {
        self.map_topics(is_wanted, |topic, _| topic.name().clone())
    }

    fn entry(&self, topics: &mut BTreeMap<Topic, Arc<TopicState>>, name: &Topic) -> Arc<TopicState> {
        let new = || Arc::new(TopicState::new(name.clone(), self.linger, Arc::clone(&self.bases)));
        Arc::clone(topics.entry(name.clone()).or_insert_with(new))
    }
}

/// A subscription's reference to one topic.
#[derive(Debug)]
pub(crate) struct Follower {
    catalogue: Arc<Catalogue>,
    topic: Arc<TopicState>,
    changes: watch::Receiver<()>,
}

impl Follower {
    /// The topic.
    pub(crate) fn topic(&self) -> &Arc<TopicState> {
        &self.topic
    }

    /// Waits until the topic changed since the last call that returned. Cancel safe.
    pub(crate) async fn changed(&mut self) {
        // `self.topic` holds the sender.
        let _ = self.changes.changed().await;
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        if self.topic.remove_follower()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(topic::release_abandoned_bases(Arc::downgrade(&self.topic)));
        }
        self.catalogue.remove_unneeded(&self.topic);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn topic(name: &str) -> Topic {
        Topic::new(name).unwrap()
    }

    fn new_catalogue() -> Arc<Catalogue> {
        Arc::new(Catalogue::new(Duration::ZERO, Arc::new(Bases::new(0))))
    }

    #[test]
    fn a_topic_has_one_publisher_at_a_time() {
        let catalogue = new_catalogue();
        let first = catalogue.open(&topic("a")).unwrap();
        assert!(catalogue.open(&topic("a")).is_none());
        assert!(catalogue.open(&topic("b")).is_some());
        first.close();
        assert!(catalogue.open(&topic("a")).is_some());
    }

    #[test]
    fn unknown_names_leave_no_state() {
        let catalogue = new_catalogue();
        let (one, two) = (catalogue.follow(&topic("a")), catalogue.follow(&topic("a")));
        drop(one);
        assert_eq!(catalogue.topics.lock().len(), 1);
        drop(two);
        assert_eq!(catalogue.topics.lock().len(), 0);
        assert!(catalogue.list(|_| true).is_empty());
    }

    #[tokio::test]
    async fn a_waiting_follower_sees_the_topic_end() {
        let catalogue = new_catalogue();
        let mut follower = catalogue.follow(&topic("a"));
        assert_eq!(follower.topic().ended(), None);
        let published = catalogue.open(&topic("a")).unwrap();
        catalogue.remove(&published, EndReason::Withdrawn);
        follower.changed().await;
        assert_eq!(follower.topic().ended(), Some(EndReason::Withdrawn));
        assert!(catalogue.open(&topic("a")).is_some(), "the name is free");
        drop(follower);
        assert_eq!(catalogue.topics.lock().len(), 1, "the new topic stays");
    }
}
