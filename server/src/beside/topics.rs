//! The topics that producers beside this server publish into. They outlive producers, and several may share one.

use super::draft::Refused;
use crate::{Publisher, TopicOptions, server::open_publisher, session::Shared};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use tensor_relay_protocol::{Topic, beside::Refusal};
use tokio::sync::OwnedMutexGuard;

/// A topic's publisher, while somebody publishes with it. None once the topic ended.
pub(super) type Lease = OwnedMutexGuard<Option<Publisher>>;

/// Publishers by topic, kept over connections: so that versions go on counting when a producer comes again.
#[derive(Debug)]
pub(super) struct Topics {
    shared: Arc<Shared>,
    options: TopicOptions,
    publishers: Mutex<HashMap<Topic, Arc<tokio::sync::Mutex<Option<Publisher>>>>>,
}

impl Topics {
    pub(super) fn new(shared: Arc<Shared>, options: TopicOptions) -> Self {
        Self { shared, options, publishers: Mutex::default() }
    }

    /// Gives the publisher of `topic` for one publish, in the order in which it was asked for. It is opened if it is not.
    /// Waits for as long as those before wait for their readers. Cancel safe.
    ///
    /// # Errors
    /// When the topic has a publisher elsewhere in this server: files are served under its name.
    pub(super) async fn lease(&self, topic: &Topic) -> Result<Lease, Refused> {
        let place = Arc::clone(self.places().entry(topic.clone()).or_default());
        let mut lease = place.lock_owned().await;
        if lease.is_none() {
            match open_publisher(&self.shared, topic.clone(), None, self.options.clone()) {
                Ok(publisher) => *lease = Some(publisher),
                Err(taken) => {
                    drop(lease);
                    self.tidy(topic);
                    return Err((Refusal::TopicTaken, taken.to_string()));
                }
            }
        }
        Ok(lease)
    }

    /// Takes the publisher of `topic` for good, when those who asked for it before are done; none if it has none. Cancel
    /// safe.
    pub(super) async fn take(&self, topic: &Topic) -> Option<Publisher> {
        let place = self.places().get(topic).map(Arc::clone)?;
        let publisher = place.lock_owned().await.take();
        self.tidy(topic);
        publisher
    }

    /// Forgets a topic that has no publisher and that nobody waits for.
    pub(super) fn tidy(&self, topic: &Topic) {
        let mut places = self.places();
        let is_idle = |place: &Arc<tokio::sync::Mutex<Option<Publisher>>>| {
            Arc::strong_count(place) == 1 && place.try_lock().is_ok_and(|publisher| publisher.is_none())
        };
        if places.get(topic).is_some_and(is_idle) {
            places.remove(topic);
        }
    }

    fn places(&self) -> MutexGuard<'_, HashMap<Topic, Arc<tokio::sync::Mutex<Option<Publisher>>>>> {
        self.publishers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
