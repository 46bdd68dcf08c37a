//! [`ReceiveBuffer`]: the memory into which a data stream is received.

use std::{fmt, sync::Arc};
use tensor_relay_device::{Slot, Target};
use tensor_relay_protocol::ChunkHasher;

/// A function that is called with the size of each received piece. Over TCP the task that reads the lane calls it, so
/// it must be fast.
pub type Progress = Arc<dyn Fn(u64) + Send + Sync>;

/// The size of pieces that are copied and then hashed: they stay in the L1 cache. Longer copies, as of jumbo packets,
/// are slower where the C library uses `rep movsb` (on AMD processors).
pub(crate) const COPY_BYTES: usize = 4 << 10;

/// The memory of one chunk, filled in order. A raw chunk is hashed while its bytes are in the cache. The buffer owns
/// the memory, so that a data stream's reader can lend it to the lane's driver, and can take it back at any time.
pub(crate) struct ReceiveBuffer {
    memory: Memory,
    /// The number of expected bytes.
    expected: usize,
    /// The number of received bytes, including those without room.
    received: usize,
    progress: Progress,
}

/// The memory to be filled.
pub(crate) enum Memory {
    /// The destination itself, and its hasher.
    Raw(Target, Box<ChunkHasher>),
    /// A slot for an encoded chunk, and its destination.
    Encoded(Slot, Target),
}

impl Memory {
    /// The size of the memory.
    pub(crate) fn size_bytes(&self) -> usize {
        match self {
            Self::Raw(target, _) => target.len(),
            Self::Encoded(slot, _) => slot.len(),
        }
    }
}

impl ReceiveBuffer {
    /// A buffer for `expected` bytes in `memory`, which is not shorter.
    pub(crate) fn new(memory: Memory, expected: usize, progress: &Progress) -> Self {
        Self { memory, expected, received: 0, progress: Arc::clone(progress) }
    }

    /// The unfilled part.
    pub(crate) fn room(&mut self) -> &mut [u8] {
        let range = self.received.min(self.expected)..self.expected;
        match &mut self.memory {
            Memory::Raw(target, _) => &mut target[range],
            Memory::Encoded(slot, _) => &mut slot[range],
        }
    }

    /// Records that `bytes` were written to the front of the [unfilled part](Self::room).
    pub(crate) fn advance(&mut self, bytes: usize) {
        if let Memory::Raw(target, hasher) = &mut self.memory {
            hasher.update(&target[self.received..self.received + bytes]);
        }
        self.received += bytes;
        (self.progress)(bytes as u64);
    }

    /// Copies `bytes` into the unfilled part. Bytes without room are only counted.
    pub(crate) fn put(&mut self, bytes: &[u8]) {
        let (fit, excess) = bytes.split_at(bytes.len().min(self.room().len()));
        for piece in fit.chunks(COPY_BYTES) {
            self.room()[..piece.len()].copy_from_slice(piece);
            self.advance(piece.len());
        }
        self.received += excess.len();
    }

    /// Whether more bytes were received than expected.
    pub(crate) fn is_overfull(&self) -> bool {
        self.received > self.expected
    }

    /// The memory, and the number of bytes received.
    pub(crate) fn into_parts(self) -> (Memory, usize) {
        (self.memory, self.received)
    }
}

impl fmt::Debug for ReceiveBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReceiveBuffer")
            .field("expected", &self.expected)
            .field("received", &self.received)
            .finish_non_exhaustive()
    }
}
