//! The admin status of a consumer.

use super::{
    Subject, events,
    families::{Family, Labels},
    memory::DeviceMemory,
};
use serde_json::{Map, Value, json};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::{Duration, Instant},
};
use tensor_relay_client::{ClientStatus, Receipt, StatusReader, Topic, VersionId};
use tensor_relay_device::Device;

/// The maximum number of topics whose metrics are retained after their last follower left. Beyond it, the topic
/// whose newest version was received longest ago is removed.
const UNFOLLOWED_MAX: usize = 1_000;

/// The state of a consumer that its admin port shows. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Consumer(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    topics: Mutex<Topics>,
    client: OnceLock<StatusReader>,
    device: OnceLock<DeviceMemory>,
    ready_within: Option<Duration>,
    began: OnceLock<Instant>,
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

/// The newest received version of a topic, and counters over all its versions.
#[derive(Debug, Clone)]
struct TopicMetrics {
    version: u64,
    epoch: String,
    payload_bytes: u64,
    received_at: Instant,
    took: Duration,
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
        let began = OnceLock::from(Instant::now());
        Self(Arc::new(Inner { ready_within, began, ..Inner::default() }))
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

    fn client(&self) -> Option<ClientStatus> {
        self.0.client.get().and_then(StatusReader::read)
    }

    fn memory(&self, client: Option<&ClientStatus>) -> Vec<(&'static str, u64)> {
        let memory = client.map(|client| client.memory).unwrap_or_default();
        let mut kinds = vec![
            ("snapshot", memory.snapshot_bytes),
            ("reusable", memory.reusable_bytes),
            ("base", memory.base_bytes),
        ];
        kinds.extend(self.0.device.get().map(DeviceMemory::bytes).unwrap_or_default());
        kinds
    }

    fn topics(&self) -> MutexGuard<'_, Topics> {
        self.0.topics.lock().unwrap_or_else(PoisonError::into_inner)
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
        let previous = state.metrics.take();
        let sum = |counter: fn(&TopicMetrics) -> u64, more: u64| previous.as_ref().map_or(0, counter) + more;
        state.metrics = Some(TopicMetrics {
            version: id.version.0,
            epoch: id.epoch.to_string(),
            payload_bytes,
            received_at: Instant::now(),
            took: receipt.duration,
            committed: sum(|metrics| metrics.committed, 1),
            skipped: sum(|metrics| metrics.skipped, skipped),
            resumed: sum(|metrics| metrics.resumed, u64::from(receipt.resumed > 0)),
            received_payload_bytes: sum(|metrics| metrics.received_payload_bytes, payload_bytes),
            received_wire_bytes: sum(|metrics| metrics.received_wire_bytes, receipt.wire_bytes),
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
        let (readiness, client) = (self.readiness(), self.client());
        let memory = self.memory(client.as_ref()).into_iter();
        let memory: Map<String, Value> =
            memory.map(|(kind, bytes)| (format!("{kind}_bytes"), bytes.into())).collect();
        let topics: Vec<Value> = self.topics().iter().map(|(name, state)| topic(name, state)).collect();
        json!({
            "role": "consumer",
            "version": env!("CARGO_PKG_VERSION"),
            "uptime_s": self.0.began.get().map(|began| began.elapsed().as_secs_f64()),
            "ready": readiness.is_ok(),
            "not_ready": readiness.err(),
            "connected": client.as_ref().is_some_and(|client| client.lost.is_none()),
            "lost": client.as_ref().and_then(|client| client.lost.clone()),
            "reconnects": client.as_ref().map(|client| client.reconnects),
            "topics": topics,
            "lanes": client.as_ref().map_or_else(Vec::new, lanes),
            "memory": memory,
            "events": events::recent(),
        })
    }

    fn families(&self) -> Vec<Family> {
        let client = self.client();
        let memory = self.memory(client.as_ref()).into_iter();
        let memory = memory.map(|(kind, bytes)| (vec![("kind", kind.to_owned())], bytes as f64));
        let build = vec![("version", env!("CARGO_PKG_VERSION").to_owned())];
        let is_ready = f64::from(u8::from(self.readiness().is_ok()));
        let mut families = vec![
            Family::gauges("build_info", "The version of the program", vec![(build, 1.0)]),
            Family::gauge("ready", "Whether every followed topic has a recent enough version", is_ready),
            Family::gauges("memory", "Memory of versions, by use", memory.collect()).in_bytes(),
        ];
        families.extend(by_topic(&self.topics()));
        families.extend(client.iter().flat_map(of_client));
        families
    }
}

fn topic(name: &Topic, state: &TopicState) -> Value {
    let is_followed = state.followers > 0;
    let Some(metrics) = &state.metrics else {
        return json!({ "topic": name.as_str(), "followed": is_followed, "version": null });
    };
    json!({
        "topic": name.as_str(),
        "followed": is_followed,
        "version": metrics.version,
        "epoch": metrics.epoch,
        "payload_bytes": metrics.payload_bytes,
        "age_s": metrics.received_at.elapsed().as_secs_f64(),
        "took_s": metrics.took.as_secs_f64(),
        "committed": metrics.committed,
        "skipped": metrics.skipped,
        "resumed": metrics.resumed,
        "received_payload_bytes": metrics.received_payload_bytes,
        "received_wire_bytes": metrics.received_wire_bytes,
    })
}

fn lanes(client: &ClientStatus) -> Vec<Value> {
    let lane = |lane: &tensor_relay_client::LaneStats| {
        json!({
            "transport": client.transport.name(),
            "rtt_s": lane.rtt.as_secs_f64(),
            "udp_payload_bytes": lane.udp_payload_bytes,
            "sent_bytes": lane.sent_bytes,
            "received_bytes": lane.received_bytes,
            "sent_packets": lane.sent_packets,
            "lost_packets": lane.lost_packets,
        })
    };
    client.lanes.iter().map(lane).collect()
}

/// The families with one sample for each topic, limited to as many topics as a server labels.
fn by_topic(topics: &Topics) -> Vec<Family> {
    let followed = topics.values().filter(|state| state.followers > 0).count();
    let metrics = topics
        .iter()
        .filter_map(|(topic, state)| Some((topic, state.metrics.as_ref()?)));
    let metrics: Vec<_> = metrics.take(super::server_families::LABELLED_MAX).collect();
    let each = |value: fn(&TopicMetrics) -> f64| {
        let label = |topic: &Topic| -> Labels { vec![("topic", topic.to_string())] };
        metrics
            .iter()
            .map(|(topic, metrics)| (label(topic), value(metrics)))
            .collect::<Vec<_>>()
    };
    vec![
        Family::gauge("followed_topics", "Topics that are followed", followed as f64),
        Family::gauges(
            "held_version",
            "The number of the newest received version",
            each(|metrics| metrics.version as f64),
        ),
        Family::gauges(
            "held_age",
            "Time since the newest version was received",
            each(|metrics| metrics.received_at.elapsed().as_secs_f64()),
        )
        .in_seconds(),
        Family::gauges(
            "transfer",
            "Duration of the transfer of the newest version",
            each(|metrics| metrics.took.as_secs_f64()),
        )
        .in_seconds(),
        Family::counters("received_versions", "Versions received", each(|metrics| metrics.committed as f64)),
        Family::counters(
            "skipped_versions",
            "Versions skipped for newer ones",
            each(|metrics| metrics.skipped as f64),
        ),
        Family::counters(
            "resumed_versions",
            "Versions whose transfer was resumed after a lost connection",
            each(|metrics| metrics.resumed as f64),
        ),
        Family::counters(
            "received_payload",
            "Payload of the received versions",
            each(|metrics| metrics.received_payload_bytes as f64),
        )
        .in_bytes(),
        Family::counters(
            "received_wire",
            "Payload of the received versions, as encoded",
            each(|metrics| metrics.received_wire_bytes as f64),
        )
        .in_bytes(),
    ]
}

fn of_client(client: &ClientStatus) -> Vec<Family> {
    let transport = |value: f64| vec![(vec![("transport", client.transport.name().to_owned())], value)];
    let longest = client.lanes.iter().map(|lane| lane.rtt.as_secs_f64()).fold(0.0, f64::max);
    let lost: u64 = client.lanes.iter().map(|lane| lane.lost_packets).sum();
    vec![
        Family::gauge(
            "connected",
            "Whether there is a connection",
            f64::from(u8::from(client.lost.is_none())),
        ),
        Family::counter("reconnects", "Connections re-established after a loss", client.reconnects as f64),
        Family::gauges("lanes", "Connections that carry chunks", transport(client.lanes.len() as f64)),
        Family::gauges("lane_rtt_max", "The longest round-trip time of a lane", transport(longest))
            .in_seconds(),
        Family::counters(
            "transport_lost_packets",
            "Packets of this connection that were lost; their content was retransmitted",
            transport(lost as f64),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metrics(version: u64, received_at: Instant) -> TopicMetrics {
        TopicMetrics {
            version,
            epoch: "0".into(),
            payload_bytes: 0,
            received_at,
            took: Duration::ZERO,
            committed: 1,
            skipped: 0,
            resumed: 0,
            received_payload_bytes: 0,
            received_wire_bytes: 0,
        }
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
