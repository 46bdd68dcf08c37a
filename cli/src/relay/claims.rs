//! [`Claims`]: which origin a topic comes from, if several have it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};
use tensor_relay_client::Topic;
use tensor_relay_device::Lock;
use tokio::sync::watch;

/// The origins that have each topic, by their numbers. It comes from the first of them.
#[derive(Debug, Default)]
pub(super) struct Claims {
    origins: Lock<BTreeMap<Topic, BTreeSet<usize>>>,
    changed: watch::Sender<()>,
}

/// An origin's claim to a topic, until it is dropped.
#[derive(Debug)]
pub(super) struct Claim {
    claims: Arc<Claims>,
    topic: Topic,
    origin: usize,
}

impl Claims {
    /// Whether an origin claims `topic`.
    pub(super) fn has(&self, topic: &Topic) -> bool {
        self.origins.lock().contains_key(topic)
    }

    /// Claims `topic` for the origin with this number.
    pub(super) fn claim(self: &Arc<Self>, topic: &Topic, origin: usize) -> Claim {
        self.origins.lock().entry(topic.clone()).or_default().insert(origin);
        self.changed.send_replace(());
        Claim { claims: Arc::clone(self), topic: topic.clone(), origin }
    }
}

impl Claim {
    fn is_first(&self) -> bool {
        let origins = self.claims.origins.lock();
        origins.get(&self.topic).and_then(BTreeSet::first) == Some(&self.origin)
    }

    /// Waits until the topic comes from this origin, or until it does not. Cancel safe.
    pub(super) async fn wait(&self, comes_from_it: bool) {
        let mut changes = self.claims.changed.subscribe();
        while self.is_first() != comes_from_it {
            let _ = changes.changed().await; // `claims` has the sender.
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut origins = self.claims.origins.lock();
        if let Some(of_topic) = origins.get_mut(&self.topic) {
            of_topic.remove(&self.origin);
            if of_topic.is_empty() {
                origins.remove(&self.topic);
            }
        }
        drop(origins);
        self.claims.changed.send_replace(());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[tokio::test(start_paused = true)]
    async fn a_topic_comes_from_the_first_origin_that_has_it() {
        let (claims, topic) = (Arc::<Claims>::default(), Topic::new("t").unwrap());
        let second = claims.claim(&topic, 1);
        second.wait(true).await;
        let first = claims.claim(&topic, 0);
        second.wait(false).await;
        first.wait(true).await;
        let waiting = tokio::time::timeout(Duration::from_secs(9), second.wait(true)).await;
        assert!(waiting.is_err());
        drop(first);
        second.wait(true).await;
        drop(second);
        assert!(claims.origins.lock().is_empty());
    }
}
