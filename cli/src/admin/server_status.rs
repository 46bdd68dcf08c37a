//! The status of a server as JSON, with the field names of `serve --json`.

use crate::codecs;
use serde_json::{Map, Value, json};
use tensor_relay_server::{LaneStatus, ServerStatus, SubscriberStatus, TopicStatus, TransferStatus};

/// The status as a JSON object, without readiness and events, which the caller adds.
pub(super) fn as_object(status: &ServerStatus, memory: &[(&'static str, u64)]) -> Value {
    let stats = &status.stats;
    let memory: Map<String, Value> = memory
        .iter()
        .map(|(kind, bytes)| (format!("{kind}_bytes"), (*bytes).into()))
        .collect();
    json!({
        "role": "server",
        "version": env!("CARGO_PKG_VERSION"),
        "listen": status.listen,
        "uptime_s": status.uptime.as_secs_f64(),
        "draining": status.is_draining,
        "access_problem": status.access_problem,
        "sessions": stats.sessions,
        "transfers": stats.transfers,
        "published": status.published,
        "committed": stats.committed,
        "evicted": stats.evicted,
        "topics": status.topics.iter().map(topic).collect::<Vec<_>>(),
        "subscribers_count": status.subscribers_count,
        "subscribers": status.subscribers.iter().map(subscriber).collect::<Vec<_>>(),
        "lanes_count": status.lanes_count,
        "lanes": status.lanes.iter().map(lane).collect::<Vec<_>>(),
        "transports": transports(status),
        "codecs": codecs::as_object(&stats.codecs, "encode_s"),
        "memory": memory,
        "failures": status.failures.iter().map(|failure| json!({
            "at": failure.at.name(),
            "reason": failure.reason,
            "count": failure.count,
        })).collect::<Vec<_>>(),
    })
}

fn topic(topic: &TopicStatus) -> Value {
    let sent = topic.sent.total();
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
        "publish_problem": topic.publish_problem,
        "sent_payload_bytes": sent.raw_bytes,
        "sent_wire_bytes": sent.wire_bytes,
    })
}

fn subscriber(subscriber: &SubscriberStatus) -> Value {
    json!({
        "topic": subscriber.topic.as_str(),
        "peer": subscriber.peer,
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
    json!({
        "peer": lane.peer,
        "transport": lane.transport.name(),
        "rtt_s": lane.stats.rtt.as_secs_f64(),
        "udp_payload_bytes": lane.stats.udp_payload_bytes,
        "sent_bytes": lane.stats.sent_bytes,
        "received_bytes": lane.stats.received_bytes,
        "sent_packets": lane.stats.sent_packets,
        "lost_packets": lane.stats.lost_packets,
    })
}

fn transports(status: &ServerStatus) -> Value {
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
    Value::Object(each.collect())
}
