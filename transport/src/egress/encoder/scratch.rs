//! Thread-local output buffers for codecs.

use std::cell::RefCell;

thread_local! {
    /// The output buffer, as large as the largest `room_bytes` so far on this thread, and freed only with the thread.
    /// New memory for each chunk would be zeroed and mapped page by page, which costs as much as encoding.
    static OUT: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Encodes into a buffer of `room_bytes` and passes the encoding to `keep`. `encode` returns the number of bytes that it
/// wrote; `None` if the encoding does not fit.
pub(super) fn encode<T>(
    room_bytes: usize,
    encode: impl FnOnce(&mut [u8]) -> Option<usize>,
    keep: impl FnOnce(&[u8]) -> T,
) -> Option<T> {
    OUT.with_borrow_mut(|out| {
        if out.len() < room_bytes {
            out.resize(room_bytes, 0);
        }
        let written = encode(&mut out[..room_bytes])?;
        Some(keep(&out[..written]))
    })
}
