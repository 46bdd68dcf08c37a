//! The actions of a [`Subscriber`].

#[cfg(doc)]
use super::Subscriber;
use super::{Gap, StreamToken};
use crate::{
    AbortReason, Announce, BoxError, ChunkHeader, ChunkIndex, ClientMessage, Dtype, EncodingHash, Selection,
    Source, SubscriptionId, VersionDigest, VersionId,
};
use std::{ops::Range, sync::Arc, time::Duration};

/// The next action for the driver of a [`Subscriber`].
#[derive(Debug, Clone)]
pub enum Action {
    /// Send this message.
    Send(ClientMessage),
    /// Allocate memory for a version, then call [`Subscriber::handle_placed`]; if there is no memory,
    /// [`give_up`](Subscriber::give_up) or [`end_subscription`](Subscriber::end_subscription).
    Place {
        /// The version.
        announce: Announce,
        /// The selected tensors.
        selection: Arc<Selection>,
        /// Whether the version continues in its existing memory, with the chunks verified on earlier connections.
        resumes: bool,
    },
    /// Receive the chunk of a stream, then call [`Subscriber::handle_verified`] or
    /// [`handle_lost`](Subscriber::handle_lost).
    Receive {
        /// The stream.
        stream: StreamToken,
        /// The chunk's header.
        header: ChunkHeader,
        /// The chunk's range in the selection's memory.
        range: Range<u64>,
        /// The dtype of the chunk's elements.
        dtype: Dtype,
        /// What the header and the encoded bytes must hash to, if they come from a peer. If they do not, nothing may have
        /// been decoded or applied to a base: call [`Subscriber::handle_wrong_encoding`].
        encoding: Option<EncodingHash>,
    },
    /// The version is large: call [`Subscriber::ask_source`] for each other server with the same content, except those
    /// that were asked already. This action is repeated while that is of use.
    Seek,
    /// Warn that a source has other content than the origin under the same version. It is not used any more.
    SourceDiffers(SubscriptionId),
    /// Close the connection to a source that sends nothing, although it owes chunks. Its loss follows.
    CloseSource(SubscriptionId),
    /// The peers that may be used for the current version, which is shared, in place of earlier ones: connect to those that
    /// are not connected, and call [`Subscriber::ask_peer`] for each that is and was not asked, as long as
    /// [`Subscriber::wants_peers`]. Connections to others are of no use for this version. This action is repeated while
    /// that is of use; it may name peers whose connections failed.
    Peers(Vec<Source>),
    /// A peer sent what the origin does not vouch for, or broke a rule: close the connection to it, and use its key no more
    /// in this session. Its loss follows.
    PeerLied(SubscriptionId),
    /// Drop a stream without reading it.
    Discard(StreamToken),
    /// Make a version visible, then call [`Subscriber::handle_committed`]; if it cannot be made visible,
    /// [`end_subscription`](Subscriber::end_subscription).
    Commit(Commit),
    /// Stop every stream that writes to a version's memory, and release that memory.
    Release {
        /// The version.
        id: VersionId,
        /// The reason.
        reason: Released,
    },
    /// The server waits for the source of the current version. It tries again, until that succeeds or a newer version
    /// is published.
    Waiting,
    /// The current version failed: call [`give_up`](Subscriber::give_up) or
    /// [`end_subscription`](Subscriber::end_subscription).
    Fail(VersionFault),
}

/// A version whose selected chunks are all received and verified.
#[derive(Debug, Clone)]
pub struct Commit {
    /// The version.
    pub announce: Announce,
    /// The selected tensors.
    pub selection: Arc<Selection>,
    /// The number of selected chunks.
    pub chunks: u32,
    /// Their digest.
    pub digest: VersionDigest,
    /// The number of reconnections during the version's transfer.
    pub reconnections: u32,
    /// In mode `every`: the missing versions right before this one.
    pub gap: Option<Gap>,
    /// Whether this version does not continue the last committed one: its epoch differs, or it is other content under
    /// the same number.
    pub new_epoch: bool,
}

/// Why the memory of a version is released.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Released {
    /// The server gave the version up.
    ByServer(AbortReason),
    /// The client gave the version up.
    ByClient,
    /// On the next connection, the server announced another version or other content.
    Replaced,
}

/// Why a version failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VersionFault {
    /// Every chunk is verified, but the version's digest differs from the server's.
    Mismatch {
        /// The server's digest.
        expected: VersionDigest,
        /// The digest of the chunks.
        found: VersionDigest,
    },
    /// A chunk's bytes have the hash in its header, but not the one in the list of the same server.
    OtherHash(ChunkIndex),
    /// A box that was requested does not fit it.
    Box(BoxError),
    /// No byte was received for at least this long.
    Stalled(Duration),
}
