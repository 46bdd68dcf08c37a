//! The admin status of a consumer.

use super::{
    Subject, lane,
    memory::{self, DeviceMemory},
    metrics::{OF_CONSUMER, Part},
};
use serde::{Serialize, Serializer};
use serde_json::{Map, Value, json};
use std::{
    collections::BTreeMap,
    sync::{Arc, MutexGuard, OnceLock},
    time::{Duration, Instant},
};
use tensor_relay_client::{ClientStatus, PeerReport, Receipt, StatusReader, Topic, VersionId};
use tensor_relay_device::{Device, Lock};

/// The maximum number of topics whose metrics are retained after their last follower left. Beyond it, the topic
/// whose newest version was received longest ago is removed.
const UNFOLLOWED_MAX: usize = 1_000;

/// The state of a consumer that its admin port shows. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Consumer(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    topics: Lock<Topics>,
    client: OnceLock<StatusReader>,
    device: OnceLock<DeviceMemory>,
    ready_within: Option<Duration>,
    began: Instant,
}

/// The followed topics, bounded by the number of subscriptions, and at most [`UNFOLLOWED_MAX`] formerly followed ones.
type Topics = BTreeMap<Topic, TopicState>;

/// A topic that is or was followed.
#[derive(Debug, Clone, Default)]
struct TopicState {
    /// The number of subscriptions to this topic.
    followers: usize,
    metrics: Option<TopicMetrics>,
}

/// The newest received version of a topic.
#[derive(Debug, Clone, Serialize)]
struct TopicMetrics {
    version: u64,
    epoch: String,
    payload_bytes: u64,
    #[serde(rename = "age_s", serialize_with = "age_s")]
    received_at: Instant,
    took_s: f64,
    #[serde(flatten)]
    totals: TopicTotals,
}

/// Counters over all versions of a topic.
#[derive(Debug, Clone, Default, Serialize)]
struct TopicTotals {
    committed: u64,
    skipped: u64,
    resumed: u64,
    received_payload_bytes: u64,
    received_wire_bytes: u64,
}

impl Consumer {
    /// A consumer without topics, which is not ready. With topics, it is ready while every followed topic has a
    /// version; with `ready_within`, while the newest version of each was received within that time.
    pub fn new(ready_within: Option<Duration>) -> Self {
        Self(Arc::new(Inner {
            topics: Lock::default(),
            client: OnceLock::new(),
            device: OnceLock::new(),
            ready_within,
            began: Instant::now(),
        }))
    }

    /// Records that a client is connected, with snapshots on `device`. Only the first call has an effect.
    pub fn connected(&self, client: StatusReader, device: Option<&Device>) {
        let _ = (self.0.client.set(client), self.0.device.set(DeviceMemory::of(device)));
    }

    /// Records that a topic is followed, until the returned value is dropped.
    pub fn follow(&self, topic: &Topic) -> FollowedTopic {
        self.topics().entry(topic.clone()).or_default().followers += 1;
        FollowedTopic { consumer: self.clone(), topic: topic.clone() }
    }

    fn topics(&self) -> MutexGuard<'_, Topics> {
        self.0.topics.lock()
    }
}

/// A topic that a [`Consumer`] follows.
#[derive(Debug)]
pub struct FollowedTopic {
    consumer: Consumer,
    topic: Topic,
}

impl FollowedTopic {
    /// Records that version `id` was delivered to the user, that `payload_bytes` were received for it, and that
    /// `skipped` versions before it were skipped.
    pub fn committed(&self, id: &VersionId, payload_bytes: u64, skipped: u64, receipt: &Receipt) {
        let mut topics = self.consumer.topics();
        let state = topics.entry(self.topic.clone()).or_default();
        let mut totals = state.metrics.take().map(|metrics| metrics.totals).unwrap_or_default();
        totals.committed += 1;
        totals.skipped += skipped;
        totals.resumed += u64::from(receipt.resumed > 0);
        totals.received_payload_bytes += payload_bytes;
        totals.received_wire_bytes += receipt.wire_bytes;
        state.metrics = Some(TopicMetrics {
            version: id.version.0,
            epoch: id.epoch.to_string(),
            payload_bytes,
            received_at: Instant::now(),
            took_s: receipt.duration.as_secs_f64(),
            totals,
        });
    }
}

impl Drop for FollowedTopic {
    fn drop(&mut self) {
        remove_follower(&mut self.consumer.topics(), &self.topic, UNFOLLOWED_MAX);
    }
}

/// Removes one follower of `topic`. Retains the metrics of up to `unfollowed_max` topics without followers.
fn remove_follower(topics: &mut Topics, topic: &Topic, unfollowed_max: usize) {
    let Some(state) = topics.get_mut(topic) else { return };
    state.followers -= 1;
    if state.followers == 0 && state.metrics.is_none() {
        topics.remove(topic);
    }
    let unfollowed = topics.iter().filter(|(_, state)| state.followers == 0);
    let by_age: Vec<_> = unfollowed
        .filter_map(|(topic, state)| Some((state.metrics.as_ref()?.received_at, topic)))
        .collect();
    if by_age.len() > unfollowed_max
        && let Some((_, oldest)) = by_age.into_iter().min()
    {
        let oldest = oldest.clone();
        topics.remove(&oldest);
    }
}

/// Checks that every followed topic has a version, and that it was received `within` this time. If no topic is
/// followed, checks the formerly followed ones.
fn readiness(topics: &Topics, within: Option<Duration>, now: Instant) -> Result<(), String> {
    if topics.is_empty() {
        return Err("no topic is followed yet".into());
    }
    let is_any_followed = topics.values().any(|state| state.followers > 0);
    for (topic, state) in topics.iter().filter(|(_, state)| !is_any_followed || state.followers > 0) {
        let metrics = state
            .metrics
            .as_ref()
            .ok_or_else(|| format!("no version of topic {topic} was received yet"))?;
        let age = now.duration_since(metrics.received_at);
        if within.is_some_and(|within| age > within) {
            return Err(format!(
                "version {} of topic {topic} was received {} s ago",
                metrics.version,
                age.as_secs()
            ));
        }
    }
    Ok(())
}

impl Subject for Consumer {
    fn readiness(&self) -> Result<(), String> {
        readiness(&self.topics(), self.0.ready_within, Instant::now())
    }

    fn status(&self) -> Value {
        let client = self.0.client.get().and_then(StatusReader::read);
        let topics = self.topics();
        json!({
            "role": "consumer",
            "uptime_s": self.0.began.elapsed().as_secs_f64(),
            "connected": client.as_ref().is_some_and(|client| client.lost.is_none()),
            "lost": client.as_ref().and_then(|client| client.lost.clone()),
            "reconnects": client.as_ref().map(|client| client.reconnects),
            "followed_count": topics.values().filter(|state| state.followers > 0).count(),
            "topics": topics.iter().map(|(name, state)| topic(name, state)).collect::<Vec<_>>(),
            "lanes": client.as_ref().map_or_else(Vec::new, lanes),
            "peers": client.as_ref().map_or_else(Vec::new, peers),
            "memory": memory(client.as_ref(), &self.0.device.get().cloned().unwrap_or_default()),
        })
    }

    fn metrics(&self) -> &'static [Part] {
        OF_CONSUMER
    }
}

fn topic(name: &Topic, state: &TopicState) -> Value {
    let mut entry = state
        .metrics
        .as_ref()
        .map_or_else(|| json!({ "version": null }), |metrics| json!(metrics));
    entry["topic"] = name.as_str().into();
    entry["followed"] = (state.followers > 0).into();
    entry
}

fn age_s<S: Serializer>(received_at: &Instant, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(received_at.elapsed().as_secs_f64())
}

fn lanes(client: &ClientStatus) -> Vec<Value> {
    client.lanes.iter().map(|stats| lane(client.transport, stats)).collect()
}

/// What became of the other subscribers that the server named.
fn peers(client: &ClientStatus) -> Vec<Value> {
    let peer = |PeerReport { key, addresses, state }: &PeerReport| {
        let addresses: Vec<_> = addresses.iter().map(|it| it.address.to_string()).collect();
        json!({ "key": key.to_string(), "addresses": addresses, "state": state.to_string() })
    };
    client.peers.iter().map(peer).collect()
}

fn memory(client: Option<&ClientStatus>, device: &DeviceMemory) -> Map<String, Value> {
    let memory = client.map(|client| client.memory).unwrap_or_default();
    let host = [
        ("snapshot", memory.snapshot_bytes),
        ("reusable", memory.reusable_bytes),
        ("base", memory.base_bytes),
    ];
    memory::as_object(&host, device)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metrics(version: u64, received_at: Instant) -> TopicMetrics {
        let totals = TopicTotals { committed: 1, ..TopicTotals::default() };
        TopicMetrics { version, epoch: "0".into(), payload_bytes: 0, received_at, took_s: 0.0, totals }
    }

    fn state(followers: usize, metrics: Option<TopicMetrics>) -> TopicState {
        TopicState { followers, metrics }
    }

    #[test]
    fn a_consumer_is_ready_when_every_followed_topic_has_a_recent_version() {
        let (name, other, now) = (Topic::new("a").unwrap(), Topic::new("b").unwrap(), Instant::now());
        let mut topics = Topics::new();
        assert!(readiness(&topics, None, now).is_err());
        topics.insert(name.clone(), state(1, Some(metrics(3, now))));
        assert_eq!(readiness(&topics, None, now), Ok(()));
        topics.insert(other.clone(), state(1, None));
        assert!(readiness(&topics, None, now).unwrap_err().contains("topic b"));
        topics.remove(&other);
        let (within, later) = (Duration::from_secs(5), now + Duration::from_secs(6));
        assert_eq!(readiness(&topics, Some(within), now + within), Ok(()));
        assert!(readiness(&topics, Some(within), later).unwrap_err().contains("version 3"));
        assert_eq!(readiness(&topics, None, later), Ok(()));
        // A formerly followed topic counts only if no topic is followed.
        remove_follower(&mut topics, &name, 1);
        assert!(readiness(&topics, Some(within), later).unwrap_err().contains("version 3"));
        topics.insert(other, state(1, Some(metrics(1, later))));
        assert_eq!(readiness(&topics, Some(within), later), Ok(()));
    }

    #[test]
    fn metrics_of_formerly_followed_topics_are_bounded() {
        let (now, mut topics) = (Instant::now(), Topics::new());
        for age in 0..5_u64 {
            let topic = Topic::new(&format!("topic-{age}")).unwrap();
            topics.insert(topic.clone(), state(2, Some(metrics(age, now - Duration::from_secs(age)))));
            remove_follower(&mut topics, &topic, 2);
            remove_follower(&mut topics, &topic, 2);
        }
        let versions: Vec<u64> =
            topics.values().map(|state| state.metrics.as_ref().unwrap().version).collect();
        assert_eq!(versions, [0, 1]);
        let unseen = Topic::new("unseen").unwrap();
        topics.insert(unseen.clone(), state(1, None));
        remove_follower(&mut topics, &unseen, 2);
        assert_eq!(topics.len(), 2);
    }
}
