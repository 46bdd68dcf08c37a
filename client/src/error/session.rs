//! Errors that end a connection or session.

use super::{ClientError, is_retryable};
use crate::connection::CloseReason;
use tensor_relay_protocol::{CloseCode, MessageError, ProtocolViolation};
use tensor_relay_transport::{LaneError, control::ControlError, ingress::ReceiveManifestError};

/// Why a session cannot continue: the internal form of [`ClientError`].
#[derive(Debug, thiserror::Error)]
pub(crate) enum SessionError {
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error(transparent)]
    Manifest(#[from] ReceiveManifestError),
    #[error("the user closed the client")]
    ClosedLocally,
}

impl SessionError {
    /// Whether another connection may succeed.
    pub(crate) fn is_retryable(&self) -> bool {
        match self {
            Self::Client(error) => error.is_retryable(),
            Self::Manifest(ReceiveManifestError::Lane(error)) => is_retryable(error),
            Self::Manifest(_) | Self::ClosedLocally => false,
        }
    }

    /// Whether the path may have ended the connection.
    pub(crate) fn is_by_path(&self) -> bool {
        match self {
            Self::Client(error) => error.is_by_path(),
            Self::Manifest(ReceiveManifestError::Lane(_)) => true,
            Self::Manifest(_) | Self::ClosedLocally => false,
        }
    }

    /// The close reason sent to the server.
    pub(crate) fn close_reason(&self) -> CloseReason {
        let by_user = matches!(self, Self::ClosedLocally);
        CloseReason { code: self.close_code(), text: self.to_string(), by_user }
    }

    fn close_code(&self) -> CloseCode {
        match self {
            Self::Client(error) => error.close_code(),
            Self::Manifest(ReceiveManifestError::Lane(_)) | Self::ClosedLocally => CloseCode::Done,
            Self::Manifest(_) => CloseCode::Malformed,
        }
    }
}

impl From<ProtocolViolation> for SessionError {
    fn from(error: ProtocolViolation) -> Self {
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
            SessionError::ClosedLocally => Self::Lane(LaneError::ClosedLocally),
        }
    }
}
