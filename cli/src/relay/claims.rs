//! [`Claims`]: which origin a topic comes from, if several have it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};
use tensor_relay_client::Topic;
use tensor_relay_device::Lock;
use tokio::sync::watch;

/// The origins that have each topic, by their numbers. It comes from the first of them that is not lost; if all are,
/// from the first.
#[derive(Debug, Default)]
pub(super) struct Claims {
    state: Lock<State>,
    changed: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct State {
    origins: BTreeMap<Topic, BTreeSet<usize>>,
    lost: BTreeSet<usize>,
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
        self.state.lock().origins.contains_key(topic)
    }

    /// Claims `topic` for the origin with this number.
    pub(super) fn claim(self: &Arc<Self>, topic: &Topic, origin: usize) -> Claim {
        self.state.lock().origins.entry(topic.clone()).or_default().insert(origin);
        self.changed.send_replace(());
        Claim { claims: Arc::clone(self), topic: topic.clone(), origin }
    }

    /// Records whether the origin with this number is lost, so that its topics come from others.
    pub(super) fn set_lost(&self, origin: usize, is_lost: bool) {
        let mut state = self.state.lock();
        let has_changed = match is_lost {
            true => state.lost.insert(origin),
            false => state.lost.remove(&origin),
        };
        drop(state);
        if has_changed {
            self.changed.send_replace(());
        }
    }
}

impl Claim {
    fn is_first(&self) -> bool {
        let state = self.claims.state.lock();
        let Some(origins) = state.origins.get(&self.topic) else { return false };
        let connected = origins.iter().find(|origin| !state.lost.contains(*origin));
        connected.or_else(|| origins.first()) == Some(&self.origin)
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
        let mut state = self.claims.state.lock();
        if let Some(of_topic) = state.origins.get_mut(&self.topic) {
            of_topic.remove(&self.origin);
            if of_topic.is_empty() {
                state.origins.remove(&self.topic);
            }
        }
        drop(state);
        self.claims.changed.send_replace(());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[tokio::test(start_paused = true)]
    async fn a_topic_comes_from_the_first_origin_that_has_it_and_is_not_lost() {
        let (claims, topic) = (Arc::<Claims>::default(), Topic::new("t").unwrap());
        let second = claims.claim(&topic, 1);
        second.wait(true).await;
        let first = claims.claim(&topic, 0);
        second.wait(false).await;
        first.wait(true).await;
        let waiting = tokio::time::timeout(Duration::from_secs(9), second.wait(true)).await;
        assert!(waiting.is_err());
        claims.set_lost(0, true);
        first.wait(false).await;
        second.wait(true).await;
        claims.set_lost(1, true);
        first.wait(true).await;
        second.wait(false).await;
        claims.set_lost(0, false);
        first.wait(true).await;
        drop(first);
        second.wait(true).await;
        drop(second);
        assert!(claims.state.lock().origins.is_empty());
    }
}
