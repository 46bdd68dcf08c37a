//! Errors of a client, grouped by what its user can do.

mod session;
mod subscription;
mod transfer;

pub(crate) use session::SessionError;
pub use subscription::SubscriptionError;
pub(crate) use transfer::TransferError;

use std::sync::Arc;
use tensor_relay_device::AllocError;
use tensor_relay_protocol::{CloseCode, GLOBS_MAX, MessageError, ProtocolViolation, SELECTION_MAX_BYTES};
use tensor_relay_transport::{ConnectError, LaneError, Peer, control::ControlError};

/// Why a session could not be opened or has ended, or why a request failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// No server was reached.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// This machine has no memory for a session.
    #[error("there is no memory for a session: {0}")]
    Memory(AllocError),
    /// The server did not answer the first message of a connection before the deadline.
    #[error(
        "the server accepted the connection but did not answer on it within {timeout_ms} ms: it is overloaded or stuck"
    )]
    NoWelcome {
        /// The time waited.
        timeout_ms: u128,
    },
    /// The server did not answer a request before the deadline.
    #[error("the server did not answer within {timeout_ms} ms: it is overloaded, stuck or gone")]
    NoAnswer {
        /// The time waited.
        timeout_ms: u128,
    },
    /// The selection has more globs than fit in a message.
    #[error(
        "the selection has {globs} globs of {bytes} bytes in total, and at most {GLOBS_MAX} of {SELECTION_MAX_BYTES} bytes \
         are allowed: use fewer that match more"
    )]
    SelectionTooLarge {
        /// The number of globs.
        globs: usize,
        /// Their total length.
        bytes: usize,
    },
    /// Boxes that no server would accept: too many, or malformed.
    #[error("the boxes cannot be requested: {0}")]
    Boxes(&'static str),
    /// Mode `latest` cannot begin at a version that it may have to skip.
    #[error(
        "mode latest starts at the newest or the next version and skips older ones: to start at the oldest version, or at a \
         version number, use mode every"
    )]
    StartNeedsEvery,
    /// The session has the maximum number of watches.
    #[error(
        "this client watches {max} globs, the maximum of a session: drop a watch, or connect another client"
    )]
    TooManyWatches {
        /// The maximum.
        max: usize,
    },
    /// Another probe of this client is in progress.
    #[error("another probe of this client is in progress: wait until it ends")]
    ProbeInProgress,
    /// The server refuses this client's credentials.
    #[error("the server at {peer} refused access: {}", why_refused(*with_token, text))]
    Unauthorised {
        /// The server.
        peer: Peer,
        /// Whether the ticket has a token.
        with_token: bool,
        /// The server's explanation, which it gives to users of its own host alone; else empty.
        text: String,
    },
    /// The server refused this client.
    #[error("the server refused this client: {0}")]
    Refused(LaneError),
    /// The connection was lost or closed.
    #[error(transparent)]
    Lane(#[from] LaneError),
    /// The connection was lost, and the server was not reached again before a timeout.
    #[error(
        "the connection was lost ({lost}), and the server was not reached again within {timeout_ms} ms{}",
        last.as_ref().map_or(String::new(), |error| format!(": {error}"))
    )]
    NotReconnected {
        /// Why it was lost.
        lost: Arc<Self>,
        /// Why the last attempt to reconnect failed, if one did.
        last: Option<Arc<Self>>,
        /// The time for which reconnecting was tried.
        timeout_ms: u128,
    },
    /// Connections open, but none carries a chunk to its end.
    #[error(
        "{connections} connections in a row opened, and each was lost before a chunk arrived whole (the last one: {lost}): the path \
         cuts, stalls or damages them; `tensor-relay doctor` measures it, `--transport` chooses another transport, and \
         smaller chunks (`serve --chunk-size`) need less of each connection"
    )]
    NoProgress {
        /// Why the last one was lost.
        lost: Arc<Self>,
        /// The number of connections.
        connections: u32,
    },
    /// The session had ended before, or the connection was lost, for this reason.
    #[error(transparent)]
    Ended(Arc<Self>),
    /// The server sent an invalid message.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// The server broke a rule.
    #[error(transparent)]
    ProtocolViolation(#[from] ProtocolViolation),
}

impl ClientError {
    /// The close code sent to the server when this ends the session.
    pub(crate) fn close_code(&self) -> CloseCode {
        match self {
            Self::Message(error) => error.into(),
            Self::ProtocolViolation(error) => error.into(),
            Self::NoWelcome { .. } => CloseCode::TimedOut,
            _ => CloseCode::Done,
        }
    }

    /// Whether a retry may succeed: the cause is the network, an unavailable server, or a lack of local sockets or
    /// threads.
    pub(crate) fn is_retryable(&self) -> bool {
        match self {
            // Another program may answer while the server restarts.
            Self::Connect(error) => !matches!(error, ConnectError::Tls(_)),
            Self::Unauthorised { .. } => false,
            Self::Refused(_) => !self.is_unauthorised(),
            Self::Lane(error) => is_retryable(error),
            Self::NoWelcome { .. } | Self::NoAnswer { .. } => true,
            Self::Memory(_)
            | Self::ProbeInProgress
            | Self::TooManyWatches { .. }
            | Self::SelectionTooLarge { .. }
            | Self::Boxes(_)
            | Self::StartNeedsEvery
            | Self::Message(_)
            | Self::ProtocolViolation(_) => false,
            Self::NotReconnected { .. } | Self::NoProgress { .. } | Self::Ended(_) => false,
        }
    }

    /// Whether the path may have ended the connection: the server did not.
    pub(crate) fn is_by_path(&self) -> bool {
        matches!(
            self,
            Self::Lane(
                LaneError::TimedOut { .. }
                    | LaneError::ConnectionLost { .. }
                    | LaneError::Protocol { .. }
                    | LaneError::ControlUnread { .. }
            )
        )
    }

    /// Whether the server refuses this client's credentials, or has revoked its access: another ticket may help, a
    /// retry does not.
    pub fn is_unauthorised(&self) -> bool {
        let closed = |error: &LaneError| {
            matches!(error, LaneError::ClosedByPeer { code: Some(CloseCode::Unauthorised), .. })
        };
        match self {
            Self::Unauthorised { .. } => true,
            Self::Refused(error) | Self::Lane(error) => closed(error),
            Self::Ended(error) => error.is_unauthorised(),
            _ => false,
        }
    }

    /// The text of the close with which the server refused this client; empty if it gave none.
    pub(crate) fn refusal_text(&self) -> &str {
        match self {
            Self::Refused(LaneError::ClosedByPeer { text, .. })
            | Self::Lane(LaneError::ClosedByPeer { text, .. }) => text,
            _ => "",
        }
    }

    /// Whether this machine does not allow the connection, so that its user has to act.
    pub(crate) fn is_local(&self) -> bool {
        matches!(
            self,
            Self::Connect(
                ConnectError::Socket(_) | ConnectError::LaneAddress { .. } | ConnectError::Thread { .. }
            )
        )
    }
}

/// Why one version was not received.
#[derive(Debug, thiserror::Error)]
pub enum GetError {
    /// It could not be requested.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// It did not arrive.
    #[error(transparent)]
    Subscription(#[from] SubscriptionError),
}

/// Advice after a refusal. Over the network, the server does not give the reason, because it would help an attacker.
fn why_refused(with_token: bool, text: &str) -> &str {
    match with_token {
        _ if !text.is_empty() => text,
        false => {
            "the ticket carries no token, and this server requires one, or a key of this client that it knows: get a new \
             ticket from the server's operator (`serve` writes them, `tensor-relay tickets create` makes more)"
        }
        true => {
            "the ticket's token is not valid there: it has expired, was revoked, or is of another server or an older secret; \
             the server's operator can make a new one with `tensor-relay tickets create`, and the server's log gives the reason"
        }
    }
}

fn is_retryable(error: &LaneError) -> bool {
    match error {
        LaneError::ClosedLocally => false,
        LaneError::ClosedByPeer { code: Some(code), .. } => !matches!(
            code,
            CloseCode::Malformed
                | CloseCode::ProtocolViolation
                | CloseCode::Incompatible
                | CloseCode::Unauthorised
        ),
        _ => true,
    }
}

impl From<ControlError> for ClientError {
    fn from(error: ControlError) -> Self {
        match error {
            ControlError::Lane(error) => error.into(),
            ControlError::Message(error) => error.into(),
        }
    }
}
