//! Memory that a data stream is read into.

use std::{fmt, sync::Arc};
use tensor_relay_device::{Slot, Target};
use tensor_relay_protocol::ChunkHasher;

/// Told of the bytes of each piece that came. It is called wherever the lane is read, so it must be short.
pub type Progress = Arc<dyn Fn(u64) + Send + Sync>;

/// How much is copied before it is hashed: it stays in the first cache. Jumbo pieces are larger, and larger copies are
/// slower where the C library makes one instruction of them (`rep movsb` on AMD processors).
pub(crate) const COPY_BYTES: usize = 4 << 10;

/// The place of one chunk, filled from its front; a raw one is hashed on the way, while its bytes are in the cache. It
/// owns what it fills, so that a lane can decrypt right into it, and whoever waits for it can take it back at any time.
pub(crate) struct ReceiveBuffer {
    memory: Memory,
    /// How many bytes are to come.
    expected: usize,
    /// How many came, those included that had no room.
    found: usize,
    progress: Progress,
}

/// What is filled.
pub(crate) enum Memory {
    /// The place itself, and what hashes it.
    Raw(Target, Box<ChunkHasher>),
    /// Where an encoded chunk waits for its decoder, and its place.
    Encoded(Slot, Target),
}

impl Memory {
    /// How many bytes fit.
    pub(crate) fn room(&self) -> usize {
        match self {
            Self::Raw(target, _) => target.len(),
            Self::Encoded(slot, _) => slot.len(),
        }
    }
}

impl ReceiveBuffer {
    /// Takes `expected` bytes into `memory`, which is not shorter.
    pub(crate) fn new(memory: Memory, expected: usize, progress: &Progress) -> Self {
        Self { memory, expected, found: 0, progress: Arc::clone(progress) }
    }

    /// Where the bytes that are to come belong.
    pub(crate) fn room(&mut self) -> &mut [u8] {
        let range = self.found.min(self.expected)..self.expected;
        match &mut self.memory {
            Memory::Raw(target, _) => &mut target[range],
            Memory::Encoded(slot, _) => &mut slot[range],
        }
    }

    /// So many bytes were put at the front of the [room](Self::room).
    pub(crate) fn advance(&mut self, bytes: usize) {
        if let Memory::Raw(target, hasher) = &mut self.memory {
            hasher.update(&target[self.found..self.found + bytes]);
        }
        self.found += bytes;
        (self.progress)(bytes as u64);
    }

    /// Copies `bytes` to where they belong. What has no room is counted alone.
    pub(crate) fn put(&mut self, bytes: &[u8]) {
        let (fit, excess) = bytes.split_at(bytes.len().min(self.room().len()));
        for piece in fit.chunks(COPY_BYTES) {
            self.room()[..piece.len()].copy_from_slice(piece);
            self.advance(piece.len());
        }
        self.found += excess.len();
    }

    /// Whether more came than has room. Nothing that comes now can mend that.
    pub(crate) fn is_overfull(&self) -> bool {
        self.found > self.expected
    }

    /// What was filled, and how many bytes came.
    pub(crate) fn into_parts(self) -> (Memory, usize) {
        (self.memory, self.found)
    }
}

impl fmt::Debug for ReceiveBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReceiveBuffer")
            .field("expected", &self.expected)
            .field("found", &self.found)
            .finish_non_exhaustive()
    }
}
