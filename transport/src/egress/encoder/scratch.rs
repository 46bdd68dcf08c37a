//! Thread-local output buffers for codecs.

use std::cell::RefCell;
use tensor_relay_protocol::{CodecId, Context, codec};

thread_local! {
    /// The output buffer, as large as the largest `room_bytes` so far on this thread, and freed only with the thread.
    /// New memory for each chunk would be zeroed and mapped page by page, which costs as much as encoding.
    static OUT: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Encodes `raw` and passes the encoding to `keep`. `None` if the encoding exceeds `room_bytes`.
pub(super) fn encode<T>(
    id: CodecId,
    context: Context<'_>,
    raw: &[u8],
    room_bytes: usize,
    keep: impl FnOnce(&[u8]) -> T,
) -> Option<T> {
    OUT.with_borrow_mut(|out| {
        if out.len() < room_bytes {
            out.resize(room_bytes, 0);
        }
        let written = codec(id).encode(context, raw, &mut out[..room_bytes])?;
        Some(keep(&out[..written]))
    })
}
