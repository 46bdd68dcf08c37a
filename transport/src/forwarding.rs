//! Forwarding: what a client receives is offered to others by a server of the same process, while it arrives: to its peers
//! (PROTOCOL.md §3.15), or by a relay to its own clients (§3.20).
//!
//! The client calls these traits; the server implements them. Neither knows the other, and no call waits: a version is
//! received and committed as fast as without forwarding, whatever those who take it do.

use bytes::Bytes;
use std::{fmt::Debug, ops::Range, sync::Arc};
use tensor_relay_device::HostSource;
use tensor_relay_protocol::{
    ChunkHeader, EncodingEntry, EndReason, LaneGrant, Manifest, Metadata, RangeSet, RelayPath, Topic,
    VersionId,
};

/// Offers the versions that one client session receives. One value serves the whole session, whose origin it knows.
pub trait Forward: Debug + Send + Sync {
    /// Handles that the session's connection to its origin began, was lost, or ended. Call it after each `Welcome` of a
    /// server that offers the feature `peers`, before `Share`. Grants of a lost session are accepted for ten minutes more;
    /// those of an ended one no longer, and what is being sent by them ends.
    fn set_origin(&self, origin: Origin);

    /// Begins a version whose manifest is here: whoever may take it can take from now on what is verified of it. `None` if
    /// nobody could: it is not shared, or the implementer has no room. It is offered until the result is dropped, and by a
    /// relay for longer, if it was committed.
    fn begin(&self, version: ReceivedVersion) -> Option<Arc<dyn Forwarded>>;

    /// Handles `Revoke`: the owner of the key `taker` may take nothing of `topic` any longer, by no grant that the origin made
    /// so far; what is being sent to it ends. Or it may again, if its right was `restored`.
    fn revoke(&self, topic: &Topic, taker: [u8; 32], restored: bool);

    /// Handles the end of the subscription to `topic` at its origin: nothing of it is offered any longer, and takers are
    /// told the reason.
    fn end(&self, topic: &Topic, reason: EndReason);
}

/// The connection to the origin, as forwarding sees it.
#[derive(Debug, Clone, Copy)]
pub enum Origin {
    /// There is a session with this number and grant of lanes, from which grants and proofs are derived. It replaces the
    /// previous one, which counts as lost.
    Session(u64, LaneGrant),
    /// The connection was lost; the client tries to reach the origin again.
    Lost,
    /// The origin ended the session, or the user did.
    Ended,
}

/// A version that begins to arrive.
#[derive(Debug, Clone)]
pub struct ReceivedVersion {
    /// Its id at its origin.
    pub id: VersionId,
    /// Its manifest.
    pub manifest: Arc<Manifest>,
    /// What its publisher says about it.
    pub metadata: Metadata,
    /// Whether its receivers take it from each other.
    pub shared: bool,
    /// The relays that it came through.
    pub relays: RelayPath,
    /// Where its bytes are, if the whole payload is received into memory of this process. `None` for a part of the payload,
    /// a GPU, or the user's buffers: then raw chunks are kept like encoded ones.
    pub memory: Option<Arc<dyn ReceivedMemory>>,
}

/// The memory of a version's payload, from the first chunk to long after the commit.
pub trait ReceivedMemory: Debug + Send + Sync {
    /// Copies the bytes of `range` of the payload, which were verified, to `out`, which is as long. Returns false if they
    /// are not here: they are being received again, or the version was given up. Waits for nobody, and keeps nothing.
    fn copy(&self, range: Range<u64>, out: &mut [u8]) -> bool;
}

/// A version on offer while it arrives and, after the commit, until this is dropped. Dropping the last reference withdraws
/// it: takers are told, and its memory is free at once. Tasks that receive chunks should hold a
/// [`Weak`](std::sync::Weak) one.
pub trait Forwarded: Debug + Send + Sync {
    /// Copies the encoded bytes of a chunk that was verified, so that they can be sent again; `None` if they are raw bytes
    /// that can be read from the version's memory, or if there is no room within the version's budget. Called on a worker
    /// or on a lane's thread.
    fn keep(&self, header: &ChunkHeader, encoded: &[u8]) -> Option<Bytes>;

    /// Handles a chunk that is verified and in its place, with what was [kept](Self::keep) of it. Returns whether it can be
    /// passed on. It is offered once its entry is known and names the same codec and base.
    fn handle_verified(&self, header: &ChunkHeader, encoding: Option<Bytes>) -> bool;

    /// Handles entries of `Encodings`. They may come before and after their chunks.
    fn handle_encodings(&self, entries: &[EncodingEntry]);

    /// The chunks on offer: what the client tells the origin in `Held`.
    fn offered(&self) -> RangeSet;

    /// Handles the commit. The version stays on offer. `whole` is its payload, if it is in one piece of host memory that
    /// nobody writes.
    fn handle_committed(&self, whole: Option<HostSource>);
}
