//! [`RelayedTopic`]: publishes the versions of one topic in the order in which they begin.

use super::{RelayOptions, version::RelayedVersion};
use crate::{
    Keep, PublishError, Publisher, TopicOptions, TopicTaken, retained::Retained, server::open_publisher,
    shared::Shared, topic::TopicState,
};
use std::{collections::VecDeque, sync::Arc};
use tensor_relay_device::Lock;
use tensor_relay_protocol::{EndReason, Epoch, Topic, Version};
use tokio::sync::watch;

/// A topic of another server. A task publishes its versions, because that may have to wait for readers; what arrives waits
/// for nobody.
#[derive(Debug)]
pub(super) struct RelayedTopic {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    name: Topic,
    shared: Arc<Shared>,
    options: TopicOptions,
    keep: Keep,
    every: bool,
    queue: Lock<Queue>,
    /// Signals that there is something to do, or that it is done.
    changed: watch::Sender<()>,
    /// The topic in the catalogue, once a version was published.
    state: Lock<Option<Arc<TopicState>>>,
    /// The newest version that was here as a whole.
    whole: Lock<Option<(Epoch, Version)>>,
}

#[derive(Debug, Default)]
struct Queue {
    /// The versions that wait to be published.
    versions: VecDeque<Queued>,
    /// Whether one is being published.
    is_busy: bool,
    /// Why the topic ended.
    end: Option<EndReason>,
    /// Whether no further version will come, because the relay is gone.
    is_closed: bool,
}

/// A version that waits to be published.
#[derive(Debug)]
struct Queued {
    version: Arc<RelayedVersion>,
    /// Whether a version of its number, or a later one of its epoch, was here as a whole before it began.
    was_passed: bool,
}

/// Why a version is not offered.
#[derive(Debug, thiserror::Error)]
enum NotOffered {
    #[error(transparent)]
    Taken(#[from] TopicTaken),
    #[error(transparent)]
    Publish(#[from] PublishError),
}

impl RelayedTopic {
    pub(super) fn begin(name: Topic, shared: &Arc<Shared>, relay: &RelayOptions) -> Arc<Self> {
        let keep = relay.topics.keep;
        // The last whole version stays while the next one arrives.
        let versions = keep.versions.max(1).saturating_add(1);
        let inner = Arc::new(Inner {
            name,
            shared: Arc::clone(shared),
            options: TopicOptions { keep: Keep { versions, ..keep }, ..relay.topics.clone() },
            keep,
            every: relay.every,
            queue: Lock::default(),
            changed: watch::Sender::default(),
            state: Lock::default(),
            whole: Lock::default(),
        });
        tokio::spawn(run(Arc::clone(&inner))); // Until the topic ends, or this is dropped.
        Arc::new(Self { inner })
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.inner.shared
    }

    /// Publishes a version after those before it. Without `every`, it takes their place. Call it before a chunk of the
    /// version can arrive: it may be whole before it is published.
    pub(super) fn publish(&self, version: Arc<RelayedVersion>) {
        let was_passed = self.inner.had_whole(version.key());
        let mut queue = self.inner.queue.lock();
        if !self.inner.every {
            queue.versions.clear();
        }
        // In mode `every`, the client's window bounds their number.
        queue.versions.push_back(Queued { version, was_passed });
        drop(queue);
        self.inner.changed.send_replace(());
    }

    /// Ends the topic.
    pub(super) fn end(&self, reason: EndReason) {
        self.inner.queue.lock().end.get_or_insert(reason);
        self.inner.changed.send_replace(());
    }

    /// Waits until nothing is to be published. Cancel safe.
    pub(super) async fn idle(&self) {
        let mut changes = self.inner.changed.subscribe();
        loop {
            {
                let queue = self.inner.queue.lock();
                if !queue.is_busy && queue.versions.is_empty() || queue.end.is_some() {
                    return;
                }
            }
            let _ = changes.changed().await; // `inner` has the sender.
        }
    }

    /// A version that is in memory.
    pub(super) fn find(&self, key: (Epoch, Version)) -> Option<Arc<Retained>> {
        self.state()?.in_memory(key)
    }

    /// Handles that more of a version is here.
    pub(super) fn handle_arrived(&self) {
        if let Some(state) = self.state() {
            state.handle_arrived();
        }
    }

    /// Handles that a version is whole: earlier ones give way to it.
    pub(super) fn handle_whole(&self, key: (Epoch, Version)) {
        self.inner.note_whole(key);
        if let Some(state) = self.state() {
            state.trim(self.inner.keep);
            state.handle_arrived();
        }
    }

    /// Withdraws a version of which nothing more will come.
    pub(super) fn give_up(&self, key: (Epoch, Version)) {
        self.inner.queue.lock().versions.retain(|queued| queued.version.key() != key);
        if let Some(state) = self.state() {
            state.give_up(key);
        }
        self.inner.changed.send_replace(());
    }

    fn state(&self) -> Option<Arc<TopicState>> {
        self.inner.state.lock().clone()
    }
}

impl Drop for RelayedTopic {
    fn drop(&mut self) {
        self.inner.queue.lock().is_closed = true;
        self.inner.changed.send_replace(());
    }
}

/// What is to be done.
enum Next {
    Publish(Queued),
    /// The topic ended for this reason, or stays as it is.
    End(Option<EndReason>),
    Wait,
}

/// Publishes what is queued, until the topic ends.
async fn run(topic: Arc<Inner>) {
    let (mut publisher, mut changes) = (None, topic.changed.subscribe());
    loop {
        changes.mark_unchanged();
        match topic.next() {
            Next::Publish(queued) => {
                if let Err(error) = publish(&topic, &mut publisher, &queued, &mut changes).await {
                    tracing::error!(version = %queued.version.id, %error, "A version is not offered.");
                }
            }
            Next::End(reason) => {
                *topic.state.lock() = None;
                if let (Some(reason), Some(publisher)) = (reason, publisher) {
                    end_topic(publisher, reason);
                }
                return;
            }
            Next::Wait => drop(changes.changed().await), // `topic` has the sender.
        }
    }
}

/// Ends a topic as it ended at its origin, and says so by name.
fn end_topic(publisher: Publisher, reason: EndReason) {
    let topic = publisher.topic().clone();
    match reason {
        EndReason::TopicEnded => tracing::info!(%topic, "A topic ended at its origin, and so it does here."),
        reason => tracing::warn!(%topic, "A topic is withdrawn here, as at its origin: {reason}."),
    }
    publisher.end_with(reason);
}

/// Publishes a version, with the epoch and number that it has at its origin, unless it is given up or the topic ends
/// meanwhile. If a version of this number, or a later one, was here as a whole and was passed, as after the restored
/// backup of an origin, the topic is withdrawn first: its clients subscribe anew. One that was given up before it was
/// whole is published again; a subscription in which its transfer was aborted goes on with the next one.
async fn publish(
    topic: &Arc<Inner>,
    slot: &mut Option<Publisher>,
    Queued { version, was_passed }: &Queued,
    changes: &mut watch::Receiver<()>,
) -> Result<(), NotOffered> {
    let (epoch, number) = version.key();
    let publisher = match slot.take() {
        Some(publisher) if publisher.epoch() == epoch => {
            match publisher.next_id().version > number && *was_passed {
                true => {
                    publisher.withdraw();
                    *topic.whole.lock() = None;
                    topic.open(epoch)?
                }
                false => publisher,
            }
        }
        earlier => {
            drop(earlier); // A topic has one publisher at a time.
            topic.open(epoch)?
        }
    };
    let publisher = slot.insert(publisher);
    publisher.set_next(number);
    let (publishable, metadata) = version.publishable();
    let is_void = || version.arrival.is_given_up() || topic.queue.lock().end.is_some();
    let void = async {
        while !is_void() {
            let _ = changes.changed().await; // `topic` has the sender.
        }
    };
    tokio::select! {
        biased;
        () = void => return Ok(()),
        published = publisher.publish(publishable, metadata) => drop(published?),
    }
    let Some(state) = topic.state.lock().clone() else { return Ok(()) };
    if version.arrival.is_given_up() {
        state.give_up(version.key()); // Meanwhile.
    }
    if version.arrival.is_whole() {
        topic.note_whole(version.key());
        state.trim(topic.keep);
    }
    state.handle_arrived();
    Ok(())
}

impl Inner {
    fn next(&self) -> Next {
        let mut queue = self.queue.lock();
        let queued = queue.versions.pop_front();
        let was_busy = std::mem::replace(&mut queue.is_busy, queued.is_some());
        let (end, is_closed) = (queue.end, queue.is_closed);
        drop(queue);
        match (end, queued) {
            (Some(reason), _) => Next::End(Some(reason)),
            (None, Some(queued)) => Next::Publish(queued),
            (None, None) if is_closed => Next::End(None),
            (None, None) => {
                if was_busy {
                    self.changed.send_replace(()); // For those who wait until it is idle.
                }
                Next::Wait
            }
        }
    }

    fn note_whole(&self, (epoch, number): (Epoch, Version)) {
        let mut whole = self.whole.lock();
        let later = whole.filter(|(last_epoch, last)| *last_epoch == epoch && *last > number);
        *whole = later.or(Some((epoch, number)));
    }

    /// Whether a version of this number, or a later one of its epoch, was here as a whole.
    fn had_whole(&self, (epoch, number): (Epoch, Version)) -> bool {
        self.whole
            .lock()
            .is_some_and(|(last_epoch, last)| last_epoch == epoch && last >= number)
    }

    fn open(&self, epoch: Epoch) -> Result<Publisher, TopicTaken> {
        let publisher = open_publisher(&self.shared, self.name.clone(), Some(epoch), self.options.clone())?;
        *self.state.lock() = Some(Arc::clone(publisher.state()));
        Ok(publisher)
    }
}
