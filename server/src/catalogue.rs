//! What is on offer: topics, and the newest version of each.
//!
//! Synchronous and small: publishers change it, sessions look at it and wait for it to change. A retained version lives
//! as long as the catalogue or a transfer refers to it.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use tensor_relay_protocol::{Metadata, Topic, TopicEntry, VersionId};
use tensor_relay_transport::egress::Payload;
use tokio::sync::watch;

/// One publish, as long as anything needs it.
#[derive(Debug)]
pub(crate) struct Retained {
    pub(crate) id: VersionId,
    pub(crate) payload: Payload,
    pub(crate) metadata: Metadata,
    /// How many subscribers committed it. The publisher's `Publication` watches it.
    pub(crate) committed: watch::Sender<u64>,
}

/// What subscriptions see of a topic.
#[derive(Debug, Clone, Default)]
pub(crate) struct Offer {
    /// The newest version, once there is one.
    pub(crate) newest: Option<Arc<Retained>>,
    /// Whether nothing will follow.
    pub(crate) ended: bool,
}

/// All topics of a server.
#[derive(Debug, Default)]
pub(crate) struct Catalogue {
    topics: Mutex<BTreeMap<Topic, Entry>>,
}

#[derive(Debug, Default)]
struct Entry {
    offer: watch::Sender<Offer>,
    published: bool,
    followers: u64,
}

impl Entry {
    /// An entry that only a waiting subscriber made is forgotten with that subscriber, so that asking for names that do
    /// not exist costs the server nothing lasting.
    fn is_needed(&self) -> bool {
        self.published || self.followers > 0
    }
}

impl Catalogue {
    /// Registers the publisher of `topic`; `None` when it has one already.
    pub(crate) fn open(&self, topic: &Topic) -> Option<watch::Sender<Offer>> {
        let mut topics = self.topics();
        let entry = topics.entry(topic.clone()).or_default();
        let free = !std::mem::replace(&mut entry.published, true);
        free.then(|| entry.offer.clone())
    }

    /// Follows `topic`, which need not exist yet.
    pub(crate) fn follow(self: &Arc<Self>, topic: &Topic) -> Follower {
        let mut topics = self.topics();
        let entry = topics.entry(topic.clone()).or_default();
        entry.followers += 1;
        Follower { catalogue: Arc::clone(self), topic: topic.clone(), offer: entry.offer.subscribe() }
    }

    /// Every topic that has a version, in order of name.
    pub(crate) fn list(&self) -> Vec<TopicEntry> {
        let topics = self.topics();
        let entries = topics.values().filter_map(|entry| {
            let retained = entry.offer.borrow().newest.clone()?;
            let manifest = retained.payload.manifest();
            Some(TopicEntry {
                id: retained.id.clone(),
                tensors: manifest.tensors().len() as u64,
                payload_bytes: manifest.payload_bytes(),
                subscribers: entry.followers,
            })
        });
        entries.collect()
    }

    fn topics(&self) -> MutexGuard<'_, BTreeMap<Topic, Entry>> {
        self.topics.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A subscription's view of one topic.
#[derive(Debug)]
pub(crate) struct Follower {
    catalogue: Arc<Catalogue>,
    topic: Topic,
    offer: watch::Receiver<Offer>,
}

impl Follower {
    /// What is on offer now.
    pub(crate) fn offer(&mut self) -> Offer {
        self.offer.borrow_and_update().clone()
    }

    /// Waits until the offer is another than the one last seen. Cancel safe.
    pub(crate) async fn changed(&mut self) {
        if self.offer.changed().await.is_err() {
            // The catalogue keeps the sender of every topic that is followed, so this is not reached.
            std::future::pending().await
        }
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        let mut topics = self.catalogue.topics();
        if let Some(entry) = topics.get_mut(&self.topic) {
            entry.followers -= 1;
            if !entry.is_needed() {
                topics.remove(&self.topic);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn topic(name: &str) -> Topic {
        Topic::new(name).unwrap()
    }

    #[test]
    fn a_topic_has_one_publisher() {
        let catalogue = Catalogue::default();
        assert!(catalogue.open(&topic("a")).is_some());
        assert!(catalogue.open(&topic("a")).is_none());
        assert!(catalogue.open(&topic("b")).is_some());
    }

    #[test]
    fn asking_for_what_does_not_exist_leaves_nothing() {
        let catalogue = Arc::new(Catalogue::default());
        let (one, two) = (catalogue.follow(&topic("a")), catalogue.follow(&topic("a")));
        drop(one);
        assert_eq!(catalogue.topics().len(), 1);
        drop(two);
        assert_eq!(catalogue.topics().len(), 0);
        assert!(catalogue.list().is_empty());
    }

    #[tokio::test]
    async fn who_waited_sees_the_topic_appear() {
        let catalogue = Arc::new(Catalogue::default());
        let mut follower = catalogue.follow(&topic("a"));
        assert!(follower.offer().newest.is_none());
        let offer = catalogue.open(&topic("a")).unwrap();
        offer.send_modify(|offer| offer.ended = true);
        follower.changed().await;
        assert!(follower.offer().ended);
    }
}
