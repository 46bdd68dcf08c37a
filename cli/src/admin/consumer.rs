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
use tensor_relay_client::{ClientStatus, Snapshot, StatusReader, Topic};

/// The state of a consumer. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct Consumer(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// The followed topics, and the state of each. Bounded by the subscriptions.
    topics: Mutex<BTreeMap<Topic, Option<TopicMetrics>>>,
    client: OnceLock<StatusReader>,
    device: OnceLock<DeviceMemory>,
    ready_within: Option<Duration>,
    began: OnceLock<Instant>,
}

/// The held version of a topic, and what was received for it.
#[derive(Debug, Clone)]
pub(crate) struct TopicMetrics {
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
    /// A consumer without topics.
    pub(crate) fn new(ready_within: Option<Duration>) -> Self {
        let began = OnceLock::from(Instant::now());
        Self(Arc::new(Inner { ready_within, began, ..Inner::default() }))
    }

    /// Records that it is connected.
    pub(crate) fn connected(&self, client: StatusReader, device: DeviceMemory) {
        // There is one client in a process.
        let _ = (self.0.client.set(client), self.0.device.set(device));
    }

    /// Records that it follows a topic.
    pub(crate) fn follows(&self, topic: &Topic) {
        self.topics().entry(topic.clone()).or_default();
    }

    /// Records that it no longer follows a topic.
    pub(crate) fn leaves(&self, topic: &Topic) {
        self.topics().remove(topic);
    }

    /// Records a committed version.
    pub(crate) fn committed(&self, snapshot: &Snapshot) {
        let (id, receipt) = (snapshot.id(), snapshot.receipt());
        let mut topics = self.topics();
        let before = topics.get(&id.topic).cloned().flatten();
        let sum = |of: fn(&TopicMetrics) -> u64, more: u64| before.as_ref().map_or(0, of) + more;
        let held = TopicMetrics {
            version: id.version.0,
            epoch: id.epoch.to_string(),
            payload_bytes: snapshot.payload_bytes(),
            at: Instant::now(),
            took: receipt.duration,
            committed: sum(|held| held.committed, 1),
            skipped: sum(|held| held.skipped, snapshot.skipped()),
            resumed: sum(|held| held.resumed, u64::from(receipt.resumed > 0)),
            received_payload_bytes: sum(|held| held.received_payload_bytes, snapshot.payload_bytes()),
            received_wire_bytes: sum(|held| held.received_wire_bytes, receipt.wire_bytes),
        };
        topics.insert(id.topic.clone(), Some(held));
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

    fn topics(&self) -> MutexGuard<'_, BTreeMap<Topic, Option<TopicMetrics>>> {
        self.0.topics.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether all followed topics have a version, none too old.
fn readiness(
    topics: &BTreeMap<Topic, Option<TopicMetrics>>,
    within: Option<Duration>,
    now: Instant,
) -> Result<(), String> {
    if topics.is_empty() {
        return Err("no topic is followed yet".into());
    }
    for (topic, held) in topics {
        let held = held
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
        let topics: Vec<Value> =
            self.topics().iter().map(|(name, held)| topic(name, held.as_ref())).collect();
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

fn topic(name: &Topic, held: Option<&TopicMetrics>) -> Value {
    let Some(held) = held else { return json!({ "topic": name.as_str(), "version": null }) };
    json!({
        "topic": name.as_str(),
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
fn of_topics(topics: &BTreeMap<Topic, Option<TopicMetrics>>) -> Vec<Family> {
    let held = topics.iter().filter_map(|(topic, held)| Some((topic, held.as_ref()?)));
    let held: Vec<_> = held.take(super::server_families::LABELLED_MAX).collect();
    let each = |value: fn(&TopicMetrics) -> f64| {
        let label = |topic: &Topic| -> Labels { vec![("topic", topic.to_string())] };
        held.iter().map(|(topic, held)| (label(topic), value(held))).collect::<Vec<_>>()
    };
    vec![
        Family::gauge("followed_topics", "Topics that are followed", topics.len() as f64),
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

    #[test]
    fn a_consumer_is_ready_when_all_is_here() {
        let (name, other, now) = (Topic::new("a").unwrap(), Topic::new("b").unwrap(), Instant::now());
        let mut topics = BTreeMap::new();
        assert!(readiness(&topics, None, now).is_err());
        topics.insert(name, Some(held(3, now)));
        assert_eq!(readiness(&topics, None, now), Ok(()));
        topics.insert(other.clone(), None);
        assert!(readiness(&topics, None, now).unwrap_err().contains("topic b"));
        topics.remove(&other);
        let (within, later) = (Duration::from_secs(5), now + Duration::from_secs(6));
        assert_eq!(readiness(&topics, Some(within), now + within), Ok(()));
        assert!(readiness(&topics, Some(within), later).unwrap_err().contains("version 3"));
        assert_eq!(readiness(&topics, None, later), Ok(()));
    }
}
