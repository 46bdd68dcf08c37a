//! The topics that producers beside this server publish into: each has one producer at a time, and outlives it.

use super::draft::Refused;
use crate::{Publisher, TopicOptions, server::open_publisher, session::Shared};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tensor_relay_protocol::{Topic, beside::Refusal};
use tokio::sync::OwnedMutexGuard;

/// How long a producer waits for the one before to have gone: one that ended is noticed at once, but not before.
const TURN: Duration = Duration::from_secs(5);

/// A topic's publisher, while a connection has it. None once the topic ended.
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

    /// Gives the publisher of `topic` to one producer, when the one before has gone. It is opened if it is not.
    ///
    /// # Errors
    /// When another publishes into it, from wherever.
    pub(super) async fn lease(&self, topic: &Topic) -> Result<Lease, Refused> {
        let place = Arc::clone(self.places().entry(topic.clone()).or_default());
        let mut lease = tokio::time::timeout(TURN, place.lock_owned())
            .await
            .map_err(|_| (Refusal::TopicTaken, format!("another producer publishes into topic {topic}")))?;
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

    /// Whether somebody publishes into `topic`, or did.
    pub(super) fn is_open(&self, topic: &Topic) -> bool {
        self.places().contains_key(topic)
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
