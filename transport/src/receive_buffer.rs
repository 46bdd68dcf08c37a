//! [`ReceiveBuffer`]: the memory into which a data stream is received.

use std::{fmt, sync::Arc};
use tensor_relay_device::{Slot, Target};
use tensor_relay_protocol::{ChunkHasher, ChunkHeader, EncodingHash, EncodingHasher};

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
    encoding: Option<Box<EncodingCheck>>,
}

/// The size of pieces whose encoding is hashed: large enough for all lanes of the vector instructions, and still in the L2
/// cache.
const ENCODING_PIECE_BYTES: usize = 64 << 10;

/// Hashes the encoding of a chunk while it arrives, to compare it with what the origin says.
struct EncodingCheck {
    expected: EncodingHash,
    hasher: EncodingHasher,
    /// The bytes that were hashed.
    hashed: usize,
}

impl EncodingCheck {
    /// Hashes the `received` bytes if enough are new, or `is_last`.
    fn advance(&mut self, received: &[u8], is_last: bool) {
        let new = &received[self.hashed..];
        if new.len() >= ENCODING_PIECE_BYTES || is_last {
            self.hasher.update(new);
            self.hashed = received.len();
        }
    }
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

    /// The first `len` bytes.
    fn bytes(&self, len: usize) -> &[u8] {
        match self {
            Self::Raw(target, _) => &target[..len],
            Self::Encoded(slot, _) => &slot[..len],
        }
    }
}

impl ReceiveBuffer {
    /// A buffer for `expected` bytes in `memory`, which is not shorter.
    pub(crate) fn new(memory: Memory, expected: usize, progress: &Progress) -> Self {
        Self { memory, expected, received: 0, progress: Arc::clone(progress), encoding: None }
    }

    /// Compares the encoding of the chunk with `header` with `expected`, if that is given.
    pub(crate) fn checking(mut self, header: &ChunkHeader, expected: Option<EncodingHash>) -> Self {
        let check = |expected| EncodingCheck { expected, hasher: EncodingHasher::new(header), hashed: 0 };
        self.encoding = expected.map(|expected| Box::new(check(expected)));
        self
    }

    /// Whether the encoding that was received is the expected one, if one is expected. Call it once all is received.
    pub(crate) fn is_expected_encoding(&mut self) -> bool {
        let received = self.received.min(self.expected);
        self.encoding.as_mut().is_none_or(|check| {
            check.advance(self.memory.bytes(received), true);
            check.hasher.finish() == check.expected
        })
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
        if let Some(check) = &mut self.encoding {
            check.advance(self.memory.bytes(self.received), false);
        }
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
