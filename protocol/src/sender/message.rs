//! [`SubscriptionMessage`]: a client's message about one of its subscriptions.

use crate::{AbortReason, ClientMessage, Epoch, RangeSet, SubscriptionId, Version};

/// A client's message about one of its subscriptions: the part of [`ClientMessage`] that a [`Sender`](super::Sender)
/// handles, and much smaller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SubscriptionMessage {
    /// Grants credit for this many chunks; with none, says that bytes arrived.
    Credit(u32),
    /// Reports the commit of a version, and whether the client keeps it as a base.
    Committed(Epoch, Version, bool),
    /// Gives a version up, or confirms that the server did.
    Abort(Epoch, Version, AbortReason),
    /// Acknowledges this version and all before it.
    Acknowledge(Epoch, Version),
    /// Declines the memory that was lent for a version.
    Decline(Epoch, Version),
    /// Requests chunks of a version.
    Request(Epoch, Version, ChunkRequest),
    /// Ends the subscription.
    Unsubscribe {
        /// Whether the client may come back for its place.
        keep_place: bool,
    },
}

/// A request for chunks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChunkRequest {
    /// The chunks, by any numbers.
    pub chunks: RangeSet,
    /// Whether the hashes of all selected chunks are wanted, too.
    pub hashes: bool,
    /// Whether the chunks are wanted again, and without a base.
    pub again: bool,
}

impl SubscriptionMessage {
    /// The subscription that a message is about, and the message to it; `Err` with a message of the session.
    #[expect(clippy::result_large_err, reason = "few exist at a time, each briefly")]
    pub fn of(message: ClientMessage) -> Result<(SubscriptionId, Self), ClientMessage> {
        Ok(match message {
            ClientMessage::Credit { subscription, chunks } => (subscription, Self::Credit(chunks)),
            ClientMessage::Committed { subscription, epoch, version, kept } => {
                (subscription, Self::Committed(epoch, version, kept))
            }
            ClientMessage::Abort { subscription, epoch, version, reason } => {
                (subscription, Self::Abort(epoch, version, reason))
            }
            ClientMessage::Acknowledge { subscription, epoch, version } => {
                (subscription, Self::Acknowledge(epoch, version))
            }
            ClientMessage::Request { subscription, epoch, version, chunks, hashes, again } => {
                let request = ChunkRequest { chunks, hashes, again };
                (subscription, Self::Request(epoch, version, request))
            }
            ClientMessage::Decline { subscription, epoch, version } => {
                (subscription, Self::Decline(epoch, version))
            }
            ClientMessage::Unsubscribe { subscription, keep_place } => {
                (subscription, Self::Unsubscribe { keep_place })
            }
            other => return Err(other),
        })
    }
}
