//! [`Topics`]: the topics of local producers. They outlive producers, which may share them.

use super::draft::Refused;
use crate::{Publisher, TopicOptions, refusals::Reason, server::open_publisher, shared::Shared};
use std::{collections::HashMap, net::Ipv4Addr, sync::Arc, time::Duration};
use tensor_relay_device::Lock;
use tensor_relay_protocol::{Topic, sidecar::Refusal};
use tokio::{sync::OwnedMutexGuard, time::Instant};

/// Exclusive use of a topic's publisher. `None` while the topic is not open.
pub(super) type Lease = OwnedMutexGuard<Option<Publisher>>;

/// A topic's publisher, behind a lock that queues its users.
type PublisherLock = Arc<tokio::sync::Mutex<Option<Publisher>>>;

/// The maximum number of open topics of a user: a training job has a few, and each stays open until a producer ends it,
/// it expires, or the server ends. The server's operator chooses the users.
pub(super) const TOPICS_MAX: usize = 4096;

/// The time that a publish waits for earlier ones into the same topic, which may wait for its readers.
const TURN_TIMEOUT: Duration = Duration::from_secs(60);

/// Publishers by topic, kept across connections, so that version numbers continue when a producer reconnects.
#[derive(Debug)]
pub(super) struct Topics {
    shared: Arc<Shared>,
    options: TopicOptions,
    /// Each with the user that opened it.
    publishers: Lock<HashMap<Topic, (u32, PublisherLock)>>,
}

impl Topics {
    pub(super) fn new(shared: Arc<Shared>, options: TopicOptions) -> Self {
        Self { shared, options, publishers: Lock::default() }
    }

    /// Leases `topic`'s publisher to user `uid` for one publish, in the order of requests; it is `None` if the topic is
    /// not open.
    /// Waits for earlier leases, for [`TURN_TIMEOUT`] at most. Cancel safe.
    ///
    /// # Errors
    /// If earlier leases take too long, or the user has too many topics.
    pub(super) async fn lease(&self, uid: u32, topic: &Topic) -> Result<Lease, Refused> {
        let lock = {
            let mut locks = self.publishers.lock();
            let is_full = |locks: &HashMap<_, (u32, PublisherLock)>| {
                locks.values().filter(|(user, _)| *user == uid).count() >= TOPICS_MAX
            };
            if !locks.contains_key(topic) && is_full(&locks) {
                locks.retain(|_, (_, lock)| !is_idle(lock));
                if is_full(&locks) {
                    let text = format!(
                        "user {uid} has {TOPICS_MAX} topics here, the maximum: end one that is no longer needed"
                    );
                    return Err((Refusal::NoRoom, text));
                }
            }
            let (_, lock) = locks.entry(topic.clone()).or_insert_with(|| (uid, PublisherLock::default()));
            Arc::clone(lock)
        };
        self.acquire(topic, lock).await
    }

    /// Checks that the access control list lets a user publish into `topic`, or end it.
    ///
    /// # Errors
    /// If not; the text has the missing line.
    pub(super) fn check_may_publish(&self, uid: u32, topic: &Topic) -> Result<(), Refused> {
        if self.shared.access.rules().acl.may_publish(uid, topic) {
            return Ok(());
        }
        let here = Ipv4Addr::LOCALHOST.into();
        match self.shared.refusals.note(here, Reason::Publish(uid), Instant::now()) {
            Some(unlogged) => {
                let text = "A publish was refused: the access control list does not allow it.";
                tracing::warn!(uid, %topic, unlogged, "{text}");
            }
            None => tracing::debug!(uid, %topic, "A publish was refused."),
        }
        let text = format!(
            "the server's access control list does not let user {uid} publish into topic {topic}: add a line \
             `uid:{uid} publish {topic}`"
        );
        Err((Refusal::Forbidden, text))
    }

    /// Waits until the access control list no longer lets a user publish into `topic`, and returns the refusal. Cancel
    /// safe.
    pub(super) async fn forbidden(&self, uid: u32, topic: &Topic) -> Refused {
        let mut changes = self.shared.access.changes();
        loop {
            changes.mark_unchanged();
            if let Err(refused) = self.check_may_publish(uid, topic) {
                return refused;
            }
            if changes.changed().await.is_err() {
                return std::future::pending().await; // The rules can no longer change.
            }
        }
    }

    /// Opens `topic` if it is not open.
    ///
    /// # Errors
    /// If the topic has another publisher in this server, such as served files.
    pub(super) fn open<'a>(&self, topic: &Topic, lease: &'a mut Lease) -> Result<&'a mut Publisher, Refused> {
        let publisher = match lease.take() {
            Some(publisher) => publisher,
            None => open_publisher(&self.shared, topic.clone(), None, self.options.clone())
                .map_err(|taken| (Refusal::TopicTaken, taken.to_string()))?,
        };
        Ok(lease.insert(publisher))
    }

    /// Ends `topic` after earlier leases; returns whether it was open. With `withdraw`, retained versions are released,
    /// too. Cancel safe.
    ///
    /// # Errors
    /// If earlier leases take too long, or user `uid` lost its permission meanwhile.
    pub(super) async fn end(&self, uid: u32, topic: &Topic, withdraw: bool) -> Result<bool, Refused> {
        let lock = self.publishers.lock().get(topic).map(|(_, lock)| Arc::clone(lock));
        let Some(lock) = lock else { return Ok(false) };
        let mut lease = self.acquire(topic, lock).await?;
        self.check_may_publish(uid, topic)?;
        let publisher = lease.take();
        let was_open = publisher.is_some();
        // Under the lease, so that it is not reopened meanwhile.
        match (publisher, withdraw) {
            (Some(publisher), true) => publisher.withdraw(),
            (Some(publisher), false) => publisher.end(),
            (None, _) => {}
        }
        drop(lease);
        self.remove_unneeded(topic);
        Ok(was_open)
    }

    async fn acquire(&self, topic: &Topic, lock: PublisherLock) -> Result<Lease, Refused> {
        tokio::time::timeout(TURN_TIMEOUT, lock.lock_owned()).await.map_err(|_| {
            let waited = TURN_TIMEOUT.as_secs();
            let text = format!(
                "earlier publishes into topic {topic} have waited {waited} s for its readers: try again, or evict the \
                 readers"
            );
            (Refusal::NoRoom, text)
        })
    }

    /// Removes a topic without publisher and without waiting tasks.
    pub(super) fn remove_unneeded(&self, topic: &Topic) {
        let mut locks = self.publishers.lock();
        if locks.get(topic).is_some_and(|(_, lock)| is_idle(lock)) {
            locks.remove(topic);
        }
    }
}

/// Whether no task waits for the publisher and its topic is not open.
fn is_idle(lock: &PublisherLock) -> bool {
    let is_closed = |publisher: &Option<Publisher>| publisher.as_ref().is_none_or(Publisher::has_ended);
    Arc::strong_count(lock) == 1 && lock.try_lock().is_ok_and(|publisher| is_closed(&publisher))
}
