//! Reports of codec counters.

use crate::units;
use serde_json::{Map, Value, json};
use tensor_relay_server::{CodecId, CodecStats};

/// The counters of each used codec as a JSON object, by the codec's name. `time_key` is the key of the time that
/// workers spent.
pub(crate) fn as_object(stats: &CodecStats, time_key: &str) -> Value {
    let codecs = stats.iter().map(|(codec, count)| {
        let counters = json!({
            "chunks": count.chunks,
            "payload_bytes": count.raw_bytes,
            "wire_bytes": count.wire_bytes,
            "ratio": count.ratio(),
            time_key: count.worker_time.as_secs_f64(),
        });
        (codec.name().to_owned(), counters)
    });
    Value::Object(codecs.collect::<Map<_, _>>())
}

/// The encoded size and the used codecs as text; `None` if every chunk was sent raw.
pub(crate) fn as_text(stats: &CodecStats) -> Option<String> {
    let encoded = stats.iter().map(|(codec, _)| codec).filter(|codec| *codec != CodecId::Raw);
    let names: Vec<&str> = encoded.map(CodecId::name).collect();
    let on_the_wire = units::bytes(stats.total().wire_bytes);
    (!names.is_empty()).then(|| format!("{on_the_wire} on the wire ({})", names.join(", ")))
}
