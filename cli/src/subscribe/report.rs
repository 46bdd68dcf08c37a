//! Reports of received versions: one line on stdout, for people or for programs.

use super::{StdoutClosed, try_print_line};
use crate::{codecs, units};
use serde_json::{Value, json};
use std::path::Path;
use tensor_relay_client::{Client, CodecCount, Gap, LaneStats, Snapshot, Topic};
use tensor_relay_device::Device;

/// What a lane receives that carries no chunks: a few packets for each version, and a probe of the path's MTU now and then.
const IDLE_BYTES: u64 = 64 << 10;

/// Watches the lanes of the session from one version to the next.
pub(crate) struct LaneReport {
    read: Box<dyn Fn() -> Vec<LaneStats> + Send + Sync>,
    before: Vec<LaneStats>,
}

impl LaneReport {
    pub(crate) fn new(client: &Client) -> Self {
        let read = client.lanes_reader();
        Self { before: read(), read: Box::new(read) }
    }

    /// The counters of each lane since the last version. Several topics share the lanes.
    pub(crate) fn look(&mut self) -> Vec<Value> {
        let lanes = (self.read)();
        let before = std::mem::replace(&mut self.before, lanes);
        let received = |at: usize| before.get(at).map_or(0, |lane| lane.received_bytes);
        let lane = |(at, lane): (usize, &LaneStats)| {
            let received_bytes = lane.received_bytes.saturating_sub(received(at));
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

/// Whether a lane carried more than what keeps it alive: a chunk's share, and not some packets of acknowledgements.
fn carried(lane: &Value) -> bool {
    lane["received_bytes"].as_u64().is_some_and(|bytes| bytes > IDLE_BYTES)
}

/// Reports a received version and its `lanes`, and warns of generations that its server could not publish.
pub(crate) fn committed(
    as_json: bool,
    snapshot: &Snapshot,
    saved: Option<&Path>,
    lanes: &[Value],
) -> Result<(), StdoutClosed> {
    let missed = snapshot.missed_generations();
    if missed > 0 {
        crate::log::say!(
            "warning: {}: before it, {} replaced on the server before they could be published; they have no number",
            snapshot.id(),
            units::missed_generations(missed)
        );
    }
    let line = match as_json {
        true => as_object(snapshot, saved, lanes),
        false => as_text(snapshot, saved, lanes.iter().filter(|lane| carried(lane)).count()),
    };
    try_print_line(&line)
}

/// Tells of versions that are missing.
pub(crate) fn gap(as_json: bool, gap: &Gap) -> Result<(), StdoutClosed> {
    crate::log::say!("warning: {gap}");
    if as_json {
        let line = json!({
            "event": "gap",
            "topic": gap.found.topic.as_str(),
            "after": gap.after.as_ref().map(|id| id.version.0),
            "found": gap.found.version.0,
            "epoch": gap.found.epoch.to_string(),
            "missing": gap.missing(),
        });
        try_print_line(&line.to_string())?;
    }
    Ok(())
}

/// Tells of a topic that is not followed any more, while others are.
pub(crate) fn failed(as_json: bool, topic: &Topic, error: &str) -> Result<(), StdoutClosed> {
    crate::log::say!("warning: topic {topic} is not followed any more: {error}");
    if as_json {
        try_print_line(&json!({ "event": "failed", "topic": topic.as_str(), "error": error }).to_string())?;
    }
    Ok(())
}

/// How many tensors were received, wherever they are.
fn tensors(snapshot: &Snapshot) -> usize {
    snapshot.tensors().count() + snapshot.device_tensors().count()
}

fn as_object(snapshot: &Snapshot, saved: Option<&Path>, lanes: &[Value]) -> String {
    let (id, receipt) = (snapshot.id(), snapshot.receipt());
    let metadata: serde_json::Map<_, _> =
        snapshot.metadata().iter().map(|(k, v)| (k.clone(), v.clone().into())).collect();
    let line = json!({
        "event": "committed",
        "topic": id.topic.as_str(),
        "epoch": id.epoch.to_string(),
        "version": id.version.0,
        "new_epoch": snapshot.is_new_epoch(),
        "tensors": tensors(snapshot),
        "payload_bytes": snapshot.payload_bytes(),
        "wire_bytes": receipt.wire_bytes,
        "chunks": receipt.chunks,
        "codecs": codecs::as_object(&receipt.codecs, "decode_s"),
        "resumed": receipt.resumed,
        "transport": receipt.transport.name(),
        "transport_reason": receipt.transport_reason.text(),
        "duration_s": receipt.duration.as_secs_f64(),
        "skipped": snapshot.skipped(),
        "missed_generations": snapshot.missed_generations(),
        "metadata": metadata,
        "device": snapshot.device().map_or("cpu", Device::name),
        "path": saved,
        "lanes": lanes,
    });
    line.to_string()
}

fn as_text(snapshot: &Snapshot, saved: Option<&Path>, lanes: usize) -> String {
    let (id, receipt, payload_bytes) = (snapshot.id(), snapshot.receipt(), snapshot.payload_bytes());
    let mut line = format!(
        "{} version {}: {}, {} in {} ({}), verified",
        id.topic,
        id.version,
        units::count(tensors(snapshot), "tensor"),
        units::bytes(payload_bytes),
        units::time(receipt.duration),
        units::rate(payload_bytes, receipt.duration),
    );
    if let Some(less) = codecs::as_text(&receipt.codecs) {
        line += &format!(", {less}");
    }
    if let Some(device) = snapshot.device() {
        line += &format!(", on {}", device.name());
    }
    let CodecCount { chunks, raw_bytes, wire_bytes, .. } = receipt.codecs.deltas();
    if chunks > 0 {
        line += &format!(", {} of it as deltas in {}", units::bytes(raw_bytes), units::bytes(wire_bytes));
    }
    line += &format!(", over {}", receipt.transport);
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
