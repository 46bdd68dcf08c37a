//! The metrics: a table of what Prometheus reads in the status that `/status` shows.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// The prefix of every name.
const PREFIX: &str = "tensor_relay_";

/// The maximum number of series of one metric, for topics those of the first by name. All further rows share one, with
/// the label `other`, so that publishers cannot create series without bound in Prometheus.
const SERIES_MAX: usize = 100;

const OTHER: &str = "other";

/// A part of the status, and its metrics.
pub(crate) struct Part {
    /// The JSON pointer of the part. A status without it has none of these metrics.
    at: &'static str,
    rows: Rows,
    metrics: &'static [Metric],
}

/// The rows of a part. Rows with the same labels are merged into one sample.
enum Rows {
    /// The elements of an array, or the part itself, with these fields as labels.
    Fields(&'static [&'static str]),
    /// The values of an object, with their keys as this label.
    Keys(&'static str),
    /// The value of this key of an object, with the key as this label: packets of QUIC alone, because the operating
    /// system makes those of TCP.
    Key(&'static str, &'static str),
}

impl Part {
    const fn at(at: &'static str, rows: Rows) -> Self {
        Self { at, rows, metrics: &[] }
    }

    const fn has(self, metrics: &'static [Metric]) -> Self {
        Self { metrics, ..self }
    }
}

/// The kind, the name, the field of a row (`""` is the row itself), and the help text. The unit is the name's ending.
type Metric = (Kind, &'static str, &'static str, &'static str);

/// What a metric is, and how its samples are merged.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A value that never decreases. Merged by the sum, like the next four.
    Counter,
    Gauge,
    /// 1 for true and for a text, 0 for false and null.
    Whether,
    /// The number of rows.
    Count,
    /// A gauge that has no meaning for several rows: the series `other` has no sample.
    Single,
    /// A gauge, merged by the maximum.
    Highest,
    /// A gauge, merged by the minimum. 0 means unknown.
    Lowest,
    /// An array of pairs of an upper bound, null for the last, and the count of this bucket; its sum is in `sum_s`.
    Histogram,
}

use Kind::{Count, Counter, Gauge, Highest, Histogram, Lowest, Single, Whether};
use Rows::{Fields, Key, Keys};

/// The metrics of a server. No label contains the address of a client, because the number of addresses is unbounded.
pub(super) const OF_SERVER: &[Part] = &[
    Part::at("", Fields(&[])).has(&[
        (Gauge, "uptime_seconds", "uptime_s", "Time since the server started"),
        (Whether, "draining", "draining", "Whether the server is draining"),
        (Gauge, "topics", "topics_count", "Topics that have a version"),
        (Gauge, "sessions", "sessions", "Connected clients"),
        (Gauge, "subscribers", "subscribers_count", "Open subscriptions"),
        (Gauge, "transfers", "transfers", "Versions being sent, each to one subscription"),
        (Counter, "published_versions", "published", "Versions published"),
        (Counter, "committed_versions", "committed", "Versions committed, for each subscriber"),
        (Counter, "evictions", "evicted", "Subscriptions evicted because they did not keep up"),
        (Gauge, "base_versions", "base_versions", "Versions retained as bases of deltas"),
        (Counter, "source_reads", "source_reads", "Chunks read from a GPU"),
        (Histogram, "chunk_seconds", "chunk_times", "Time of a chunk, from its read to its last write"),
    ]),
    VERSION,
    MEMORY,
    Part::at("/origins", Fields(&["origin"])).has(&[
        (Whether, "origin_connected", "connected", "Whether an origin of the relay is connected"),
        (Highest, "origin_lost_seconds", "lost_s", "Time since an origin was lost, or 0"),
        (Gauge, "origin_topics", "topics_count", "Topics that are relayed from an origin"),
        (Gauge, "origin_problems", "problems_count", "Topics of an origin that cannot be relayed"),
    ]),
    Part::at("/cache", Fields(&[])).has(&[
        (Gauge, "cache_bytes", "bytes", "The size of the relay's cache on disk"),
        (Whether, "cache_problem", "problem", "Whether the last version could not be kept on disk"),
    ]),
    Part::at("/transfers_limited", Keys("limit")).has(&[(
        Gauge,
        "transfers_limited",
        "",
        "Transfers of the first 256 subscriptions, by bottleneck",
    )]),
    Part::at("/topics", Fields(&["topic"])).has(&[
        (Single, "topic_version", "version", "The number of the newest version"),
        (Gauge, "topic_payload_bytes", "payload_bytes", "The size of the newest version"),
        (Highest, "topic_age_seconds", "age_s", "Time since the newest version was published"),
        (Gauge, "topic_retained_versions", "retained", "Retained versions"),
        (Counter, "topic_published_versions", "published", "Versions published in a topic"),
        (Gauge, "topic_subscribers", "subscribers", "Subscriptions of a topic"),
        (Whether, "topic_publish_problem", "publish_problem", "Whether newer content is unpublished"),
        (Highest, "topic_lag_versions", "lag_versions", "Lag of the slowest subscriber in versions"),
        (Highest, "topic_lag_seconds", "lag_s", "Age of what the slowest subscriber lacks"),
        (Counter, "topic_sent_payload_bytes", "sent_payload_bytes", "Payload sent to all subscribers"),
        (Counter, "topic_sent_wire_bytes", "sent_wire_bytes", "The same payload, as encoded"),
        (Gauge, "topic_members", "members_count", "Subscriptions that share the newest version"),
        (Counter, "topic_from_peers_bytes", "from_peers_bytes", "Payload that members had from peers"),
        (Highest, "topic_last_replica_seconds", "last_replica_s", "Time until every member had a version"),
    ]),
    Part::at("/codecs", Keys("codec")).has(&[
        (Counter, "sent_chunks", "chunks", "Chunks sent, by codec"),
        (Counter, "sent_payload_bytes", "payload_bytes", "Payload sent, by codec"),
        (Counter, "sent_wire_bytes", "wire_bytes", "Payload sent, as encoded, by codec"),
        (Counter, "encode_seconds", "encode_s", "Time spent encoding, summed over all threads"),
    ]),
    LANES,
    Part::at("/transports", Keys("transport")).has(&[
        (Gauge, "lanes", "lanes", "Connections that carry chunks, by transport"),
        (Counter, "transport_sent_bytes", "sent_bytes", "Bytes sent on lanes, retransmissions included"),
        (Counter, "transport_received_bytes", "received_bytes", "Bytes received on lanes"),
    ]),
    Part::at("/transports", Key("transport", "quic")).has(&[
        (Counter, "transport_sent_packets", "sent_packets", "Packets sent"),
        (Counter, "transport_lost_packets", "lost_packets", "Packets lost, and retransmitted"),
    ]),
    Part::at("/failures", Fields(&["at", "reason"])).has(&[(
        Counter,
        "failures",
        "count",
        "Failures, by place and reason",
    )]),
];

/// The metrics of a consumer.
pub(super) const OF_CONSUMER: &[Part] = &[
    Part::at("", Fields(&[])).has(&[
        (Whether, "ready", "ready", "Whether every followed topic has a recent enough version"),
        (Whether, "connected", "connected", "Whether there is a connection"),
        (Gauge, "followed_topics", "followed_count", "Topics that are followed"),
        (Counter, "reconnects", "reconnects", "Connections re-established after a loss"),
    ]),
    VERSION,
    MEMORY,
    Part::at("/topics", Fields(&["topic"])).has(&[
        (Single, "held_version", "version", "The number of the newest received version"),
        (Highest, "held_age_seconds", "age_s", "Time since the newest version was received"),
        (Highest, "transfer_seconds", "took_s", "Duration of the transfer of the newest version"),
        (Counter, "received_versions", "committed", "Versions received"),
        (Counter, "skipped_versions", "skipped", "Versions skipped for newer ones"),
        (Counter, "resumed_versions", "resumed", "Versions resumed after a lost connection"),
        (Counter, "received_payload_bytes", "received_payload_bytes", "Payload of the received versions"),
        (Counter, "received_wire_bytes", "received_wire_bytes", "The same payload, as encoded"),
    ]),
    LANES,
    Part::at("/lanes", Fields(&["transport"])).has(&[
        (Count, "lanes", "", "Connections that carry chunks"),
        (Counter, "transport_lost_packets", "lost_packets", "Packets lost, of this connection"),
    ]),
];

const VERSION: Part =
    Part::at("", Fields(&["version"])).has(&[(Count, "build_info", "", "The version of the program")]);

const MEMORY: Part =
    Part::at("/memory", Keys("kind")).has(&[(Gauge, "memory_bytes", "", "Memory of versions, by use")]);

const LANES: Part = Part::at("/lanes", Fields(&["transport"])).has(&[
    (Highest, "lane_rtt_max_seconds", "rtt_s", "The longest round-trip time of a lane"),
    (Lowest, "lane_packet_min_bytes", "udp_payload_bytes", "The smallest packet of a lane over QUIC"),
]);

/// The metrics of `status`, in Prometheus' text format 0.0.4.
pub(super) fn encode(status: &Value, parts: &[Part]) -> String {
    let mut text = String::new();
    for part in parts {
        let rows = status
            .pointer(part.at)
            .map_or_else(Vec::new, |content| rows(content, &part.rows));
        part.metrics.iter().for_each(|metric| write(&mut text, metric, &rows));
    }
    text
}

/// One row of a part.
struct Row<'s> {
    labels: String,
    is_other: bool,
    content: &'s Value,
}

/// The rows of `part`, with their labels as they are written.
fn rows<'s>(part: &'s Value, rows: &Rows) -> Vec<Row<'s>> {
    let fields = |row: &'s Value, names: &[&str]| -> Vec<&'s str> {
        names.iter().map(|name| row[*name].as_str().unwrap_or_default()).collect()
    };
    let (names, labelled): (&[&str], Vec<(Vec<&str>, &'s Value)>) = match (rows, part) {
        (Fields(names), Value::Array(all)) => {
            (names, all.iter().map(|row| (fields(row, names), row)).collect())
        }
        (Fields(names), one) => (names, vec![(fields(one, names), one)]),
        (Keys(name), keyed) => {
            let keyed = keyed.as_object().into_iter().flatten();
            let labelled = keyed.map(|(key, row)| (vec![key.trim_end_matches("_bytes")], row));
            (std::slice::from_ref(name), labelled.collect())
        }
        (Key(name, key), keyed) => {
            (std::slice::from_ref(name), keyed.get(key).map(|row| (vec![*key], row)).into_iter().collect())
        }
    };
    let mut seen = BTreeSet::new();
    let row = |(values, content): (Vec<&'s str>, _)| {
        let is_other = !seen.contains(&values) && seen.len() == SERIES_MAX;
        let shown = names.iter().zip(&values);
        let shown = shown.map(|(name, value)| format!("{name}={:?}", if is_other { OTHER } else { value }));
        let labels = shown.collect::<Vec<_>>().join(",");
        if !is_other {
            seen.insert(values);
        }
        Row { labels, is_other, content }
    };
    labelled.into_iter().map(row).collect()
}

/// Writes a metric with its metadata; nothing if it has no sample.
fn write(text: &mut String, (kind, name, field, help): &Metric, rows: &[Row<'_>]) {
    let mut samples = String::new();
    let suffix = if *kind == Counter { "_total" } else { "" };
    match kind {
        Histogram => rows.iter().for_each(|row| histogram(&mut samples, name, &row.content[*field])),
        _ => {
            for (labels, value) in merged(*kind, field, rows) {
                let labels = if labels.is_empty() { String::new() } else { format!("{{{labels}}}") };
                samples += &format!("{PREFIX}{name}{suffix}{labels} {value:?}\n");
            }
        }
    }
    if samples.is_empty() {
        return;
    }
    let shown = match kind {
        Counter => "counter",
        Histogram => "histogram",
        _ => "gauge",
    };
    *text += &format!("# HELP {PREFIX}{name}{suffix} {help}\n# TYPE {PREFIX}{name}{suffix} {shown}\n");
    *text += &samples;
}

/// The samples of a metric, by their labels.
fn merged<'r>(kind: Kind, field: &str, rows: &'r [Row<'_>]) -> BTreeMap<&'r str, f64> {
    let mut samples = BTreeMap::new();
    for row in rows.iter().filter(|row| kind != Single || !row.is_other) {
        let content = if field.is_empty() { Some(row.content) } else { row.content.get(field) };
        let Some(value) = content.and_then(|content| number(kind, content)) else { continue };
        let merge = |before: f64| match kind {
            Highest => before.max(value),
            Lowest => before.min(value),
            _ => before + value,
        };
        samples
            .entry(row.labels.as_str())
            .and_modify(|sample| *sample = merge(*sample))
            .or_insert(value);
    }
    samples
}

fn number(kind: Kind, content: &Value) -> Option<f64> {
    match kind {
        Count => Some(1.0),
        Whether => Some(f64::from(!matches!(content, Value::Null | Value::Bool(false)))),
        Lowest => content.as_f64().filter(|value| *value > 0.0),
        _ => content.as_f64(),
    }
}

fn histogram(samples: &mut String, name: &str, times: &Value) {
    let mut count = 0;
    for bucket in times["buckets"].as_array().into_iter().flatten() {
        count += bucket[1].as_u64().unwrap_or_default();
        let bound = bucket[0].as_f64().map_or_else(|| "+Inf".into(), |bound| format!("{bound:?}"));
        *samples += &format!("{PREFIX}{name}_bucket{{le=\"{bound}\"}} {count}\n");
    }
    *samples += &format!(
        "{PREFIX}{name}_sum {:?}\n{PREFIX}{name}_count {count}\n",
        times["sum_s"].as_f64().unwrap_or_default()
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const PARTS: &[Part] = &[
        Part::at("", Fields(&[])).has(&[
            (Gauge, "sessions", "sessions", "Sessions"),
            (Gauge, "none", "none", "Nothing"),
            (Histogram, "chunk_seconds", "chunks", "Chunks"),
        ]),
        Part::at("/topics", Fields(&["topic"])).has(&[
            (Single, "version", "version", "Version"),
            (Highest, "age_seconds", "age_s", "Age"),
            (Whether, "problem", "problem", "Problem"),
            (Counter, "sent_bytes", "sent", "Bytes sent"),
        ]),
        Part::at("/lanes", Fields(&["over"])).has(&[(Lowest, "min", "size", "Size")]),
        Part::at("/missing", Keys("kind")).has(&[(Gauge, "missing", "", "Missing")]),
    ];

    #[test]
    fn a_status_is_written_as_text() {
        let status = json!({
            "sessions": 3,
            "none": null,
            "chunks": { "sum_s": 7.5, "buckets": [[0.1, 2], [null, 1]] },
            "topics": [
                { "topic": "a", "version": 5, "age_s": 1.5, "problem": null, "sent": 1 },
                { "topic": "b\"\\", "version": null, "age_s": 2, "problem": "full", "sent": 2 },
            ],
            "lanes": [{ "over": "x", "size": 9 }, { "over": "x", "size": 0 }, { "over": "x", "size": 8 }],
        });
        let expected = "\
# HELP tensor_relay_sessions Sessions
# TYPE tensor_relay_sessions gauge
tensor_relay_sessions 3.0
# HELP tensor_relay_chunk_seconds Chunks
# TYPE tensor_relay_chunk_seconds histogram
tensor_relay_chunk_seconds_bucket{le=\"0.1\"} 2
tensor_relay_chunk_seconds_bucket{le=\"+Inf\"} 3
tensor_relay_chunk_seconds_sum 7.5
tensor_relay_chunk_seconds_count 3
# HELP tensor_relay_version Version
# TYPE tensor_relay_version gauge
tensor_relay_version{topic=\"a\"} 5.0
# HELP tensor_relay_age_seconds Age
# TYPE tensor_relay_age_seconds gauge
tensor_relay_age_seconds{topic=\"a\"} 1.5
tensor_relay_age_seconds{topic=\"b\\\"\\\\\"} 2.0
# HELP tensor_relay_problem Problem
# TYPE tensor_relay_problem gauge
tensor_relay_problem{topic=\"a\"} 0.0
tensor_relay_problem{topic=\"b\\\"\\\\\"} 1.0
# HELP tensor_relay_sent_bytes_total Bytes sent
# TYPE tensor_relay_sent_bytes_total counter
tensor_relay_sent_bytes_total{topic=\"a\"} 1.0
tensor_relay_sent_bytes_total{topic=\"b\\\"\\\\\"} 2.0
# HELP tensor_relay_min Size
# TYPE tensor_relay_min gauge
tensor_relay_min{over=\"x\"} 8.0
";
        assert_eq!(encode(&status, PARTS), expected);
    }

    #[test]
    fn topics_beyond_the_maximum_share_one_series() {
        let topic =
            |number| json!({ "topic": format!("{number:03}"), "version": 7, "age_s": number, "sent": 1 });
        let status = json!({ "topics": (0..SERIES_MAX + 3).map(topic).collect::<Vec<_>>() });
        let text = encode(&status, PARTS);
        assert_eq!(text.matches("tensor_relay_version{").count(), SERIES_MAX);
        assert_eq!(text.matches("tensor_relay_sent_bytes_total{").count(), SERIES_MAX + 1);
        assert!(text.contains("tensor_relay_sent_bytes_total{topic=\"other\"} 3.0\n"), "{text}");
        assert!(text.contains("tensor_relay_age_seconds{topic=\"other\"} 102.0\n"), "{text}");
    }
}
