//! [`LaneEnd`]: why a lane ended, and what its client is told.

use tensor_relay_device::AllocError;
use tensor_relay_protocol::{ClientMessage, CloseCode, InstanceId};
use tensor_relay_transport::{LaneError, control::ControlError, sending::JoinRefused};

/// Why a lane ended, for the log and the client.
#[derive(Debug, thiserror::Error)]
pub(super) enum LaneEnd {
    /// There is no such session, or the grant is wrong: the client is not told which.
    #[error("it has no valid grant for a session of this server")]
    NoSuchSession,
    #[error(
        "it belongs to a session of server process {0}; a load balancer or similar device distributes the lanes of one \
         session over several servers"
    )]
    WrongInstance(InstanceId),
    #[error(
        "its session has, or all sessions together have, the maximum number of lanes, or others need its share"
    )]
    TooMany,
    #[error("there is no memory for another lane: {0}")]
    NoMemory(AllocError),
    #[error("its number is in use in its session, or too large")]
    NumberUnavailable,
    #[error(
        "it sent a message after it had joined; only the control stream of the session's first connection carries \
         messages"
    )]
    SentMessage,
    #[error("it is silent")]
    Silent,
    #[error("its client retired it, or its session ended")]
    Retired,
    #[error(transparent)]
    Control(#[from] ControlError),
    #[error(transparent)]
    Lane(#[from] LaneError),
}

impl From<JoinRefused> for LaneEnd {
    fn from(refused: JoinRefused) -> Self {
        match refused {
            JoinRefused::Full => Self::TooMany,
            JoinRefused::Ended => Self::NoSuchSession,
            JoinRefused::NumberUnavailable => Self::NumberUnavailable,
            JoinRefused::Retired => Self::Retired,
        }
    }
}

impl LaneEnd {
    /// The end of a joined lane whose control stream returned `read`. The stream carries no more messages; a client that
    /// ends it retires the lane.
    pub(super) fn from_message(read: Result<ClientMessage, ControlError>) -> Self {
        match read {
            Ok(_) => Self::SentMessage,
            Err(ControlError::Lane(LaneError::StreamAborted)) => Self::Retired,
            Err(error) => error.into(),
        }
    }

    /// The close code for the client.
    pub(super) fn close_code(&self) -> CloseCode {
        match self {
            Self::NoSuchSession => CloseCode::Unauthorised,
            Self::WrongInstance(_) => CloseCode::WrongInstance,
            Self::TooMany | Self::NoMemory(_) => CloseCode::TooBusy,
            Self::NumberUnavailable | Self::SentMessage => CloseCode::ProtocolViolation,
            Self::Control(ControlError::Message(error)) => error.into(),
            Self::Silent | Self::Retired | Self::Control(ControlError::Lane(_)) | Self::Lane(_) => {
                CloseCode::Done
            }
        }
    }

    /// The text for the client: the rule that it broke. Empty otherwise.
    pub(super) fn close_text(&self) -> String {
        match self {
            Self::NumberUnavailable | Self::SentMessage | Self::Control(ControlError::Message(_)) => {
                self.to_string()
            }
            _ => String::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensor_relay_protocol::MessageError;

    /// PROTOCOL.md §3.10: only a client that broke a rule is told which.
    #[test]
    fn a_client_is_told_what_it_may_know() {
        let memory = AllocError::OverBudget { asked_bytes: 2, in_use_bytes: 0, budget_bytes: 1 };
        let malformed = ControlError::Message(MessageError::MissingField("lane"));
        for (end, code, is_explained) in [
            (JoinRefused::Ended.into(), CloseCode::Unauthorised, false),
            (LaneEnd::NoSuchSession, CloseCode::Unauthorised, false),
            (LaneEnd::WrongInstance(InstanceId([1; 16])), CloseCode::WrongInstance, false),
            (JoinRefused::Full.into(), CloseCode::TooBusy, false),
            (LaneEnd::NoMemory(memory), CloseCode::TooBusy, false),
            (JoinRefused::NumberUnavailable.into(), CloseCode::ProtocolViolation, true),
            (JoinRefused::Retired.into(), CloseCode::Done, false),
            (LaneEnd::Silent, CloseCode::Done, false),
            (LaneError::ClosedLocally.into(), CloseCode::Done, false),
            (LaneEnd::from_message(Ok(ClientMessage::List)), CloseCode::ProtocolViolation, true),
            (LaneEnd::from_message(Err(malformed)), CloseCode::Malformed, true),
            (LaneEnd::from_message(Err(LaneError::ClosedLocally.into())), CloseCode::Done, false),
        ] {
            assert_eq!((end.close_code(), !end.close_text().is_empty()), (code, is_explained), "{end}");
        }
    }

    #[test]
    fn a_client_retires_a_lane_by_ending_its_control_stream() {
        let end = LaneEnd::from_message(Err(LaneError::StreamAborted.into()));
        assert!(matches!(end, LaneEnd::Retired), "{end}");
        assert_eq!(end.close_code(), CloseCode::Done);
    }
}
