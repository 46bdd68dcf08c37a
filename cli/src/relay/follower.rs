//! [`Following`]: receives the versions of topics, and keeps them.

use super::{
    Cache, RelayArgs,
    cache::{Kept, OriginId},
    claims::{Claim, Claims, Standing},
    described, reader_name,
    status::OriginStatus,
    topics,
};
use crate::{args::ModeArg, serve::print_object};
use serde_json::json;
use std::{collections::BTreeMap, sync::Arc, time::Duration};
use tensor_relay_client::{
    Client, ClientError, EndReason, Epoch, Glob, PathError, ReaderName, RelayId, Request, Snapshot,
    Subscription, SubscriptionError, Topic, TopicEntry, Version,
};
use tensor_relay_device::Lock;
use tensor_relay_server::Relay;

/// The pause before a topic is requested again that its origin refused, or that came in a ring.
const REFUSED_PAUSE: Duration = Duration::from_secs(30);

/// The pause after another failure.
const FAILED_PAUSE: Duration = Duration::from_secs(2);

/// What the topics of all origins have in common.
#[derive(Debug)]
pub(super) struct Following {
    /// The newest versions that are here.
    newest: Lock<BTreeMap<Topic, Kept>>,
    claims: Arc<Claims>,
    relay: Relay,
    cache: Option<Arc<Cache>>,
    /// The origins, by their numbers.
    origins: Vec<Vec<OriginId>>,
    id: RelayId,
    /// The reader, in mode `every`.
    reader: Option<ReaderName>,
    json: bool,
}

/// Why a subscription is over.
enum Over {
    /// The topic is over.
    Topic(topics::Over),
    /// It is to be requested again after a pause.
    Again(Duration, String),
    /// The session ended.
    Disconnected(Arc<ClientError>),
}

impl Following {
    pub(super) fn new(
        restored: Vec<(Topic, Kept)>,
        claims: Arc<Claims>,
        relay: Relay,
        cache: Option<Arc<Cache>>,
        origins: Vec<Vec<OriginId>>,
        (args, id): (&RelayArgs, RelayId),
    ) -> anyhow::Result<Self> {
        let every = args.mode == ModeArg::Every;
        let reader = every.then(|| reader_name(args, id)).transpose()?;
        let newest = Lock::new(restored.into_iter().collect());
        Ok(Self { newest, claims, relay, cache, origins, id, reader, json: args.json })
    }

    /// The topics that are here from the origin with this number and match, and that no origin has at the moment.
    pub(super) fn unclaimed(&self, number: usize, globs: &[Glob]) -> Vec<Topic> {
        let newest = self.newest.lock();
        let matches = |topic: &Topic| globs.iter().any(|glob| glob.matches(topic.as_str()));
        let is_wanted = |(topic, kept): &(&Topic, &Kept)| {
            matches(topic) && self.is_from(kept, number) && !self.claims.has(topic)
        };
        newest.iter().filter(is_wanted).map(|(topic, _)| topic.clone()).collect()
    }

    /// Whether the refusal of the origin with this number ends a topic: not one whose newest version is here from another
    /// origin.
    pub(super) fn may_refuse(&self, topic: &Topic, number: usize) -> bool {
        self.newest.lock().get(topic).is_none_or(|kept| self.is_from(kept, number))
    }

    /// Whether a version came from the origin with this number, or from none that the relay still has.
    fn is_from(&self, kept: &Kept, number: usize) -> bool {
        let is_its = |ids: &Vec<OriginId>| ids.contains(&kept.origin);
        self.origins.get(number).is_some_and(is_its) || !self.origins.iter().any(is_its)
    }

    /// Whether the origin with this number is lost.
    pub(super) fn is_lost(&self, number: usize) -> bool {
        self.claims.is_lost(number)
    }

    /// Records whether the origin with this number is lost.
    pub(super) fn set_lost(&self, number: usize, is_lost: bool) {
        self.claims.set_lost(number, is_lost);
    }

    /// The newest version of a topic that is here.
    pub(super) fn newest(&self, topic: &Topic) -> Option<(Epoch, Version)> {
        self.newest.lock().get(topic).map(|kept| (kept.epoch, kept.version))
    }

    /// Follows a topic of the origin with this number until it is over; returns how.
    ///
    /// # Errors
    /// [`ClientError`] when the session ended.
    pub(super) async fn follow(
        &self,
        client: &Client,
        topic: &Topic,
        number: usize,
        status: &OriginStatus,
    ) -> Result<topics::Over, ClientError> {
        let mut said = String::new();
        loop {
            let (pause, why) = match self.receive_in_turn(client, topic, number).await? {
                Over::Topic(over) => return Ok(over),
                Over::Disconnected(error) => return Err(ClientError::Ended(error)),
                Over::Again(pause, why) => (pause, why),
            };
            if said != why {
                tracing::error!(%topic, origin = %status.name(), "A topic is not relayed at the moment: {why}");
                said = why;
            }
            status.set_problem(topic, Some(&said));
            tokio::time::sleep(pause).await;
            status.set_problem(topic, None);
        }
    }

    /// Receives a topic while it comes from this origin, unless it came through this relay.
    async fn receive_in_turn(
        &self,
        client: &Client,
        topic: &Topic,
        number: usize,
    ) -> Result<Over, ClientError> {
        let mut held = None;
        loop {
            let standing = match self.look(client, topic, number).await? {
                Ok(standing) => standing,
                Err(over) => return Ok(over),
            };
            let claim = held.get_or_insert_with(|| self.claims.claim(topic, number));
            claim.set_standing(standing);
            if claim.is_first() {
                match self.receive(client, topic, claim, number).await? {
                    Some(over) => return Ok(over),
                    None => tracing::info!(%topic, "The topic comes from another origin now."),
                }
            }
            claim.wait(true).await; // What the origin has may be another version then.
        }
    }

    /// Looks at what the origin with this number has of a topic.
    async fn look(
        &self,
        client: &Client,
        topic: &Topic,
        number: usize,
    ) -> Result<Result<Standing, Over>, ClientError> {
        let listed = match client.list().await {
            Ok(listed) => listed,
            Err(error) if client.has_ended() => return Err(error),
            Err(error) => return Ok(Err(Over::Again(FAILED_PAUSE, error.to_string()))),
        };
        let entry = listed.iter().find(|entry| entry.id.topic == *topic);
        Ok(match entry.map(|entry| self.check_path(entry)) {
            Some(Err(reason)) => Err(Over::Again(REFUSED_PAUSE, reason.to_string())),
            Some(Ok(())) | None => Ok(self.standing(topic, number, entry)),
        })
    }

    /// Subscribes to a topic, and receives its versions; returns `None` when it comes from another origin. What is whole
    /// by then is kept before.
    async fn receive(
        &self,
        client: &Client,
        topic: &Topic,
        claim: &Claim,
        number: usize,
    ) -> Result<Option<Over>, ClientError> {
        let mut request = match &self.reader {
            Some(reader) => Request::every(topic.clone()).reader(reader.clone()),
            None => Request::latest(topic.clone()),
        };
        if let Some(Kept { epoch, version, digest, .. }) = self.newest.lock().get(topic).copied() {
            request = request.having(epoch, version, digest);
        }
        let mut subscription = client.subscribe_to(request).await?;
        loop {
            let next = tokio::select! {
                biased;
                next = subscription.next() => next,
                () = claim.wait(false) => return Ok(None),
            };
            match next {
                Ok(snapshot) => self.handle_received(&subscription, snapshot, number).await,
                Err(SubscriptionError::Gap(gap)) => {
                    tracing::warn!(%topic, "{gap}. Readers of this relay are told.");
                }
                Err(error) if error.is_final() => {
                    return Ok(Some(self.handle_over(topic, error, number).await));
                }
                Err(error) => tracing::warn!(%topic, %error, "A version is not relayed."),
            }
        }
    }

    /// Whether the listed version may be relayed. With cached versions, nothing else would tell that relays form a ring:
    /// each has what the other one has.
    fn check_path(&self, entry: &TopicEntry) -> Result<(), PathError> {
        entry.relays.through(self.id).map(drop)
    }

    /// What the origin with this number has of a topic, of which it lists `entry`.
    fn standing(&self, topic: &Topic, number: usize, entry: Option<&TopicEntry>) -> Standing {
        let newest = self.newest.lock().get(topic).copied();
        let other = newest.filter(|kept| !self.is_from(kept, number));
        let listed = entry.map(|entry| (entry.id.epoch, entry.id.version));
        Standing::of(listed, other.map(|kept| (kept.epoch, kept.version)))
    }

    /// Handles what the origin with this number lists.
    pub(super) fn handle_listed(&self, number: usize, entries: &[TopicEntry]) {
        let by_topic: BTreeMap<&Topic, &TopicEntry> =
            entries.iter().map(|entry| (&entry.id.topic, entry)).collect();
        for topic in self.claims.of(number) {
            let standing = self.standing(&topic, number, by_topic.get(&topic).copied());
            self.claims.set_standing(&topic, number, standing);
        }
    }

    /// Whether topics of the origin with this number wait until it lists them, or a later version.
    pub(super) fn is_waiting(&self, number: usize) -> bool {
        self.claims.is_waiting(number)
    }

    /// Waits until a version is on offer, and keeps it. In mode `every`, the next call for a version acknowledges it.
    async fn handle_received(&self, subscription: &Subscription, snapshot: Snapshot, number: usize) {
        let topic = subscription.topic();
        let (id, receipt) = (snapshot.id().clone(), snapshot.receipt());
        let digest = snapshot.load_report().digest();
        let origin = self.origins[number][0];
        let kept = Kept { epoch: id.epoch, version: id.version, digest, origin };
        self.newest.lock().insert(topic.clone(), kept); // Before all waits: another origin may take over meanwhile.
        self.relay.offered(topic).await;
        match self.json {
            true => print_object(json!({
                "event": "relayed",
                "topic": topic.as_str(),
                "epoch": id.epoch.to_string(),
                "version": id.version.0,
                "payload_bytes": snapshot.payload_bytes(),
                "wire_bytes": receipt.wire_bytes,
                "seconds": receipt.duration.as_secs_f64(),
                "relays": snapshot.relays().relays().len(),
            })),
            false => {
                crate::log::message!("{}", described(&id, snapshot.payload_bytes(), receipt.duration));
            }
        }
        let Some(cache) = self.cache.clone() else { return };
        match tokio::task::spawn_blocking(move || cache.store(&snapshot, origin)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::error!(version = %id, "A version is not kept on disk, only in memory: {error}.");
            }
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
    }

    async fn handle_over(&self, topic: &Topic, error: SubscriptionError, number: usize) -> Over {
        match error {
            SubscriptionError::Ended { reason: EndReason::TopicEnded, .. } => {
                Over::Topic(topics::Over::Ended)
            }
            SubscriptionError::Ended { reason: EndReason::Withdrawn | EndReason::Expired, .. } => {
                self.forget(topic).await;
                Over::Topic(topics::Over::Gone)
            }
            SubscriptionError::Ended { reason: EndReason::Forbidden, .. } => {
                if self.may_refuse(topic, number) {
                    self.end(topic, EndReason::Forbidden).await;
                }
                Over::Again(REFUSED_PAUSE, error.to_string())
            }
            SubscriptionError::NotRelayed { .. } => Over::Again(REFUSED_PAUSE, error.to_string()),
            SubscriptionError::Disconnected { source, .. } => Over::Disconnected(source),
            error => Over::Again(FAILED_PAUSE, error.to_string()),
        }
    }

    /// Ends a topic that may not be relayed any longer.
    pub(super) async fn end(&self, topic: &Topic, reason: EndReason) {
        self.relay.end(topic, reason);
        self.forget(topic).await;
    }

    /// Deletes what is kept of a topic. It is deleted when this returns, so that a topic that comes back is not.
    async fn forget(&self, topic: &Topic) {
        self.newest.lock().remove(topic);
        if let Some(cache) = self.cache.clone() {
            let topic = topic.clone();
            let removed = tokio::task::spawn_blocking(move || cache.remove(&topic)).await;
            if let Err(error) = removed {
                std::panic::resume_unwind(error.into_panic());
            }
        }
    }
}
