//! Hashes published versions in the background.
//!
//! For versions in the server's own memory that nobody follows when they are published: what is followed is hashed by its
//! senders, together with all that they need the bytes for. One thread of the lowest priority hashes for all servers of
//! the process. It holds no version: one that is dropped or replaced meanwhile is not hashed further.

use crate::{retained::Retained, topic::TopicState};
use std::sync::Weak;
use tensor_relay_device::{Lock, SourceError};
use tensor_relay_protocol::{ChunkHash, ChunkIndex};
use tensor_relay_transport::Workers;

/// A published version that is not hashed yet.
#[derive(Debug)]
pub(crate) struct Unhashed {
    pub(crate) version: Weak<Retained>,
    pub(crate) topic: Weak<TopicState>,
}

/// The versions that wait for the thread, oldest first, and whether it runs.
struct Queue {
    versions: Vec<Unhashed>,
    has_thread: bool,
}

static QUEUE: Lock<Queue> = Lock::new(Queue { versions: vec![], has_thread: false });

/// The most versions that wait. The oldest of more is hashed when it is sent, like all that are sent before their turn.
const WAITING_MAX: usize = 64;

/// Hashes a version in the background: of several, the one that was published last goes first.
pub(crate) fn begin(version: Unhashed, workers: Workers) {
    if workers == Workers::Inline {
        return version.hash();
    }
    let mut queue = QUEUE.lock();
    if queue.versions.len() == WAITING_MAX {
        queue.versions.remove(0);
    }
    queue.versions.push(version);
    if !queue.has_thread {
        queue.has_thread =
            Workers::spawn_idle("relay-hash", || std::iter::from_fn(next).for_each(|v| v.hash())).is_ok();
    }
}

/// The next version. `None` ends the calling thread.
fn next() -> Option<Unhashed> {
    let mut queue = QUEUE.lock();
    let next = queue.versions.pop();
    queue.has_thread = next.is_some(); // Under the lock, so that `begin` never counts on a thread that ends.
    next
}

impl Unhashed {
    /// Hashes the chunks from the last one on, since senders begin with the first one. A version that cannot be read is
    /// withdrawn.
    fn hash(&self) {
        let Some(version) = self.version.upgrade() else { return };
        let chunks = 0..version.payload.manifest().chunking().count();
        drop(version);
        for chunk in chunks.rev().map(ChunkIndex) {
            match self.hash_chunk(chunk) {
                Some(Ok(())) => {}
                Some(Err(error)) => return self.handle_unreadable(&error),
                None => return,
            }
        }
    }

    /// Hashes a chunk, if that is still to be done. Holds only its bytes meanwhile. `None` if the version was dropped or
    /// replaced.
    fn hash_chunk(&self, chunk: ChunkIndex) -> Option<Result<(), SourceError>> {
        let wanted = || self.version.upgrade().filter(|version| !version.has_left_retention());
        let Some(bytes) = wanted()?.payload.unhashed_bytes(chunk) else { return Some(Ok(())) };
        match bytes.map(|bytes| ChunkHash::of(&bytes)) {
            Ok(hash) => Some(wanted()?.payload.handle_read(chunk, hash)),
            Err(error) => Some(Err(error)),
        }
    }

    fn handle_unreadable(&self, error: &SourceError) {
        if let (Some(topic), Some(version)) = (self.topic.upgrade(), self.version.upgrade()) {
            topic.handle_unreadable(&version, error);
        }
    }
}
