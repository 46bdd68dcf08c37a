//! The status of a server as metrics.

use super::families::{Family, Labels};
use tensor_relay_server::{
    CodecCount, LaneKind, Limit, ServerStatus, SubscriberStatus, TopicStatus, TrafficStats,
};

/// The most topics with a label of their own: the first by name. All others share `other`: publishers must not be able
/// to fill a Prometheus.
pub(super) const LABELLED_MAX: usize = 100;

const OTHER: &str = "other";

/// All families. None has the address of a client in a label: there may be any number of those.
pub(super) fn of(status: &ServerStatus, memory: &[(&'static str, u64)]) -> Vec<Family> {
    let mut families = whole(status);
    families.extend(by_topic(status));
    families.extend(by_codec(status));
    families.extend(by_transport(status));
    let memory = memory.iter().map(|(kind, bytes)| (label("kind", kind), *bytes as f64));
    families
        .push(Family::gauges("memory", "Memory of versions, by what it is for", memory.collect()).in_bytes());
    let failures = status.failures.iter().map(|failure| {
        let labels = vec![("at", failure.at.name().to_owned()), ("reason", failure.reason.to_owned())];
        (labels, failure.count as f64)
    });
    families.push(Family::counters("failures", "What went wrong, by where and why", failures.collect()));
    let (buckets, sum_s) = (status.chunk_times.buckets.clone(), status.chunk_times.sum_s);
    let help = "Time from beginning to read a chunk until the network had taken all of it";
    families.push(Family::histogram("chunk", help, buckets, sum_s));
    families
}

fn label(name: &'static str, value: &str) -> Labels {
    vec![(name, value.to_owned())]
}

/// Families of the server as a whole.
fn whole(status: &ServerStatus) -> Vec<Family> {
    let stats = &status.stats;
    let under_way = |limit: Limit| {
        let transfers = status.subscribers.iter().filter_map(|subscriber| subscriber.under_way.as_ref());
        let count = transfers.filter(|under_way| under_way.limit == limit).count();
        (label("limit", limit.name()), count as f64)
    };
    let build = label("version", env!("CARGO_PKG_VERSION"));
    vec![
        Family::gauges("build_info", "The version of the program", vec![(build, 1.0)]),
        Family::gauge("uptime", "How long the server has been there", status.uptime.as_secs_f64())
            .in_seconds(),
        Family::gauge("draining", "Whether the server is ending", f64::from(u8::from(status.is_draining))),
        Family::gauge("topics", "Topics that have a version", status.topics.len() as f64),
        Family::gauge("sessions", "Clients that are connected", stats.sessions as f64),
        Family::gauge("subscribers", "Subscriptions that are open", status.subscribers_count as f64),
        Family::gauge("transfers", "Versions being sent, each to one subscription", stats.transfers as f64),
        Family::gauges(
            "transfers_limited",
            "Transfers by what holds them up at this moment, of the first 256 subscriptions",
            [Limit::Encoding, Limit::Network, Limit::Receiver].map(under_way).into(),
        ),
        Family::counter("published_versions", "Versions published", status.published as f64),
        Family::counter("committed_versions", "Versions that a subscriber has", stats.committed as f64),
        Family::counter(
            "evictions",
            "Subscriptions that did not keep up and were ended",
            stats.evicted as f64,
        ),
        Family::gauge(
            "base_versions",
            "Versions kept to code later ones against",
            stats.bases.versions as f64,
        ),
        Family::counter("source_reads", "Chunks read of a GPU", stats.encoder.source_reads as f64),
    ]
}

/// The values of one topic, or of several together.
#[derive(Default)]
struct OfTopic {
    version: Option<u64>,
    payload_bytes: u64,
    age_s: f64,
    retained: u64,
    published: u64,
    subscribers: u64,
    sent_payload_bytes: u64,
    sent_wire_bytes: u64,
    lag_versions: u64,
    lag_s: f64,
}

impl OfTopic {
    fn add(&mut self, topic: &TopicStatus, subscribers: &[SubscriberStatus]) {
        let sent = topic.sent.total();
        self.payload_bytes += topic.payload_bytes;
        self.age_s = self.age_s.max(topic.age.as_secs_f64());
        self.retained += topic.retained;
        self.published += topic.published;
        self.subscribers += topic.subscribers;
        self.sent_payload_bytes += sent.raw_bytes;
        self.sent_wire_bytes += sent.wire_bytes;
        for subscriber in subscribers.iter().filter(|subscriber| subscriber.topic == topic.newest.topic) {
            self.lag_versions = self.lag_versions.max(subscriber.lag_versions);
            self.lag_s = self.lag_s.max(subscriber.lag.as_secs_f64());
        }
    }
}

fn by_topic(status: &ServerStatus) -> Vec<Family> {
    let topics = of_topics(&status.topics, &status.subscribers);
    let each = |value: fn(&OfTopic) -> f64| {
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
        Family::gauges(
            "topic_age",
            "How long ago the newest version was published",
            each(|topic| topic.age_s),
        )
        .in_seconds(),
        Family::gauges(
            "topic_retained_versions",
            "Versions that are retained",
            each(|topic| topic.retained as f64),
        ),
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
            "topic_lag_versions",
            "How many versions the last of the subscribers is behind",
            each(|topic| topic.lag_versions as f64),
        ),
        Family::gauges(
            "topic_lag",
            "For how long there has been a version that the last of the subscribers does not have",
            each(|topic| topic.lag_s),
        )
        .in_seconds(),
        Family::counters(
            "topic_sent_payload",
            "Payload sent of a topic to all subscribers",
            each(|topic| topic.sent_payload_bytes as f64),
        )
        .in_bytes(),
        Family::counters(
            "topic_sent_wire",
            "The same as it was encoded",
            each(|topic| topic.sent_wire_bytes as f64),
        )
        .in_bytes(),
    ]
}

/// The topics with labels of their own, and one for all others.
fn of_topics(topics: &[TopicStatus], subscribers: &[SubscriberStatus]) -> Vec<(String, OfTopic)> {
    let (labelled, others) = topics.split_at(topics.len().min(LABELLED_MAX));
    let mut all: Vec<(String, OfTopic)> = vec![];
    for topic in labelled {
        let mut one = OfTopic { version: Some(topic.newest.version.0), ..OfTopic::default() };
        one.add(topic, subscribers);
        all.push((topic.newest.topic.to_string(), one));
    }
    if !others.is_empty() {
        let mut rest = OfTopic::default();
        others.iter().for_each(|topic| rest.add(topic, subscribers));
        all.push((OTHER.into(), rest));
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
        Family::counters("sent_wire", "The same as it was encoded", each(|count| count.wire_bytes as f64))
            .in_bytes(),
        Family::counters(
            "encode",
            "What encoding took, on all threads",
            each(|count| count.worked.as_secs_f64()),
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
    // The system makes the packets of TCP.
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
        Family::gauges("lane_rtt_max", "The longest round trip of a lane", rtt.collect()).in_seconds(),
        Family::counters(
            "transport_sent",
            "What lanes sent, control and repetitions included",
            each(|traffic| traffic.sent_bytes as f64),
        )
        .in_bytes(),
        Family::counters(
            "transport_received",
            "What lanes received",
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
            "Packets lost; what they carried was sent again",
            packets(|traffic| traffic.lost_packets as f64),
        ),
    ]
}
