//! [`Pool`]: reuses buffers for received segments.

use std::{
    ops::{Deref, DerefMut},
    sync::Arc,
};
use tensor_relay_device::Lock;

use super::segment::SEGMENT_BYTES_MAX;

/// The length of a pooled buffer: a segment and the one byte that decryption adds.
const BUFFER_BYTES: usize = SEGMENT_BYTES_MAX + 1;

/// The maximum number of free buffers. Together they have a megabyte, the usual backlog of a reader that keeps up.
const SPARE_MAX: usize = 16;

/// The free buffers of one connection. Zeroing a new buffer costs a tenth of decrypting into it.
#[derive(Debug, Clone, Default)]
pub(super) struct Pool(Arc<Lock<Vec<Box<[u8]>>>>);

/// A buffer that returns to its pool when it is dropped, if it is long. Its initial content is unspecified.
#[derive(Debug)]
pub(super) struct Buffer {
    bytes: Box<[u8]>,
    pool: Pool,
}

impl Pool {
    /// A buffer of at least `bytes` bytes; `bytes` is at most [`BUFFER_BYTES`]. Up to half of that, the buffer is not
    /// pooled, so that short segments do not hold more memory than they need.
    pub(super) fn take(&self, bytes: usize) -> Buffer {
        let bytes = match bytes > BUFFER_BYTES / 2 {
            true => self.take_spare().unwrap_or_else(|| vec![0; BUFFER_BYTES].into()),
            false => vec![0; bytes].into(),
        };
        Buffer { bytes, pool: self.clone() }
    }

    fn take_spare(&self) -> Option<Box<[u8]>> {
        self.0.lock().pop()
    }

    fn put_back(&self, bytes: Box<[u8]>) {
        let mut spare = self.0.lock();
        if bytes.len() == BUFFER_BYTES && spare.len() < SPARE_MAX {
            spare.push(bytes);
        }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.pool.put_back(std::mem::take(&mut self.bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_keeps_a_few_long_buffers() {
        let pool = Pool::default();
        let long: Vec<Buffer> = (0..SPARE_MAX + 3).map(|_| pool.take(BUFFER_BYTES)).collect();
        assert!(long.iter().all(|buffer| buffer.len() == BUFFER_BYTES));
        drop((long, pool.take(BUFFER_BYTES / 2), pool.take(0)));
        assert_eq!(pool.0.lock().len(), SPARE_MAX);
        let first = pool.take(BUFFER_BYTES / 2 + 1);
        assert_eq!((first.len(), pool.0.lock().len()), (BUFFER_BYTES, SPARE_MAX - 1));
    }
}
