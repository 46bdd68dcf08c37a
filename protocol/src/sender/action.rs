//! The actions of a [`Sender`].

#[cfg(doc)]
use super::Sender;
use super::{Claim, SendAction};
use crate::{AbortReason, EndReason, Epoch, Place, Version};
use std::time::Instant;

/// The next action for the driver of a [`Sender`] of versions `V`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SenderAction<V> {
    /// Compare what the client claims to hold with the content of this version, then call
    /// [`Sender::handle_compared`].
    Compare(Claim, V),
    /// Record the reader's acknowledgement of this version and all before it.
    Acknowledge(Epoch, Version),
    /// Announce a version, then call [`Sender::handle_selected`] with what the client selects of it.
    Announce(Announcement<V>),
    /// Send the client a `Waiting`, because the version under way cannot be read at the moment.
    Waiting(V),
    /// Begin a send of the version under way. When it ends, call [`Sender::handle_sent`] or
    /// [`handle_unread`](Sender::handle_unread).
    Send(SendAction),
    /// Begin this send again, at this time.
    SendAgain(SendAction, Instant),
    /// Cancel all sends of a version, and send the client an `Abort`. The version ends with the client's answer.
    Abort(V, AbortReason),
    /// The client committed a version: cancel its remaining sends, of chunks that arrived twice.
    Committed {
        /// The version.
        version: V,
        /// Whether the client keeps a copy as a base for deltas.
        kept: bool,
    },
    /// The client aborted a version, or confirmed that this end did: cancel all its sends.
    Aborted(V, AbortReason),
    /// Release the client's base: it has none, or will not use it.
    ReleaseBase,
    /// The subscription has ended. No action follows.
    End(Ended),
}

/// The beginning of a version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Announcement<V> {
    /// The version.
    pub version: V,
    /// The number of versions that the client missed before it.
    pub skipped: u64,
    /// Whether the client discards what it holds, and receives the version in full.
    pub afresh: bool,
    /// Whether the version is shared: the client may take its chunks from others.
    pub shared: bool,
    /// Whether the client has a later version of this epoch, which was never published here.
    pub is_ahead: bool,
    /// The place that the reader had before it was given up, for its client.
    pub lost_place: Option<Place>,
}

/// Why a subscription ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// The client unsubscribed. With `keep_place`, it may come back for its place and its base.
    ByClient {
        /// Whether the client may come back.
        keep_place: bool,
    },
    /// The server ended it: send the client an `End`.
    ByServer(EndReason),
}
