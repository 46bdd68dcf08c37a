//! The user's end of a subscription.

use crate::{
    Progress, Snapshot, SubscriptionError,
    delivery::{Delivery, Found},
    progress::Counters,
    session::Command,
};
use std::{sync::Arc, time::Duration};
use tensor_relay_protocol::{SubscriptionId, Topic};
use tokio::{sync::mpsc, time::Instant};

/// Delivers the versions of one topic, always the newest. Dropping it ends the subscription.
#[derive(Debug)]
pub struct Subscription {
    id: SubscriptionId,
    topic: Topic,
    delivery: Arc<Delivery>,
    counters: Arc<Counters>,
    commands: mpsc::UnboundedSender<Command>,
    topic_timeout: Duration,
    topic_deadline: Instant,
}

impl Subscription {
    pub(crate) fn new(
        id: SubscriptionId,
        topic: Topic,
        (delivery, counters): (Arc<Delivery>, Arc<Counters>),
        commands: mpsc::UnboundedSender<Command>,
        topic_timeout: Duration,
    ) -> Self {
        let topic_deadline = Instant::now() + topic_timeout;
        Self { id, topic, delivery, counters, commands, topic_timeout, topic_deadline }
    }

    /// Which topic.
    pub fn topic(&self) -> &Topic {
        &self.topic
    }

    /// Waits for the next snapshot: whole, verified, and newer than the one before. Cancel safe.
    ///
    /// Waits without bound for a topic that exists to have a new version; put a timeout around it where that matters.
    ///
    /// # Errors
    /// [`SubscriptionError`] when nothing more will come; later calls say the same.
    pub async fn next(&mut self) -> Result<Snapshot, SubscriptionError> {
        loop {
            match self.delivery.take() {
                Found::Snapshot(snapshot) => return Ok(*snapshot),
                Found::Ended(error) => return Err(error),
                Found::Nothing { announced: true } => self.delivery.changed().await,
                Found::Nothing { announced: false } => {
                    let changed = tokio::time::timeout_at(self.topic_deadline, self.delivery.changed());
                    if changed.await.is_err() {
                        self.delivery.end(self.not_found());
                        let _ = self.commands.send(Command::Unsubscribe(self.id));
                    }
                }
            }
        }
    }

    /// How far the version that is being received has come.
    pub fn progress(&self) -> Progress {
        self.counters.get()
    }

    /// A reader of [`progress`](Self::progress) that can be used while this is borrowed by [`next`](Self::next).
    pub fn progress_reader(&self) -> impl Fn() -> Progress + Send + Sync + 'static {
        let counters = Arc::clone(&self.counters);
        move || counters.get()
    }

    fn not_found(&self) -> SubscriptionError {
        SubscriptionError::NotFound { topic: self.topic.clone(), timeout_ms: self.topic_timeout.as_millis() }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let _ = self.commands.send(Command::Unsubscribe(self.id));
    }
}
