//! The metric families of a server.

use super::families::{Family, Labels};
use tensor_relay_server::{
    CodecCount, LaneKind, Limit, ServerStatus, SubscriberStatus, TopicStatus, TrafficStats,
};

/// The maximum number of topics with a label of their own: the first by name. All others share the label `other`, so
/// that publishers cannot create series without bound in Prometheus.
pub(super) const LABELLED_MAX: usize = 100;

const OTHER: &str = "other";

/// All metric families of a server. No label contains the address of a client, because the number of addresses is
/// unbounded.
pub(super) fn families(status: &ServerStatus, memory: &[(&'static str, u64)]) -> Vec<Family> {
    let mut families = of_server(status);
    families.extend(by_topic(status));
    families.extend(by_codec(status));
    families.extend(by_transport(status));
    let memory = memory.iter().map(|(kind, bytes)| (label("kind", kind), *bytes as f64));
    families.push(Family::gauges("memory", "Memory of versions, by use", memory.collect()).in_bytes());
    let failures = status.failures.iter().map(|failure| {
        let labels = vec![("at", failure.at.name().to_owned()), ("reason", failure.reason.to_owned())];
        (labels, failure.count as f64)
    });
    families.push(Family::counters("failures", "Failures, by place and reason", failures.collect()));
    let (buckets, sum_s) = (status.chunk_times.buckets.clone(), status.chunk_times.sum_s);
    let help = "Time from the start of reading a chunk until the transport had accepted all of it";
    families.push(Family::histogram("chunk", help, buckets, sum_s));
    families
}

fn label(name: &'static str, value: &str) -> Labels {
    vec![(name, value.to_owned())]
}

/// Families of the entire server.
fn of_server(status: &ServerStatus) -> Vec<Family> {
    let stats = &status.stats;
    let limited_by = |limit: Limit| {
        let transfers = status.subscribers.iter().filter_map(|subscriber| subscriber.transfer.as_ref());
        let count = transfers.filter(|transfer| transfer.limit == limit).count();
        (label("limit", limit.name()), count as f64)
    };
    let build = label("version", env!("CARGO_PKG_VERSION"));
    vec![
        Family::gauges("build_info", "The version of the program", vec![(build, 1.0)]),
        Family::gauge("uptime", "Time since the server started", status.uptime.as_secs_f64()).in_seconds(),
        Family::gauge("draining", "Whether the server is draining", f64::from(u8::from(status.is_draining))),
        Family::gauge("topics", "Topics that have a version", status.topics.len() as f64),
        Family::gauge("sessions", "Connected clients", stats.sessions as f64),
        Family::gauge("subscribers", "Open subscriptions", status.subscribers_count as f64),
        Family::gauge("transfers", "Versions being sent, each to one subscription", stats.transfers as f64),
        Family::gauges(
            "transfers_limited",
            "Transfers of the first 256 subscriptions, by their bottleneck at this moment",
            [Limit::Encoding, Limit::Network, Limit::Receiver].map(limited_by).into(),
        ),
        Family::counter("published_versions", "Versions published", status.published as f64),
        Family::counter(
            "committed_versions",
            "Versions committed, counted for each subscriber",
            stats.committed as f64,
        ),
        Family::counter(
            "evictions",
            "Subscriptions evicted because they did not keep up",
            stats.evicted as f64,
        ),
        Family::gauge("base_versions", "Versions retained as bases of deltas", stats.bases.versions as f64),
        Family::counter("source_reads", "Chunks read from a GPU", stats.encoder.source_reads as f64),
    ]
}

/// The values of one topic, or the totals of several; of ages and lags, the maxima.
#[derive(Default)]
struct TopicTotals {
    version: Option<u64>,
    payload_bytes: u64,
    age_s: f64,
    retained: u64,
    published: u64,
    subscribers: u64,
    publish_problems: u64,
    sent_payload_bytes: u64,
    sent_wire_bytes: u64,
    lag_versions: u64,
    lag_s: f64,
}

impl TopicTotals {
    fn add(&mut self, topic: &TopicStatus, subscribers: &[SubscriberStatus]) {
        let sent = topic.sent.total();
        self.payload_bytes += topic.payload_bytes;
        self.age_s = self.age_s.max(topic.age.as_secs_f64());
        self.retained += topic.retained;
        self.published += topic.published;
        self.subscribers += topic.subscribers;
        self.publish_problems += u64::from(topic.publish_problem.is_some());
        self.sent_payload_bytes += sent.raw_bytes;
        self.sent_wire_bytes += sent.wire_bytes;
        for subscriber in subscribers.iter().filter(|subscriber| subscriber.topic == topic.newest.topic) {
            self.lag_versions = self.lag_versions.max(subscriber.lag_versions);
            self.lag_s = self.lag_s.max(subscriber.lag.as_secs_f64());
        }
    }
}

fn by_topic(status: &ServerStatus) -> Vec<Family> {
    let topics = labelled_topics(&status.topics, &status.subscribers);
    let each = |value: fn(&TopicTotals) -> f64| {
        topics
            .iter()
            .map(|(name, topic)| (label("topic", name), value(topic)))
            .collect::<Vec<_>>()
    };
    let versions = topics
        .iter()
        .filter_map(|(name, topic)| Some((label("topic", name), topic.version? as f64)));
    vec![
        Family::gauges("topic_version", "The number of the newest version", versions.collect()),
        Family::gauges(
            "topic_payload",
            "The size of the newest version",
            each(|topic| topic.payload_bytes as f64),
        )
        .in_bytes(),
        Family::gauges("topic_age", "Time since the newest version was published", each(|topic| topic.age_s))
            .in_seconds(),
        Family::gauges("topic_retained_versions", "Retained versions", each(|topic| topic.retained as f64)),
        Family::counters(
            "topic_published_versions",
            "Versions published in a topic",
            each(|topic| topic.published as f64),
        ),
        Family::gauges(
            "topic_subscribers",
            "Subscriptions of a topic",
            each(|topic| topic.subscribers as f64),
        ),
        Family::gauges(
            "topic_publish_problem",
            "Whether newer content of a topic cannot be published",
            each(|topic| topic.publish_problems as f64),
        ),
        Family::gauges(
            "topic_lag_versions",
            "Versions by which the slowest subscriber is behind",
            each(|topic| topic.lag_versions as f64),
        ),
        Family::gauges(
            "topic_lag",
            "Age of the oldest version that the slowest subscriber lacks",
            each(|topic| topic.lag_s),
        )
        .in_seconds(),
        Family::counters(
            "topic_sent_payload",
            "Payload of a topic sent to all subscribers",
            each(|topic| topic.sent_payload_bytes as f64),
        )
        .in_bytes(),
        Family::counters(
            "topic_sent_wire",
            "Payload of a topic sent to all subscribers, as encoded",
            each(|topic| topic.sent_wire_bytes as f64),
        )
        .in_bytes(),
    ]
}

/// The topics with labels of their own, and the totals of all others.
fn labelled_topics(topics: &[TopicStatus], subscribers: &[SubscriberStatus]) -> Vec<(String, TopicTotals)> {
    let (labelled, others) = topics.split_at(topics.len().min(LABELLED_MAX));
    let mut all: Vec<(String, TopicTotals)> = vec![];
    for topic in labelled {
        let mut totals = TopicTotals { version: Some(topic.newest.version.0), ..TopicTotals::default() };
        totals.add(topic, subscribers);
        all.push((topic.newest.topic.to_string(), totals));
    }
    if !others.is_empty() {
        let mut totals = TopicTotals::default();
        others.iter().for_each(|topic| totals.add(topic, subscribers));
        all.push((OTHER.into(), totals));
    }
    all
}

fn by_codec(status: &ServerStatus) -> Vec<Family> {
    let each = |value: fn(&CodecCount) -> f64| {
        let codecs = status.stats.codecs.iter();
        codecs
            .map(|(codec, count)| (label("codec", codec.name()), value(&count)))
            .collect::<Vec<_>>()
    };
    vec![
        Family::counters("sent_chunks", "Chunks sent, by codec", each(|count| count.chunks as f64)),
        Family::counters("sent_payload", "Payload sent, by codec", each(|count| count.raw_bytes as f64))
            .in_bytes(),
        Family::counters(
            "sent_wire",
            "Payload sent, as encoded, by codec",
            each(|count| count.wire_bytes as f64),
        )
        .in_bytes(),
        Family::counters(
            "encode",
            "Time spent encoding, summed over all threads",
            each(|count| count.worker_time.as_secs_f64()),
        )
        .in_seconds(),
    ]
}

fn by_transport(status: &ServerStatus) -> Vec<Family> {
    let each = |value: fn(&TrafficStats) -> f64| {
        let kinds = status.traffic.iter();
        kinds
            .map(|(kind, _, traffic)| (label("transport", kind.name()), value(traffic)))
            .collect::<Vec<_>>()
    };
    // Only QUIC: the operating system makes the packets of TCP.
    let packets = |value: fn(&TrafficStats) -> f64| {
        let kinds = status.traffic.iter().filter(|(kind, ..)| *kind == LaneKind::Quic);
        kinds
            .map(|(kind, _, traffic)| (label("transport", kind.name()), value(traffic)))
            .collect::<Vec<_>>()
    };
    let lanes = status
        .traffic
        .iter()
        .map(|(kind, lanes, _)| (label("transport", kind.name()), *lanes as f64));
    let rtt = status.traffic.iter().filter_map(|(kind, ..)| {
        let lanes = status.lanes.iter().filter(|lane| lane.transport == *kind);
        let longest = lanes.map(|lane| lane.stats.rtt).max()?;
        Some((label("transport", kind.name()), longest.as_secs_f64()))
    });
    let packet = status.traffic.iter().filter_map(|(kind, ..)| {
        let lanes = status.lanes.iter().filter(|lane| lane.transport == *kind);
        let smallest = lanes
            .map(|lane| lane.stats.udp_payload_bytes)
            .filter(|bytes| *bytes > 0)
            .min()?;
        Some((label("transport", kind.name()), f64::from(smallest)))
    });
    vec![
        Family::gauges("lanes", "Connections that carry chunks, by transport", lanes.collect()),
        Family::gauges("lane_packet_min", "The smallest packet size of a lane over QUIC", packet.collect())
            .in_bytes(),
        Family::gauges("lane_rtt_max", "The longest round-trip time of a lane", rtt.collect()).in_seconds(),
        Family::counters(
            "transport_sent",
            "Bytes sent on lanes, control messages and retransmissions included",
            each(|traffic| traffic.sent_bytes as f64),
        )
        .in_bytes(),
        Family::counters(
            "transport_received",
            "Bytes received on lanes",
            each(|traffic| traffic.received_bytes as f64),
        )
        .in_bytes(),
        Family::counters(
            "transport_sent_packets",
            "Packets sent",
            packets(|traffic| traffic.sent_packets as f64),
        ),
        Family::counters(
            "transport_lost_packets",
            "Packets lost; their content was retransmitted",
            packets(|traffic| traffic.lost_packets as f64),
        ),
    ]
}
