//! What can go wrong for a client, by what its user can do about it.

use std::sync::Arc;
use tensor_relay_device::AllocError;
use tensor_relay_protocol::{
    AbortReason, Blame, CloseCode, EndReason, MessageError, Misbehaved, Topic, VersionDigest, VersionId,
};
use tensor_relay_transport::{
    ConnectError, LaneError,
    control::ControlError,
    ingress::{ReceiveError, ReceiveManifestError},
};

/// Why there is no session, or no longer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// No server was reached.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// This machine has no memory for a session.
    #[error("there is no memory for a session: {0}")]
    Memory(AllocError),
    /// The server did not say welcome within the deadline.
    #[error(
        "the server accepted the connection but did not greet within {timeout_ms} ms: it is overloaded or stuck"
    )]
    NoWelcome {
        /// How long it was waited for.
        timeout_ms: u128,
    },
    /// The server did not answer a question within the deadline.
    #[error(
        "the server did not answer within {timeout_ms} ms, though the connection lives: it is overloaded or stuck"
    )]
    NoAnswer {
        /// How long it was waited for.
        timeout_ms: u128,
    },
    /// The server turned this client away.
    #[error("the server refused this client: {0}")]
    Refused(LaneError),
    /// The session ended.
    #[error(transparent)]
    Lane(#[from] LaneError),
    /// The server sent what is no message.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// The server broke a rule.
    #[error(transparent)]
    Misbehaved(#[from] Misbehaved),
}

impl ClientError {
    /// What the server is told when this ends the session.
    pub(crate) fn close_code(&self) -> CloseCode {
        match self {
            Self::Message(error) => error.into(),
            Self::Misbehaved(error) => error.into(),
            Self::NoWelcome { .. } => CloseCode::TimedOut,
            _ => CloseCode::Done,
        }
    }

    /// Who has to act.
    pub fn blame(&self) -> Blame {
        match self {
            Self::Connect(ConnectError::Socket(_) | ConnectError::Tls(_)) | Self::Memory(_) => Blame::Local,
            Self::Connect(ConnectError::Unreachable { .. } | ConnectError::Resolve { .. }) => Blame::Network,
            Self::Lane(LaneError::TimedOut { .. }) => Blame::Network,
            _ => Blame::Peer,
        }
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

/// Why a subscription delivers nothing more. Clones are cheap: every later call says the same.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum SubscriptionError {
    /// The topic did not appear in time. A topic that this client may not see looks the same.
    #[error(
        "no topic {topic} appeared within {timeout_ms} ms: check its name against `tensor-relay list`, or wait longer"
    )]
    NotFound {
        /// Which topic.
        topic: Topic,
        /// How long it was waited for.
        timeout_ms: u128,
    },
    /// The server ended the subscription.
    #[error("the server ended the subscription to {topic}: {reason}")]
    Ended {
        /// Which topic.
        topic: Topic,
        /// Why.
        reason: EndReason,
    },
    /// The session is gone.
    #[error("the subscription to {topic} ended with its connection: {source}")]
    Disconnected {
        /// Which topic.
        topic: Topic,
        /// What ended it.
        source: Arc<ClientError>,
    },
    /// The bytes that came are not the ones that were published.
    #[error("{id} arrived damaged and was thrown away: {detail}")]
    Corrupt {
        /// Which version.
        id: VersionId,
        /// What did not match.
        detail: String,
    },
    /// There is no memory for a version.
    #[error("{id} does not fit: {detail}; raise the memory budget or drop older snapshots")]
    OverBudget {
        /// Which version.
        id: VersionId,
        /// The numbers.
        detail: String,
    },
    /// A version that was begun did not go on.
    #[error("{id} stalled: no byte of it came for {timeout_ms} ms, though the connection lives")]
    Stalled {
        /// Which version.
        id: VersionId,
        /// How long nothing came.
        timeout_ms: u128,
    },
}

impl SubscriptionError {
    pub(crate) fn disconnected(topic: &Topic, error: &Arc<ClientError>) -> Self {
        Self::Disconnected { topic: topic.clone(), source: Arc::clone(error) }
    }
}

/// Why one version is given up, inside.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TransferError {
    #[error(transparent)]
    Memory(#[from] AllocError),
    #[error(transparent)]
    Chunk(#[from] ReceiveError),
    #[error("its chunks together hash to {found} where the server said {expected}")]
    Mismatch { expected: VersionDigest, found: VersionDigest },
    #[error("no byte came for {0} ms")]
    Stalled(u128),
    #[error("its memory could not be handed over: {0}")]
    Sink(#[from] tensor_relay_device::SinkError),
}

impl TransferError {
    /// What the server is told.
    pub(crate) fn abort_reason(&self) -> AbortReason {
        match self {
            Self::Memory(_) => AbortReason::OverBudget,
            Self::Stalled(_) => AbortReason::Stalled,
            Self::Chunk(_) | Self::Mismatch { .. } | Self::Sink(_) => AbortReason::Corrupt,
        }
    }

    /// What the user is told.
    pub(crate) fn for_user(&self, id: &VersionId) -> SubscriptionError {
        let (id, detail) = (id.clone(), self.to_string());
        match self {
            Self::Memory(_) => SubscriptionError::OverBudget { id, detail },
            Self::Stalled(timeout_ms) => SubscriptionError::Stalled { id, timeout_ms: *timeout_ms },
            Self::Chunk(_) | Self::Mismatch { .. } | Self::Sink(_) => {
                SubscriptionError::Corrupt { id, detail }
            }
        }
    }
}

/// Why a session cannot go on, inside.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SessionError {
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error(transparent)]
    Manifest(#[from] ReceiveManifestError),
    #[error("the user closed the client")]
    ClosedHere,
}

impl SessionError {
    /// What the server is told.
    pub(crate) fn close_code(&self) -> CloseCode {
        match self {
            Self::Client(error) => error.close_code(),
            Self::Manifest(ReceiveManifestError::Lane(_)) | Self::ClosedHere => CloseCode::Done,
            Self::Manifest(_) => CloseCode::Malformed,
        }
    }
}

impl From<Misbehaved> for SessionError {
    fn from(error: Misbehaved) -> Self {
        Self::Client(error.into())
    }
}

impl From<LaneError> for SessionError {
    fn from(error: LaneError) -> Self {
        Self::Client(error.into())
    }
}

impl From<ControlError> for SessionError {
    fn from(error: ControlError) -> Self {
        Self::Client(error.into())
    }
}

impl From<SessionError> for ClientError {
    fn from(error: SessionError) -> Self {
        match error {
            SessionError::Client(error) => error,
            SessionError::Manifest(ReceiveManifestError::Lane(error)) => error.into(),
            SessionError::Manifest(error) => Self::Message(MessageError::Malformed(error.to_string())),
            SessionError::ClosedHere => Self::Lane(LaneError::ClosedHere),
        }
    }
}
