//! Decodes arbitrary bytes with the codec that the first byte selects. To fuzz a single codec:
//! `TENSOR_RELAY_FUZZ_CODEC=sparse tests/fuzz/run decode`.

#![no_main]

#[path = "../../tests/fuzz/decoder.rs"]
mod decoder;

use libfuzzer_sys::fuzz_target;
use std::{env, sync::LazyLock};
use tensor_relay_protocol::CodecId;

static SELECTED_CODEC: LazyLock<Option<CodecId>> = LazyLock::new(|| {
    let name = env::var("TENSOR_RELAY_FUZZ_CODEC").ok()?;
    Some(
        *CodecId::ALL
            .iter()
            .find(|id| id.name() == name)
            .expect("TENSOR_RELAY_FUZZ_CODEC must name a codec"),
    )
});

fuzz_target!(|data: &[u8]| {
    let Some((first, data)) = data.split_first() else { return };
    let codec = SELECTED_CODEC.unwrap_or(CodecId::ALL[usize::from(*first) % CodecId::ALL.len()]);
    decoder::decode_any(codec, data);
});
