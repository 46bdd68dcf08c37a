//! [`Inboxes`]: the message queues from a client to the subscriptions of its session.

use crate::shares::Eviction;
use std::{collections::BTreeMap, sync::Arc};
use tensor_relay_protocol::{
    EndReason, ProtocolViolation, RangeSet, SubscriptionId, SubscriptionMessage, Topic,
};
use tensor_relay_transport::sending::Input;
use tokio::sync::{Notify, mpsc};

/// The message queue of one subscription. The bound is small because subscriptions read their inboxes promptly; a
/// client that sends faster is slowed by flow control on its own control stream.
#[derive(Debug)]
pub(crate) struct Inbox {
    messages: mpsc::Receiver<SubscriptionMessage>,
    forbidden: Arc<Notify>,
    /// The eviction of the subscription from its place, once it has one.
    pub(crate) eviction: Option<Eviction>,
}

/// The sending half of an inbox.
#[derive(Debug)]
struct Outbox {
    topic: Topic,
    messages: mpsc::Sender<SubscriptionMessage>,
    forbidden: Arc<Notify>,
}

/// The inboxes of a session's subscriptions, and the used ids.
#[derive(Debug, Default)]
pub(crate) struct Inboxes {
    open: BTreeMap<SubscriptionId, Outbox>,
    /// All ids used in the session: none is used twice.
    used: RangeSet,
}

/// The maximum number of runs (contiguous ranges) of used ids, in addition to one for each possible subscription.
/// Clients count up, but one that reconnects begins with the ids of its remaining subscriptions. Bounds the memory for
/// ids.
const SPARE_RUNS: usize = 1_024;

impl Inbox {
    pub(crate) const CAPACITY: usize = 16;

    /// The next input; an `End` precedes queued messages.
    pub(crate) async fn next(&mut self) -> Input {
        tokio::select! {
            biased;
            () = self.forbidden.notified() => Input::End(EndReason::Forbidden),
            () = evicted(&mut self.eviction) => Input::End(EndReason::TooManySubscriptions),
            message = self.messages.recv() => {
                message.map_or(Input::SessionEnded, Input::Message)
            }
        }
    }
}

async fn evicted(eviction: &mut Option<Eviction>) {
    match eviction {
        Some(eviction) => eviction.evicted().await,
        None => std::future::pending().await,
    }
}

impl Inboxes {
    /// Opens the inbox of a new subscription to `topic`; `None` at `max` open subscriptions.
    ///
    /// # Errors
    /// [`ProtocolViolation`] when the client used the id before, or ids in too many runs, or the id is `u32::MAX`.
    pub(crate) fn open(
        &mut self,
        id: SubscriptionId,
        topic: &Topic,
        max: usize,
    ) -> Result<Option<Inbox>, ProtocolViolation> {
        if id.0 == u32::MAX
            || !self.used.insert(id.0)
            || self.used.ranges().len() > max.saturating_add(SPARE_RUNS)
        {
            return Err(ProtocolViolation::DuplicateSubscription(id));
        }
        if self.open.len() >= max {
            return Ok(None);
        }
        let (sender, receiver) = mpsc::channel(Inbox::CAPACITY);
        let forbidden = Arc::<Notify>::default();
        let outbox = Outbox { topic: topic.clone(), messages: sender, forbidden: Arc::clone(&forbidden) };
        self.open.insert(id, outbox);
        Ok(Some(Inbox { messages: receiver, forbidden, eviction: None }))
    }

    /// Delivers a message to a subscription. Messages to an ended subscription are dropped, because the client
    /// may not know of the end yet.
    ///
    /// # Errors
    /// [`ProtocolViolation`] if the id was never used.
    pub(crate) async fn deliver(
        &self,
        id: SubscriptionId,
        message: SubscriptionMessage,
    ) -> Result<(), ProtocolViolation> {
        self.check_opened(id)?;
        if let Some(inbox) = self.open.get(&id) {
            let _ = inbox.messages.send(message).await; // Fails only if the subscription ends.
        }
        Ok(())
    }

    /// Ends the subscriptions to topics that are no longer permitted, without waiting for them; returns their topics.
    pub(crate) fn forbid(&self, is_permitted: impl Fn(&Topic) -> bool) -> Vec<&Topic> {
        let ended = self.open.values().filter(|outbox| !is_permitted(&outbox.topic));
        ended
            .map(|outbox| {
                outbox.forbidden.notify_one();
                &outbox.topic
            })
            .collect()
    }

    pub(crate) fn is_open(&self, id: SubscriptionId) -> bool {
        self.open.contains_key(&id)
    }

    /// Checks that the client used the id in this session.
    ///
    /// # Errors
    /// [`ProtocolViolation`] if it did not.
    pub(crate) fn check_opened(&self, id: SubscriptionId) -> Result<(), ProtocolViolation> {
        match self.used.contains(id.0) {
            true => Ok(()),
            false => Err(ProtocolViolation::UnknownSubscription(id)),
        }
    }

    /// Closes the inbox of a subscription that ended.
    pub(crate) fn close(&mut self, id: SubscriptionId) {
        self.open.remove(&id);
    }

    /// Closes every inbox: subscriptions end once they have read their messages.
    pub(crate) fn close_all(&mut self) {
        self.open.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn topic(name: &str) -> Topic {
        Topic::new(name).unwrap()
    }

    fn message() -> SubscriptionMessage {
        SubscriptionMessage::Credit(1)
    }

    #[tokio::test]
    async fn messages_reach_only_their_subscription() {
        let mut inboxes = Inboxes::default();
        let mut inbox = inboxes.open(SubscriptionId(1), &topic("a"), 2).unwrap().unwrap();
        inboxes.deliver(SubscriptionId(1), message()).await.unwrap();
        let unknown = SubscriptionId(2);
        let error = inboxes.deliver(unknown, message()).await.unwrap_err();
        assert_eq!(error, ProtocolViolation::UnknownSubscription(unknown));
        inboxes.close(SubscriptionId(1));
        inboxes
            .deliver(SubscriptionId(1), message())
            .await
            .expect("its end may not be known yet");
        assert_eq!(inbox.next().await, Input::Message(message()));
        assert_eq!(inbox.next().await, Input::SessionEnded);
    }

    /// Even if the inbox is full, and without waiting.
    #[tokio::test]
    async fn forbid_precedes_queued_messages() {
        let mut inboxes = Inboxes::default();
        let mut inbox = inboxes.open(SubscriptionId(1), &topic("a"), 1).unwrap().unwrap();
        for _ in 0..Inbox::CAPACITY {
            inboxes.deliver(SubscriptionId(1), message()).await.unwrap();
        }
        assert_eq!(inboxes.forbid(|_| false), [&topic("a")]);
        assert_eq!(inbox.next().await, Input::End(EndReason::Forbidden));
        assert_eq!(inbox.next().await, Input::Message(message()));
    }

    #[tokio::test]
    async fn only_subscriptions_to_forbidden_topics_end() {
        let mut inboxes = Inboxes::default();
        let mut open = |id, name| inboxes.open(SubscriptionId(id), &topic(name), 3).unwrap().unwrap();
        let (mut kept, mut ended, _closed) = (open(1, "a"), open(2, "b"), open(3, "b"));
        inboxes.close(SubscriptionId(3));
        assert_eq!(inboxes.forbid(|name| *name == topic("a")), [&topic("b")], "the third has ended");
        inboxes.deliver(SubscriptionId(1), message()).await.unwrap();
        assert_eq!(kept.next().await, Input::Message(message()));
        assert_eq!(ended.next().await, Input::End(EndReason::Forbidden));
    }

    #[test]
    fn ids_are_used_once_and_subscriptions_are_bounded() {
        let mut inboxes = Inboxes::default();
        let _inbox = inboxes.open(SubscriptionId(1), &topic("a"), 1).unwrap().unwrap();
        assert!(inboxes.open(SubscriptionId(2), &topic("a"), 1).unwrap().is_none());
        for id in [SubscriptionId(1), SubscriptionId(2)] {
            assert_eq!(
                inboxes.open(id, &topic("a"), 9).unwrap_err(),
                ProtocolViolation::DuplicateSubscription(id)
            );
        }
    }

    #[test]
    fn scattered_ids_end_the_session() {
        let mut inboxes = Inboxes::default();
        let mut open = |id| inboxes.open(SubscriptionId(id), &topic("a"), 10);
        assert!((0..100_000).all(|id| open(id).is_ok()), "ids that count up take no memory");
        let mut scattered = (1..).map(|id| 100_000 + 2 * id);
        assert!(scattered.by_ref().take(SPARE_RUNS + 9).all(|id| open(id).is_ok()));
        assert!(scattered.next().is_some_and(|id| open(id).is_err()));
        assert!(open(u32::MAX).is_err());
    }
}
