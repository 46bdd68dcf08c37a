//! Subscriptions: the user's handle.

use crate::{
    Progress, Request, Snapshot, SubscriptionError,
    command::{Command, Opened, SubscriptionHandle},
    destination::Payload,
    holding::HoldCounter,
    progress::Counters,
    snapshot_queue::{Found, SnapshotQueue},
};
use futures_util::{Stream, stream};
use std::{sync::Arc, time::Duration};
use tensor_relay_protocol::{Mode, Topic, VersionId};
use tokio::{sync::oneshot, time::Instant};

/// Delivers the versions of one topic as committed snapshots. Dropping it ends the subscription.
#[derive(Debug)]
pub struct Subscription {
    pub(crate) handle: SubscriptionHandle,
    pub(crate) topic: Topic,
    pub(crate) mode: Mode,
    pub(crate) queue: Arc<SnapshotQueue>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) limits: SubscriptionLimits,
    pub(crate) holding: Arc<HoldCounter>,
    /// In mode `every`, the version that the user is processing.
    pub(crate) taken: Option<VersionId>,
    /// Since when a snapshot is held back because the user holds too many. Kept across cancelled calls.
    pub(crate) held_back_since: Option<Instant>,
}

/// The minimum time to wait for an answer to `List`.
const ANSWER_TIMEOUT_MIN: Duration = Duration::from_secs(1);

/// The timeouts of a subscription, and its limit of held snapshots.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SubscriptionLimits {
    pub(crate) topic_timeout: Duration,
    pub(crate) held_max: usize,
    pub(crate) hold_timeout: Duration,
}

impl Subscription {
    /// The handle of a subscription opened for `request`.
    pub(crate) fn new(request: Request, opened: Opened, limits: SubscriptionLimits) -> Self {
        let Opened { handle, queue, counters, holding } = opened;
        Self {
            handle,
            topic: request.topic,
            mode: request.mode,
            queue,
            counters,
            limits,
            holding,
            taken: None,
            held_back_since: None,
        }
    }

    /// The topic.
    pub fn topic(&self) -> &Topic {
        &self.topic
    }

    /// Waits for the next snapshot: complete, verified, and newer than the previous one. Cancel safe.
    ///
    /// In mode `every`, this acknowledges the previous snapshot: the server need not retain it for this reader any
    /// longer.
    ///
    /// The wait for a new version of an existing topic is unbounded: put a timeout around it if needed. The wait for
    /// the first version ends after [`Config::topic_timeout`](crate::Config::topic_timeout) if the topic does not exist
    /// or the server aborted its newest version. The timeout restarts when the server aborts an announced version.
    ///
    /// While the user holds the maximum number of snapshots, the next one is held back. After
    /// [`Config::hold_timeout`](crate::Config::hold_timeout), which may span several calls, this fails.
    ///
    /// # Errors
    /// [`SubscriptionError`]. After a [final](SubscriptionError::is_final) one, later calls return the same error.
    /// After any other, call again.
    pub async fn next(&mut self) -> Result<Snapshot, SubscriptionError> {
        self.acknowledge();
        loop {
            let may_take = self.holding.count() < self.limits.held_max;
            match self.queue.take(may_take) {
                Found::Snapshot(snapshot) => return Ok(self.deliver(*snapshot)),
                Found::Gap(gap) => return Err(SubscriptionError::Gap(gap)),
                Found::NotYet => {
                    let since = *self.held_back_since.get_or_insert_with(Instant::now);
                    let deadline = since + self.limits.hold_timeout;
                    if tokio::time::timeout_at(deadline, self.holding.dropped()).await.is_err() {
                        self.held_back_since = None;
                        return Err(self.holding_too_many(self.limits.hold_timeout));
                    }
                }
                Found::Ended(error) | Found::Failure(error) => return Err(error),
                // Without a connection it is unknown whether the topic exists.
                Found::Nothing | Found::Unknown { waiting_since: None } => self.queue.changed().await,
                Found::Unknown { waiting_since: Some(since) } => self.wait_for_topic(since).await,
            }
        }
    }

    /// Returns the snapshots as a stream, which ends after the first final error. Requesting an item acknowledges the
    /// previous one, as in [`next`](Self::next).
    pub fn into_stream(self) -> impl Stream<Item = Result<Snapshot, SubscriptionError>> + Send {
        stream::unfold(Some(self), |subscription| async {
            let mut subscription = subscription?;
            let next = subscription.next().await;
            let is_final = next.as_ref().is_err_and(SubscriptionError::is_final);
            Some((next, (!is_final).then_some(subscription)))
        })
    }

    /// The progress of the version that is being received.
    pub fn progress(&self) -> Progress {
        self.counters.get()
    }

    /// A function that returns [`progress`](Self::progress), even while [`next`](Self::next) borrows the subscription.
    pub fn progress_reader(&self) -> impl Fn() -> Progress + Send + Sync + 'static {
        let counters = Arc::clone(&self.counters);
        move || counters.get()
    }

    pub(crate) async fn wait_for_topic(&self, since: Instant) {
        let deadline = since + self.limits.topic_timeout;
        let changed = tokio::time::timeout_at(deadline, self.queue.changed());
        if changed.await.is_err() {
            let newest = tokio::select! {
                answer = self.request_newest() => match answer {
                    Some(newest) => newest,
                    None => return, // The caller tries again.
                },
                // A version was received, or the connection was lost with the request.
                () = self.queue.changed() => return,
            };
            match self.timeout_error(newest) {
                Some(error) => {
                    self.queue.end(error);
                    self.handle.unsubscribe();
                }
                None => self.queue.announce(),
            }
        }
    }

    /// Requests the newest version of the topic, because the server sends nothing for an existing topic that has no new
    /// version for this subscription. `None` without an answer before the timeout.
    async fn request_newest(&self) -> Option<Option<VersionId>> {
        let (reply, answer) = oneshot::channel();
        let _ = self.handle.commands.send(Command::List(reply)); // An ended session drops the request.
        let topics = tokio::time::timeout(self.limits.topic_timeout.max(ANSWER_TIMEOUT_MIN), answer)
            .await
            .ok()?
            .ok()?;
        let entry = topics.into_iter().find(|entry| entry.id.topic == self.topic);
        Some(entry.map(|entry| entry.id))
    }

    /// The error after the timeout, if the topic does not exist or the server aborted its newest version, `newest`.
    /// `None` if the topic has a version that was not aborted.
    fn timeout_error(&self, newest: Option<VersionId>) -> Option<SubscriptionError> {
        let timeout_ms = self.limits.topic_timeout.as_millis();
        match (self.queue.given_up(), newest) {
            (Some((id, _)), Some(newest)) if newest.epoch != id.epoch || newest.version > id.version => None,
            (Some((id, reason)), _) => Some(SubscriptionError::Aborted { id, reason, timeout_ms }),
            (None, Some(_)) => None,
            (None, None) => Some(SubscriptionError::NotFound { topic: self.topic.clone(), timeout_ms }),
        }
    }

    fn deliver(&mut self, mut snapshot: Snapshot) -> Snapshot {
        self.held_back_since = None;
        let id = snapshot.id.clone();
        match &mut snapshot.payload {
            Payload::Region(payload, _) => *payload = self.holding.count_payload(id, payload.clone()),
            Payload::Device(shared) if shared.payload().writing().is_none() => {
                shared.keep(self.holding.hold(id));
            }
            // Versions in the user's own buffers are not counted.
            Payload::Scattered(_) | Payload::Device(_) => {}
        }
        self.taken = (self.mode == Mode::Every).then(|| snapshot.id.clone());
        snapshot
    }

    /// In mode `every`: acknowledges the last snapshot without requesting another. Call it before the program ends:
    /// otherwise its reader receives that version again after a restart.
    pub fn acknowledge(&mut self) {
        if let Some(id) = self.taken.take() {
            let _ = self
                .handle
                .commands
                .send(Command::Acknowledge(self.handle.id, id.epoch, id.version));
        }
    }

    /// For callers with their own timeout: a function that accepts the time waited, and returns an error if a
    /// snapshot is held back because the user holds too many. It can be called while [`next`](Self::next) borrows the
    /// subscription.
    pub fn holding_limit_check(
        &self,
    ) -> impl Fn(Duration) -> Option<SubscriptionError> + Send + Sync + use<> + 'static {
        let (topic, max) = (self.topic.clone(), self.limits.held_max);
        let (holding, queue) = (Arc::clone(&self.holding), Arc::clone(&self.queue));
        move |waited| {
            let is_held_back = queue.has_snapshot() && holding.count() >= max;
            is_held_back.then(|| holding_too_many(&topic, &holding, max, waited))
        }
    }

    fn holding_too_many(&self, waited: Duration) -> SubscriptionError {
        holding_too_many(&self.topic, &self.holding, self.limits.held_max, waited)
    }
}

fn holding_too_many(topic: &Topic, holding: &HoldCounter, max: usize, waited: Duration) -> SubscriptionError {
    SubscriptionError::HoldingTooMany {
        topic: topic.clone(),
        held: holding.versions().iter().map(|id| id.version).collect(),
        max,
        timeout_ms: waited.as_millis(),
    }
}
