//! Reports of codec counters.

use crate::units;
use serde_json::{Map, Value, json};
use tensor_relay_server::{CodecId, CodecStats};

/// The counters of each used codec, by its name. `worked` is the key of the workers' time.
pub(crate) fn as_object(stats: &CodecStats, worked: &str) -> Value {
    let codecs = stats.iter().map(|(codec, count)| {
        let told = json!({
            "chunks": count.chunks,
            "payload_bytes": count.raw_bytes,
            "wire_bytes": count.wire_bytes,
            "ratio": count.ratio(),
            worked: count.worked.as_secs_f64(),
        });
        (codec.name().to_owned(), told)
    });
    Value::Object(codecs.collect::<Map<_, _>>())
}

/// The bytes saved, and by which codecs; `None` if everything was sent raw.
pub(crate) fn as_text(stats: &CodecStats) -> Option<String> {
    let encoded = stats.iter().map(|(codec, _)| codec).filter(|codec| *codec != CodecId::Raw);
    let names: Vec<&str> = encoded.map(CodecId::name).collect();
    let on_the_wire = units::bytes(stats.total().wire_bytes);
    (!names.is_empty()).then(|| format!("{on_the_wire} on the wire ({})", names.join(", ")))
}
