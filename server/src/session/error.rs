//! [`SessionError`]: why a session ended, with its close code and its name in the statistics.

use crate::{access::Denied, refusals::Reason};
use tensor_relay_device::AllocError;
use tensor_relay_protocol::{CloseCode, PROTOCOL_REVISIONS, ProtocolViolation};
use tensor_relay_transport::{LaneError, control::ControlError};

/// Why a session ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum SessionError {
    #[error(transparent)]
    Control(#[from] ControlError),
    #[error(transparent)]
    Lane(#[from] LaneError),
    #[error(transparent)]
    ProtocolViolation(#[from] ProtocolViolation),
    #[error("the client sent no Hello within the deadline")]
    NoHello,
    #[error("the server is shutting down")]
    ShuttingDown,
    #[error("the server has the maximum number of sessions (--sessions)")]
    TooBusy,
    #[error("its principal has the most sessions, and another needed one of them or its memory (--sessions)")]
    Evicted,
    #[error("there is no memory for another session: {0}")]
    NoMemory(AllocError),
    #[error("access was refused: {0}")]
    Unauthorised(#[from] Denied),
    #[error("the client lost its access: {0}")]
    AccessLost(Denied),
    #[error(
        "the client supports protocol revisions {0} to {1}, this server {min} to {max}",
        min = PROTOCOL_REVISIONS.start(), max = PROTOCOL_REVISIONS.end()
    )]
    Incompatible(u32, u32),
}

impl SessionError {
    /// Whether the client ended it: by a close, or by the end of its control stream.
    pub(super) fn is_close_by_client(&self) -> bool {
        let (Self::Control(ControlError::Lane(error)) | Self::Lane(error)) = self else { return false };
        matches!(
            error,
            LaneError::StreamAborted | LaneError::ClosedByPeer { code: Some(CloseCode::Done), .. }
        )
    }

    /// The close code for the client, unless the lane is closed already.
    pub(super) fn close_code(&self) -> Option<CloseCode> {
        match self {
            Self::Control(ControlError::Message(error)) => Some(error.into()),
            Self::ProtocolViolation(error) => Some(error.into()),
            Self::NoHello => Some(CloseCode::TimedOut),
            Self::ShuttingDown => Some(CloseCode::ShuttingDown),
            Self::TooBusy | Self::Evicted | Self::NoMemory(_) => Some(CloseCode::TooBusy),
            Self::Unauthorised(_) | Self::AccessLost(_) => Some(CloseCode::Unauthorised),
            Self::Incompatible(..) => Some(CloseCode::Incompatible),
            Self::Control(ControlError::Lane(LaneError::StreamAborted)) => Some(CloseCode::Done),
            Self::Control(ControlError::Lane(_)) | Self::Lane(_) => None,
        }
    }

    /// Why a client that broke no rule was refused: it has no right, or the server no room.
    pub(super) fn refusal(&self) -> Option<Reason> {
        match self {
            Self::Unauthorised(denied) => Some(denied.into()),
            Self::TooBusy | Self::Evicted | Self::NoMemory(_) => self.failure().map(Reason::Named),
            _ => None,
        }
    }

    /// The name of its failure counter; `None` if the client ended the session or the server shuts down.
    pub(super) fn failure(&self) -> Option<&'static str> {
        match self {
            Self::Control(ControlError::Message(_)) | Self::ProtocolViolation(_) => {
                Some("protocol_violation")
            }
            Self::NoHello => Some("no_hello"),
            Self::Unauthorised(_) => Some("unauthorised"),
            Self::AccessLost(_) => Some("access_lost"),
            Self::TooBusy => Some("too_busy"),
            Self::Evicted => Some("evicted"),
            Self::NoMemory(_) => Some("no_memory"),
            Self::Incompatible(..) => Some("incompatible"),
            Self::Control(ControlError::Lane(error)) | Self::Lane(error) => lane_failure(error),
            Self::ShuttingDown => None,
        }
    }
}

/// The name of the counter for a lane's failure; `None` if the client or this server closed the lane.
fn lane_failure(error: &LaneError) -> Option<&'static str> {
    match error {
        LaneError::TimedOut { .. } => Some("timed_out"),
        LaneError::ClosedByPeer { code: Some(CloseCode::Done), .. } => None,
        LaneError::ClosedByPeer { .. } => Some("closed_by_peer"),
        LaneError::StreamAborted | LaneError::ClosedLocally => None,
        _ => Some("connection_lost"),
    }
}
