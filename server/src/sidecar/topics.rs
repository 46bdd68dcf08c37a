//! The topics of local producers. They outlive producers, and several may share one.

use super::draft::Refused;
use crate::{Publisher, TopicOptions, server::open_publisher, shared::Shared};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tensor_relay_protocol::{Topic, sidecar::Refusal};
use tokio::sync::OwnedMutexGuard;

/// Exclusive use of a topic's publisher. `None` once the topic ended.
pub(super) type Lease = OwnedMutexGuard<Option<Publisher>>;

/// A topic's publisher, and the queue for it.
type Place = Arc<tokio::sync::Mutex<Option<Publisher>>>;

/// How many topics producers may have open at once: a training job has a few, and each stays for as long as the server.
pub(super) const TOPICS_MAX: usize = 4096;

/// How long a publish waits for others into the same topic, which wait for its readers in turn.
const TURN: Duration = Duration::from_secs(60);

/// Publishers by topic, kept over connections: so that versions go on counting when a producer comes again.
#[derive(Debug)]
pub(super) struct Topics {
    shared: Arc<Shared>,
    options: TopicOptions,
    publishers: Mutex<HashMap<Topic, Place>>,
}

impl Topics {
    pub(super) fn new(shared: Arc<Shared>, options: TopicOptions) -> Self {
        Self { shared, options, publishers: Mutex::default() }
    }

    /// Gives the place of `topic`'s publisher for one publish, in the order in which it was asked for: none is there if the
    /// topic is not open. Waits while those before wait for their readers, for [`TURN`] at most. Cancel safe.
    ///
    /// # Errors
    /// When others have it for too long, or there are too many topics.
    pub(super) async fn lease(&self, topic: &Topic) -> Result<Lease, Refused> {
        let place = {
            let mut places = self.places();
            if places.len() >= TOPICS_MAX && !places.contains_key(topic) {
                places.retain(|_, place| !is_idle(place));
                if places.len() >= TOPICS_MAX {
                    return Err((
                        Refusal::NoRoom,
                        format!("there are {TOPICS_MAX} topics: end one that is done"),
                    ));
                }
            }
            Arc::clone(places.entry(topic.clone()).or_default())
        };
        self.turn(topic, place).await
    }

    /// Checks that the access control list lets a user publish into `topic`, or end it.
    ///
    /// # Errors
    /// With what the user may ask for.
    pub(super) fn may_publish(&self, uid: u32, topic: &Topic) -> Result<(), Refused> {
        if self.shared.access.rules().acl.lets_publish(uid, topic) {
            return Ok(());
        }
        tracing::warn!(uid, %topic, "A publish was refused: the access control list does not allow it.");
        let text = format!(
            "the server's access control list does not let user {uid} publish into topic {topic}: it wants a line `uid:{uid} \
             publish {topic}`"
        );
        Err((Refusal::Forbidden, text))
    }

    /// Opens `topic` if it is not.
    ///
    /// # Errors
    /// When the topic has a publisher elsewhere in this server: files are served under its name.
    pub(super) fn open<'a>(&self, topic: &Topic, lease: &'a mut Lease) -> Result<&'a mut Publisher, Refused> {
        let publisher = match lease.take() {
            Some(publisher) => publisher,
            None => open_publisher(&self.shared, topic.clone(), None, self.options.clone())
                .map_err(|taken| (Refusal::TopicTaken, taken.to_string()))?,
        };
        Ok(lease.insert(publisher))
    }

    /// Ends `topic` for good when those who asked for it before are done, and says whether it was open. With `withdraw`, what
    /// is retained of it goes, too. Cancel safe.
    ///
    /// # Errors
    /// When others have it for too long, or user `uid` has lost its right while it waited.
    pub(super) async fn end(&self, uid: u32, topic: &Topic, withdraw: bool) -> Result<bool, Refused> {
        let Some(place) = self.places().get(topic).map(Arc::clone) else { return Ok(false) };
        let mut lease = self.turn(topic, place).await?;
        self.may_publish(uid, topic)?;
        let publisher = lease.take();
        let was_open = publisher.is_some();
        // While nobody else can open it: its name is free only then.
        match (publisher, withdraw) {
            (Some(publisher), true) => publisher.withdraw(),
            (Some(publisher), false) => publisher.end(),
            (None, _) => {}
        }
        drop(lease);
        self.remove_unneeded(topic);
        Ok(was_open)
    }

    async fn turn(&self, topic: &Topic, place: Place) -> Result<Lease, Refused> {
        tokio::time::timeout(TURN, place.lock_owned()).await.map_err(|_| {
            let waited = TURN.as_secs();
            let text = format!(
                "others have published into topic {topic} for {waited} s, and wait for its readers: try again, or evict those"
            );
            (Refusal::NoRoom, text)
        })
    }

    /// Forgets a topic that has no publisher and that nobody waits for.
    pub(super) fn remove_unneeded(&self, topic: &Topic) {
        let mut places = self.places();
        if places.get(topic).is_some_and(is_idle) {
            places.remove(topic);
        }
    }

    fn places(&self) -> MutexGuard<'_, HashMap<Topic, Place>> {
        self.publishers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether nobody waits for the publisher, and its topic is not open.
fn is_idle(place: &Place) -> bool {
    let is_closed = |publisher: &Option<Publisher>| publisher.as_ref().is_none_or(Publisher::has_ended);
    Arc::strong_count(place) == 1 && place.try_lock().is_ok_and(|publisher| is_closed(&publisher))
}
