//! The actions of a [`Subscriber`].

#[cfg(doc)]
use super::Subscriber;
use super::{Gap, StreamToken};
use crate::{AbortReason, Announce, ChunkHeader, ClientMessage, Dtype, Selection, VersionDigest, VersionId};
use std::{ops::Range, sync::Arc, time::Duration};

/// The next action for the driver of a [`Subscriber`].
#[derive(Debug, Clone)]
pub enum Action {
    /// Send this message.
    Send(ClientMessage),
    /// Allocate memory for a version, then call [`Subscriber::handle_placed`], or [`give_up`](Subscriber::give_up) or
    /// [`end`](Subscriber::end) if there is none.
    Place {
        /// The version.
        announce: Announce,
        /// The selected tensors.
        selection: Arc<Selection>,
        /// Whether it continues in its existing memory, since a part of it came over an earlier connection.
        resumes: bool,
    },
    /// Receive the chunk of a stream, then call [`Subscriber::handle_verified`] or
    /// [`handle_lost`](Subscriber::handle_lost).
    Receive {
        /// Its stream.
        stream: StreamToken,
        /// Its header.
        header: ChunkHeader,
        /// Its place in the selection's memory.
        range: Range<u64>,
        /// The dtype of its elements.
        dtype: Dtype,
    },
    /// Drop a stream unread.
    Discard(StreamToken),
    /// Make a version visible, then call [`Subscriber::handle_committed`], or [`end`](Subscriber::end) if its memory
    /// cannot be handed over.
    Commit(Commit),
    /// Release the memory of a version, and stop every stream that writes to it.
    Release {
        /// The version.
        id: VersionId,
        /// The reason.
        reason: Released,
    },
    /// Give up the current version with [`give_up`](Subscriber::give_up) or [`end`](Subscriber::end): it failed.
    Fail(VersionFault),
}

/// A version whose selected chunks are all received and verified.
#[derive(Debug, Clone)]
pub struct Commit {
    /// The version.
    pub announce: Announce,
    /// The selected tensors.
    pub selection: Arc<Selection>,
    /// The number of its chunks.
    pub chunks: u32,
    /// The number of reconnections during its transfer.
    pub resumed: u32,
    /// The versions missing right before it, in mode `every`.
    pub gap: Option<Gap>,
    /// Whether its epoch differs from the previous version's.
    pub new_epoch: bool,
}

/// Why the memory of a version is released.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Released {
    /// The server gave it up.
    ByServer(AbortReason),
    /// This end gave it up.
    Here,
    /// The next connection brings another version instead.
    Replaced,
}

/// Why a version failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VersionFault {
    /// Its chunks are verified one by one, but the digest of the whole differs from the server's.
    Mismatch {
        /// The server's digest.
        expected: VersionDigest,
        /// The digest of the chunks.
        found: VersionDigest,
    },
    /// No progress for this long.
    Stalled(Duration),
}
