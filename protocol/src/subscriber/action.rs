//! What a [`Subscriber`] wants done.

#[cfg(doc)]
use super::Subscriber;
use super::{Gap, StreamToken};
use crate::{AbortReason, Announce, ChunkHeader, ClientMessage, Dtype, Selection, VersionDigest, VersionId};
use std::{ops::Range, sync::Arc, time::Duration};

/// What the driver of a [`Subscriber`] is to do next.
#[derive(Debug, Clone)]
pub enum Action {
    /// Send this message.
    Send(ClientMessage),
    /// Find memory for a version, and then call [`Subscriber::handle_placed`], or one of
    /// [`give_up`](Subscriber::give_up) and [`end`](Subscriber::end) where there is none.
    Place {
        /// The version.
        announce: Announce,
        /// What is wanted of it.
        selection: Arc<Selection>,
        /// Whether it goes on in the memory that it has, since a part of it came over an earlier connection.
        resumes: bool,
    },
    /// Receive the chunk of a stream, and then call [`Subscriber::handle_verified`] or
    /// [`handle_lost`](Subscriber::handle_lost).
    Receive {
        /// Its stream.
        stream: StreamToken,
        /// Its header.
        header: ChunkHeader,
        /// Where it belongs in what is selected.
        range: Range<u64>,
        /// The dtype of its elements.
        dtype: Dtype,
    },
    /// Drop a stream unread.
    Discard(StreamToken),
    /// Make a version visible, and then call [`Subscriber::handle_committed`], or [`end`](Subscriber::end) where its
    /// memory cannot be handed over.
    Commit(Commit),
    /// Release the memory of a version, and stop every stream that writes to it.
    Release {
        /// The version.
        id: VersionId,
        /// Why.
        reason: Released,
    },
    /// Give the version under way up with [`give_up`](Subscriber::give_up) or [`end`](Subscriber::end): it cannot be had.
    Fail(VersionFault),
}

/// A version of which every selected chunk is here and verified.
#[derive(Debug, Clone)]
pub struct Commit {
    /// The version.
    pub announce: Announce,
    /// What was wanted of it.
    pub selection: Arc<Selection>,
    /// How many chunks it has.
    pub chunks: u32,
    /// Over how many more connections it came than one.
    pub resumed: u32,
    /// What is missing right before it, in mode `every`.
    pub gap: Option<Gap>,
    /// Whether it is of another epoch than the version before it.
    pub new_epoch: bool,
}

/// Why the memory of a version is released.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Released {
    /// The server gave it up.
    ByServer(AbortReason),
    /// This end gave it up.
    Here,
    /// The next connection brings another version.
    Replaced,
}

/// Why a version cannot be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VersionFault {
    /// Its chunks are verified one by one, but together they are not what the server said.
    Mismatch {
        /// What the server said.
        expected: VersionDigest,
        /// What the chunks give.
        found: VersionDigest,
    },
    /// Nothing moved for so long.
    Stalled(Duration),
}
