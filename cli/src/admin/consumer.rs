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

/// How many topics that are no longer followed keep their numbers. Of more, those go that came longest ago.
const LEFT_MAX: usize = 1_000;

/// The state of a consumer, which its admin port shows. Cheap to clone.
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

/// The topics that are followed, of which there are as many as subscriptions, and at most [`LEFT_MAX`] that were.
type Topics = BTreeMap<Topic, TopicState>;

/// A topic that is or was followed.
#[derive(Debug, Clone, Default)]
struct TopicState {
    /// How many subscriptions follow it.
    followers: usize,
    held: Option<TopicMetrics>,
}

/// The held version of a topic, and what was received for it.
#[derive(Debug, Clone)]
struct TopicMetrics {
    version: u64,
    epoch: String,
    payload_bytes: u64,
    at: Instant,
    took: Duration,
    committed: u64,
    skipped: u64,
    resumed: u64,
    received_payload_bytes: u64,
    received_wire_bytes: u64,
}

impl Consumer {
    /// A consumer without topics. It is ready while every topic that it follows has a version, with `ready_within` one that
    /// came no longer ago.
    pub fn new(ready_within: Option<Duration>) -> Self {
        let began = OnceLock::from(Instant::now());
        Self(Arc::new(Inner { ready_within, began, ..Inner::default() }))
    }

    /// Records that it is connected, with snapshots on `device`. The first client counts.
    pub fn connected(&self, client: StatusReader, device: Option<&Device>) {
        let _ = (self.0.client.set(client), self.0.device.set(DeviceMemory::of(device)));
    }

    /// Records that it follows a topic, until what this gives is dropped.
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
    /// Records that its version `id` is with the user, that `payload_bytes` of it were received, and that `skipped` versions
    /// were passed over for it.
    pub fn committed(&self, id: &VersionId, payload_bytes: u64, skipped: u64, receipt: &Receipt) {
        let mut topics = self.consumer.topics();
        let state = topics.entry(self.topic.clone()).or_default();
        let before = state.held.take();
        let sum = |of: fn(&TopicMetrics) -> u64, more: u64| before.as_ref().map_or(0, of) + more;
        state.held = Some(TopicMetrics {
            version: id.version.0,
            epoch: id.epoch.to_string(),
            payload_bytes,
            at: Instant::now(),
            took: receipt.duration,
            committed: sum(|held| held.committed, 1),
            skipped: sum(|held| held.skipped, skipped),
            resumed: sum(|held| held.resumed, u64::from(receipt.resumed > 0)),
            received_payload_bytes: sum(|held| held.received_payload_bytes, payload_bytes),
            received_wire_bytes: sum(|held| held.received_wire_bytes, receipt.wire_bytes),
        });
    }
}

impl Drop for FollowedTopic {
    fn drop(&mut self) {
        leave(&mut self.consumer.topics(), &self.topic, LEFT_MAX);
    }
}

/// Counts one follower less. What was received stays known, of `left_max` topics that nobody follows.
fn leave(topics: &mut Topics, topic: &Topic, left_max: usize) {
    let Some(state) = topics.get_mut(topic) else { return };
    state.followers -= 1;
    if state.followers == 0 && state.held.is_none() {
        topics.remove(topic);
    }
    let left = topics.iter().filter(|(_, state)| state.followers == 0);
    let ages: Vec<_> = left
        .filter_map(|(topic, state)| Some((state.held.as_ref()?.at, topic)))
        .collect();
    if ages.len() > left_max
        && let Some((_, oldest)) = ages.into_iter().min()
    {
        let oldest = oldest.clone();
        topics.remove(&oldest);
    }
}

/// Whether all followed topics have a version, none too old; where none is followed, all that were.
fn readiness(topics: &Topics, within: Option<Duration>, now: Instant) -> Result<(), String> {
    if topics.is_empty() {
        return Err("no topic is followed yet".into());
    }
    let is_any_followed = topics.values().any(|state| state.followers > 0);
    for (topic, state) in topics.iter().filter(|(_, state)| !is_any_followed || state.followers > 0) {
        let held = state
            .held
            .as_ref()
            .ok_or_else(|| format!("no version of topic {topic} is here yet"))?;
        let age = now.duration_since(held.at);
        if within.is_some_and(|within| age > within) {
            return Err(format!("version {} of topic {topic} came {} s ago", held.version, age.as_secs()));
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
            "events": events::lately(),
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
            Family::gauge("ready", "Whether everything that is followed is here", is_ready),
            Family::gauges("memory", "Memory of versions, by what it is for", memory.collect()).in_bytes(),
        ];
        families.extend(of_topics(&self.topics()));
        families.extend(client.iter().flat_map(of_client));
        families
    }
}

fn topic(name: &Topic, state: &TopicState) -> Value {
    let is_followed = state.followers > 0;
    let Some(held) = &state.held else {
        return json!({ "topic": name.as_str(), "followed": is_followed, "version": null });
    };
    json!({
        "topic": name.as_str(),
        "followed": is_followed,
        "version": held.version,
        "epoch": held.epoch,
        "payload_bytes": held.payload_bytes,
        "age_s": held.at.elapsed().as_secs_f64(),
        "took_s": held.took.as_secs_f64(),
        "committed": held.committed,
        "skipped": held.skipped,
        "resumed": held.resumed,
        "received_payload_bytes": held.received_payload_bytes,
        "received_wire_bytes": held.received_wire_bytes,
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

/// The topics by name, as many as a server labels; what a consumer follows is chosen by its user.
fn of_topics(topics: &Topics) -> Vec<Family> {
    let followed = topics.values().filter(|state| state.followers > 0).count();
    let held = topics.iter().filter_map(|(topic, state)| Some((topic, state.held.as_ref()?)));
    let held: Vec<_> = held.take(super::server_families::LABELLED_MAX).collect();
    let each = |value: fn(&TopicMetrics) -> f64| {
        let label = |topic: &Topic| -> Labels { vec![("topic", topic.to_string())] };
        held.iter().map(|(topic, held)| (label(topic), value(held))).collect::<Vec<_>>()
    };
    vec![
        Family::gauge("followed_topics", "Topics that are followed", followed as f64),
        Family::gauges(
            "held_version",
            "The number of the version that is here",
            each(|held| held.version as f64),
        ),
        Family::gauges(
            "held_age",
            "How long ago that version came",
            each(|held| held.at.elapsed().as_secs_f64()),
        )
        .in_seconds(),
        Family::gauges("transfer", "How long its transfer took", each(|held| held.took.as_secs_f64()))
            .in_seconds(),
        Family::counters("received_versions", "Versions that came", each(|held| held.committed as f64)),
        Family::counters(
            "skipped_versions",
            "Versions passed over for newer ones",
            each(|held| held.skipped as f64),
        ),
        Family::counters(
            "resumed_versions",
            "Versions that were finished after a lost connection",
            each(|held| held.resumed as f64),
        ),
        Family::counters(
            "received_payload",
            "Payload of the versions that came",
            each(|held| held.received_payload_bytes as f64),
        )
        .in_bytes(),
        Family::counters(
            "received_wire",
            "The same as it was encoded",
            each(|held| held.received_wire_bytes as f64),
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
        Family::counter("reconnects", "Lost connections that were made again", client.reconnects as f64),
        Family::gauges("lanes", "Connections that carry chunks", transport(client.lanes.len() as f64)),
        Family::gauges("lane_rtt_max", "The longest round trip of a lane", transport(longest)).in_seconds(),
        Family::counters(
            "transport_lost_packets",
            "Packets of this connection that were lost; what they carried was sent again",
            transport(lost as f64),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(version: u64, at: Instant) -> TopicMetrics {
        TopicMetrics {
            version,
            epoch: "0".into(),
            payload_bytes: 0,
            at,
            took: Duration::ZERO,
            committed: 1,
            skipped: 0,
            resumed: 0,
            received_payload_bytes: 0,
            received_wire_bytes: 0,
        }
    }

    fn state(followers: usize, held: Option<TopicMetrics>) -> TopicState {
        TopicState { followers, held }
    }

    #[test]
    fn a_consumer_is_ready_when_all_is_here() {
        let (name, other, now) = (Topic::new("a").unwrap(), Topic::new("b").unwrap(), Instant::now());
        let mut topics = Topics::new();
        assert!(readiness(&topics, None, now).is_err());
        topics.insert(name.clone(), state(1, Some(held(3, now))));
        assert_eq!(readiness(&topics, None, now), Ok(()));
        topics.insert(other.clone(), state(1, None));
        assert!(readiness(&topics, None, now).unwrap_err().contains("topic b"));
        topics.remove(&other);
        let (within, later) = (Duration::from_secs(5), now + Duration::from_secs(6));
        assert_eq!(readiness(&topics, Some(within), now + within), Ok(()));
        assert!(readiness(&topics, Some(within), later).unwrap_err().contains("version 3"));
        assert_eq!(readiness(&topics, None, later), Ok(()));
        // One that was left counts only where there is no other.
        leave(&mut topics, &name, 1);
        assert!(readiness(&topics, Some(within), later).unwrap_err().contains("version 3"));
        topics.insert(other, state(1, Some(held(1, later))));
        assert_eq!(readiness(&topics, Some(within), later), Ok(()));
    }

    #[test]
    fn topics_that_were_left_keep_their_numbers_until_there_are_too_many() {
        let (now, mut topics) = (Instant::now(), Topics::new());
        for age in 0..5_u64 {
            let topic = Topic::new(&format!("topic-{age}")).unwrap();
            topics.insert(topic.clone(), state(2, Some(held(age, now - Duration::from_secs(age)))));
            leave(&mut topics, &topic, 2);
            leave(&mut topics, &topic, 2);
        }
        let kept: Vec<u64> = topics.values().map(|state| state.held.as_ref().unwrap().version).collect();
        assert_eq!(kept, [0, 1]);
        let unseen = Topic::new("unseen").unwrap();
        topics.insert(unseen.clone(), state(1, None));
        leave(&mut topics, &unseen, 2);
        assert_eq!(topics.len(), 2);
    }
}
