//! Reports of received versions: one line on stdout for each, as text or JSON.

use crate::{
    codecs,
    engine_caches::{self, Outcomes},
    output::{self, StdoutClosed},
    units,
};
use serde_json::{Value, json};
use std::path::Path;
use tensor_relay_client::{
    Client, CodecCount, Gap, LaneStats, PeerReport, ReceiptSources, Sharing, Snapshot, StatusReader, Topic,
};
use tensor_relay_device::Device;

/// The maximum number of bytes that a lane without chunks receives per version: a few packets, and occasional MTU
/// probes.
const IDLE_BYTES: u64 = 64 << 10;

/// The state of each lane of the session, with the bytes received since the previous version.
pub(crate) struct LaneReport {
    reader: Box<dyn Fn() -> Vec<LaneStats> + Send + Sync>,
    before: Vec<LaneStats>,
}

impl LaneReport {
    pub(crate) fn new(client: &Client) -> Self {
        let reader = client.lanes_reader();
        Self { before: reader(), reader: Box::new(reader) }
    }

    /// The state of each lane as a JSON object. `received_bytes` counts from the last call and includes the traffic of
    /// other topics, which share the lanes; `lost_packets` counts from the beginning of the lane.
    pub(crate) fn read(&mut self) -> Vec<Value> {
        let lanes = (self.reader)();
        let before = std::mem::replace(&mut self.before, lanes);
        let received_before = |index: usize| before.get(index).map_or(0, |lane| lane.received_bytes);
        let lane = |(index, lane): (usize, &LaneStats)| {
            // A lane that replaced another counts from zero.
            let received_bytes = lane.received_bytes.checked_sub(received_before(index));
            let received_bytes = received_bytes.unwrap_or(lane.received_bytes);
            json!({
                "udp_payload_bytes": lane.udp_payload_bytes,
                "rtt_s": lane.rtt.as_secs_f64(),
                "received_bytes": received_bytes,
                "lost_packets": lane.lost_packets,
            })
        };
        self.before.iter().enumerate().map(lane).collect()
    }
}

/// Whether a lane carried chunks, not only acknowledgements and keep-alives.
fn carried_chunks(lane: &Value) -> bool {
    lane["received_bytes"].as_u64().is_some_and(|bytes| bytes > IDLE_BYTES)
}

/// What was written of a version.
pub(crate) struct Saved<'a> {
    /// The file or folder, if versions are saved.
    pub(crate) path: Option<&'a Path>,
    /// What became of the caches of engines.
    pub(crate) caches: &'a Outcomes,
}

/// Reports a received version and its `lanes`, and warns of generations that the server could not publish. The line is
/// never dropped if it `must_be_read`; the caller then waits for it.
pub(crate) fn committed(
    as_json: bool,
    must_be_read: bool,
    snapshot: &Snapshot,
    saved: &Saved<'_>,
    lanes: &[Value],
) -> Result<(), StdoutClosed> {
    let missed = snapshot.missed_generations();
    if missed > 0 {
        crate::log::message!(
            "warning: {}: before it, {} replaced on the server before they could be published; they have no version \
             number",
            snapshot.id(),
            units::missed_generations(missed)
        );
    }
    let line = match as_json {
        true => as_object(snapshot, saved, lanes),
        false => as_text(snapshot, saved.path, lanes.iter().filter(|lane| carried_chunks(lane)).count()),
    };
    match must_be_read {
        true => output::kept_line(&line),
        false => output::line(&line),
    }
}

/// Logs from whom a version came, and what became of each peer that the server named.
pub(crate) fn sources(snapshot: &Snapshot, status: &StatusReader) {
    let ReceiptSources { origin_bytes, server_bytes, peer_bytes, .. } = snapshot.receipt().sources;
    let version = snapshot.id();
    tracing::info!(%version, origin_bytes, server_bytes, peer_bytes, "A version came from its sources.");
    let peers = status.read().map(|status| status.peers).unwrap_or_default();
    for PeerReport { key, addresses, state } in &peers {
        let addresses: Vec<_> = addresses.iter().map(|it| it.address.to_string()).collect();
        tracing::info!(peer = %key, addresses = addresses.join(","), %state, "A peer that the server named.");
    }
}

/// Warns of missing versions.
pub(crate) fn gap(as_json: bool, gap: &Gap) -> Result<(), StdoutClosed> {
    crate::log::message!("warning: {gap}");
    if as_json {
        let line = json!({
            "event": "gap",
            "topic": gap.found.topic.as_str(),
            "after": gap.after.as_ref().map(|id| id.version.0),
            "found": gap.found.version.0,
            "epoch": gap.found.epoch.to_string(),
            "missing": gap.missing(),
        });
        output::line(&line.to_string())?;
    }
    Ok(())
}

/// Warns that a topic failed while other topics are still followed.
pub(crate) fn failed(as_json: bool, topic: &Topic, error: &str) -> Result<(), StdoutClosed> {
    crate::log::message!("warning: topic {topic} is not followed any more: {error}");
    if as_json {
        output::line(&json!({ "event": "failed", "topic": topic.as_str(), "error": error }).to_string())?;
    }
    Ok(())
}

/// The number of received tensors, in host memory and on devices.
fn tensors(snapshot: &Snapshot) -> usize {
    snapshot.described().count()
}

fn as_object(snapshot: &Snapshot, saved: &Saved<'_>, lanes: &[Value]) -> String {
    let (id, receipt) = (snapshot.id(), snapshot.receipt());
    let metadata: serde_json::Map<_, _> = snapshot
        .metadata()
        .iter()
        .map(|(key, value)| (key.clone(), value.clone().into()))
        .collect();
    let line = json!({
        "event": "committed",
        "topic": id.topic.as_str(),
        "epoch": id.epoch.to_string(),
        "version": id.version.0,
        "new_epoch": snapshot.is_new_epoch(),
        "tensors": tensors(snapshot),
        "payload_bytes": snapshot.payload_bytes(),
        "wanted_bytes": receipt.wanted_bytes,
        "wire_bytes": receipt.wire_bytes,
        "chunks": receipt.chunks,
        "codecs": codecs::as_object(&receipt.codecs, "decode_s"),
        "resumed": receipt.resumed,
        "transport": receipt.transport.name(),
        "transport_reason": receipt.transport_reason.text(),
        "sharing": receipt.sharing.to_string(),
        "sources": {
            "origin_bytes": receipt.sources.origin_bytes,
            "server_bytes": receipt.sources.server_bytes,
            "peer_bytes": receipt.sources.peer_bytes,
            "peers": receipt.sources.peers,
        },
        "duration_s": receipt.duration.as_secs_f64(),
        "skipped": snapshot.skipped(),
        "missed_generations": snapshot.missed_generations(),
        "metadata": metadata,
        "device": snapshot.device().map_or("cpu", Device::name),
        "path": saved.path,
        "engine_caches": engine_caches::as_object(saved.caches),
        "lanes": lanes,
    });
    line.to_string()
}

fn as_text(snapshot: &Snapshot, saved: Option<&Path>, lanes: usize) -> String {
    let (id, receipt, payload_bytes) = (snapshot.id(), snapshot.receipt(), snapshot.payload_bytes());
    let mut line = format!(
        "{} version {}: {}, {} in {} ({}), {}",
        id.topic,
        id.version,
        units::count(tensors(snapshot), "tensor"),
        units::bytes(payload_bytes),
        units::time(receipt.duration),
        units::rate(payload_bytes, receipt.duration),
        // Nobody but the server can write to its memory, and the receiver does not read it.
        if receipt.sharing.is_memory() { "shared" } else { "verified" },
    );
    if snapshot.has_boxes() {
        line += &format!(", for boxes of {}", units::bytes(receipt.wanted_bytes));
    }
    if let Some(encoded) = codecs::as_text(&receipt.codecs) {
        line += &format!(", {encoded}");
    }
    if let Some(device) = snapshot.device() {
        line += &format!(", on {}", device.name());
    }
    let CodecCount { chunks, raw_bytes, wire_bytes, .. } = receipt.codecs.deltas();
    if chunks > 0 {
        line += &format!(", {} of it as deltas in {}", units::bytes(raw_bytes), units::bytes(wire_bytes));
    }
    line += &format!(", over {}", receipt.transport);
    match receipt.sharing {
        Sharing::Network => {}
        sharing => line += &format!(" ({sharing})"),
    }
    let ReceiptSources { peer_bytes, peers, .. } = receipt.sources;
    if peer_bytes > 0 {
        line += &format!(
            ", {} from {}",
            units::bytes(peer_bytes),
            units::count(peers as usize, "other subscriber")
        );
    }
    if lanes > 1 {
        line += &format!(" in {lanes} lanes");
    }
    if snapshot.is_new_epoch() {
        line += ", of a new epoch";
    }
    if receipt.resumed > 0 {
        line += ", resumed after a lost connection";
    }
    match snapshot.skipped() {
        0 => {}
        count => line += &format!(", {count} skipped before it"),
    }
    match snapshot.missed_generations() {
        0 => {}
        missed => line += &format!(", {} never published before it", units::missed_generations(missed)),
    }
    if let Some(path) = saved {
        line += &format!(", saved to {}", path.display());
    }
    line
}
