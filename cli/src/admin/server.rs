//! The admin status of a server, with the field names of `serve --json`.

use super::{
    Subject,
    memory::{self, DeviceMemory},
    metrics::{OF_SERVER, Part},
};
use crate::codecs;
use serde_json::{Map, Value, json};
use tensor_relay_server::{
    LaneStatus, Limit, MemberStatus, ServerStatus, StatusReader, SubscriberStatus, Topic, TopicStatus,
    TransferStatus,
};

/// A server as the subject of an admin port.
#[derive(Debug)]
pub(crate) struct ServerSubject {
    pub(crate) reader: StatusReader,
    /// The topics named on the command line.
    pub(crate) topics: Vec<Topic>,
    pub(crate) device: DeviceMemory,
}

impl Subject for ServerSubject {
    fn readiness(&self) -> Result<(), String> {
        if self.reader.is_draining() {
            return Err("the server is draining".into());
        }
        let missing = self
            .topics
            .iter()
            .find(|topic| !self.reader.offers(std::slice::from_ref(topic)));
        missing.map_or(Ok(()), |topic| Err(format!("topic {topic} has no version on offer")))
    }

    fn status(&self) -> Value {
        let status = self.reader.read();
        status.map_or_else(|| json!({ "role": "server" }), |status| as_object(&status, &self.device))
    }

    fn metrics(&self) -> &'static [Part] {
        OF_SERVER
    }
}

fn as_object(status: &ServerStatus, device: &DeviceMemory) -> Value {
    let stats = &status.stats;
    let memory = [
        ("staged", stats.staged_bytes),
        ("reusable", stats.reusable_bytes),
        ("base", stats.bases.bytes),
        ("encoded", stats.encoder.encoded_bytes),
    ];
    let chunk_times = status.chunk_times.buckets.iter();
    let chunk_times = chunk_times.map(|(bound, count)| json!([(*bound < f64::MAX).then_some(bound), count]));
    json!({
        "role": "server",
        "listen": status.listen,
        "socket": status.socket,
        "uptime_s": status.uptime.as_secs_f64(),
        "draining": status.is_draining,
        "access_problem": status.access_problem,
        "sessions": stats.sessions,
        "transfers": stats.transfers,
        "transfers_limited": transfers_limited(&status.subscribers),
        "published": status.published,
        "committed": stats.committed,
        "evicted": stats.evicted,
        "topics_count": status.topics.len(),
        "topics": status.topics.iter().map(|entry| topic(entry, &status.subscribers)).collect::<Vec<_>>(),
        "subscribers_count": status.subscribers_count,
        "subscribers": status.subscribers.iter().map(subscriber).collect::<Vec<_>>(),
        "lanes_count": status.lanes_count,
        "lanes": status.lanes.iter().map(lane).collect::<Vec<_>>(),
        "transports": transports(status),
        "codecs": codecs::as_object(&stats.codecs, "encode_s"),
        "chunk_times": { "sum_s": status.chunk_times.sum_s, "buckets": chunk_times.collect::<Vec<_>>() },
        "memory": memory::as_object(&memory, device),
        "base_versions": stats.bases.versions,
        "source_reads": stats.encoder.source_reads,
        "failures": status.failures.iter().map(|failure| json!({
            "at": failure.at.name(),
            "reason": failure.reason,
            "count": failure.count,
        })).collect::<Vec<_>>(),
    })
}

fn topic(topic: &TopicStatus, subscribers: &[SubscriberStatus]) -> Value {
    let sent = topic.sent.total();
    let subscribers = subscribers.iter().filter(|subscriber| subscriber.topic == topic.newest.topic);
    json!({
        "topic": topic.newest.topic.as_str(),
        "epoch": topic.newest.epoch.to_string(),
        "version": topic.newest.version.0,
        "tensors": topic.tensors,
        "payload_bytes": topic.payload_bytes,
        "age_s": topic.age.as_secs_f64(),
        "retained": topic.retained,
        "published": topic.published,
        "subscribers": topic.subscribers,
        "lag_versions": subscribers.clone().map(|subscriber| subscriber.lag_versions).max().unwrap_or(0),
        "lag_s": subscribers.map(|subscriber| subscriber.lag).max().unwrap_or_default().as_secs_f64(),
        "publish_problem": topic.publish_problem,
        "sent_payload_bytes": sent.raw_bytes,
        "sent_wire_bytes": sent.wire_bytes,
        "members_count": topic.swarm.members_count,
        "from_peers_bytes": topic.swarm.from_peers_bytes,
        "replicated": topic.swarm.replicated.map(|version| version.0),
        "last_replica_s": topic.swarm.replicated.map(|_| topic.swarm.last_replica.as_secs_f64()),
        "members": topic.swarm.members.iter().map(member).collect::<Vec<_>>(),
    })
}

fn member(member: &MemberStatus) -> Value {
    json!({
        "peer": member.peer.to_string(),
        "site": member.site.as_str(),
        "serves": member.serves,
        "held_chunks": member.held_chunks,
        "selected_chunks": member.selected_chunks,
        "committed": member.has_committed,
        "sources": member.sources.iter().map(ToString::to_string).collect::<Vec<_>>(),
    })
}

fn subscriber(subscriber: &SubscriberStatus) -> Value {
    json!({
        "topic": subscriber.topic.as_str(),
        "peer": subscriber.peer.to_string(),
        "transport": subscriber.transport.name(),
        "mode": if subscriber.is_every { "every" } else { "latest" },
        "since_s": subscriber.since.as_secs_f64(),
        "held": subscriber.held.map(|version| version.0),
        "lag_versions": subscriber.lag_versions,
        "lag_s": subscriber.lag.as_secs_f64(),
        "committed": subscriber.committed,
        "skipped": subscriber.skipped,
        "sent_payload_bytes": subscriber.sent_payload_bytes,
        "sent_wire_bytes": subscriber.sent_wire_bytes,
        "under_way": subscriber.transfer.as_ref().map(transfer),
    })
}

fn transfer(transfer: &TransferStatus) -> Value {
    json!({
        "version": transfer.version.version.0,
        "payload_bytes": transfer.payload_bytes,
        "sent_bytes": transfer.sent_bytes,
        "since_s": transfer.since.as_secs_f64(),
        "limit": transfer.limit.name(),
    })
}

fn lane(lane: &LaneStatus) -> Value {
    let mut entry = super::lane(lane.transport, &lane.stats);
    entry["peer"] = json!(lane.peer.to_string());
    entry
}

/// The number of transfers with each bottleneck.
fn transfers_limited(subscribers: &[SubscriberStatus]) -> Map<String, Value> {
    let transfers = || subscribers.iter().filter_map(|subscriber| subscriber.transfer.as_ref());
    let count = |limit| transfers().filter(|transfer| transfer.limit == limit).count();
    let limits = [Limit::Encoding, Limit::Network, Limit::Receiver];
    limits
        .map(|limit| (limit.name().into(), count(limit).into()))
        .into_iter()
        .collect()
}

fn transports(status: &ServerStatus) -> Map<String, Value> {
    let each = status.traffic.iter().map(|(kind, lanes, traffic)| {
        let counters = json!({
            "lanes": lanes,
            "sent_bytes": traffic.sent_bytes,
            "received_bytes": traffic.received_bytes,
            "sent_packets": traffic.sent_packets,
            "lost_packets": traffic.lost_packets,
        });
        (kind.name().to_owned(), counters)
    });
    each.collect()
}
