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
    #[error("the peer showed no valid grant within five seconds")]
    NoGrant,
    #[error("the peer showed a grant that no origin of this process made for it and this version")]
    WrongGrant,
    #[error("too many peers take versions from here")]
    TooManyTakers,
    #[error("the peer took nothing for a minute")]
    IdleTaker,
    #[error("an origin asked for a session that no member of this process has")]
    NotHere,
    #[error("an origin sent a message after its check")]
    AfterCheck,
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
            Self::NoHello | Self::NoGrant => Some(CloseCode::TimedOut),
            Self::WrongGrant | Self::NotHere => Some(CloseCode::Unauthorised),
            Self::TooManyTakers => Some(CloseCode::TooBusy),
            Self::IdleTaker => Some(CloseCode::Done),
            Self::AfterCheck => Some(CloseCode::ProtocolViolation),
            Self::ShuttingDown => Some(CloseCode::ShuttingDown),
            Self::TooBusy | Self::Evicted | Self::NoMemory(_) => Some(CloseCode::TooBusy),
            Self::Unauthorised(_) | Self::AccessLost(_) => Some(CloseCode::Unauthorised),
            Self::Incompatible(..) => Some(CloseCode::Incompatible),
            Self::Control(ControlError::Lane(LaneError::StreamAborted)) => Some(CloseCode::Done),
            Self::Control(ControlError::Lane(_)) | Self::Lane(_) => None,
        }
    }

    /// The text sent with the close, for the client's author: the rule that the client broke, the protocol revisions
    /// of client and server, or the user of this host that has no rights. Empty otherwise: to others, a reason would be
    /// of help in guessing credentials.
    pub(super) fn close_text(&self) -> String {
        match self {
            Self::ProtocolViolation(_) | Self::Control(ControlError::Message(_)) | Self::Incompatible(..) => {
                self.to_string()
            }
            Self::Unauthorised(denied @ Denied::User(_)) | Self::AccessLost(denied @ Denied::User(_)) => {
                denied.to_string()
            }
            _ => String::new(),
        }
    }

    /// Why a client that broke no rule was refused: it has no right, or the server no room.
    pub(super) fn refusal(&self) -> Option<Reason> {
        match self {
            Self::Unauthorised(denied) => Some(denied.into()),
            Self::TooBusy | Self::Evicted | Self::NoMemory(_) => self.failure().map(Reason::Named),
            Self::NoGrant | Self::WrongGrant | Self::TooManyTakers | Self::NotHere => {
                self.failure().map(Reason::Named)
            }
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
            Self::NoGrant => Some("no_grant"),
            Self::WrongGrant => Some("wrong_grant"),
            Self::TooManyTakers => Some("too_many_takers"),
            Self::NotHere => Some("no_such_member"),
            Self::AfterCheck => Some("protocol_violation"),
            Self::IdleTaker | Self::ShuttingDown => None,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{LocalUser, Standing};
    use tensor_relay_protocol::MessageError;
    use tensor_relay_transport::Peer;

    fn no_memory() -> SessionError {
        SessionError::NoMemory(AllocError::OverBudget { asked_bytes: 2, in_use_bytes: 0, budget_bytes: 1 })
    }

    fn malformed() -> SessionError {
        ControlError::Message(MessageError::MissingField("topic")).into()
    }

    fn violation() -> SessionError {
        ProtocolViolation::CreditExceeded.into()
    }

    fn at_control(error: LaneError) -> SessionError {
        ControlError::Lane(error).into()
    }

    fn peer() -> Peer {
        Peer::Network(([10, 0, 0, 1], 4747).into())
    }

    fn closed_by_peer(code: Option<CloseCode>) -> LaneError {
        LaneError::ClosedByPeer { peer: peer(), code, text: String::new() }
    }

    fn user_without_rights() -> Denied {
        Denied::User(LocalUser { uid: 7, standing: Standing::Other })
    }

    /// PROTOCOL.md §9.1.
    #[test]
    fn a_close_has_the_code_of_its_cause_and_explains_broken_rules() {
        for (end, code, is_explained) in [
            (malformed(), CloseCode::Malformed, true),
            (violation(), CloseCode::ProtocolViolation, true),
            (SessionError::Incompatible(2, 3), CloseCode::Incompatible, true),
            (SessionError::NoHello, CloseCode::TimedOut, false),
            (SessionError::ShuttingDown, CloseCode::ShuttingDown, false),
            (SessionError::TooBusy, CloseCode::TooBusy, false),
            (SessionError::Evicted, CloseCode::TooBusy, false),
            (no_memory(), CloseCode::TooBusy, false),
            (Denied::Expired.into(), CloseCode::Unauthorised, false),
            (SessionError::AccessLost(Denied::Expired), CloseCode::Unauthorised, false),
            (user_without_rights().into(), CloseCode::Unauthorised, true),
            (SessionError::AccessLost(user_without_rights()), CloseCode::Unauthorised, true),
            (SessionError::NoGrant, CloseCode::TimedOut, false),
            (SessionError::WrongGrant, CloseCode::Unauthorised, false),
            (SessionError::NotHere, CloseCode::Unauthorised, false),
            (SessionError::TooManyTakers, CloseCode::TooBusy, false),
            (SessionError::IdleTaker, CloseCode::Done, false),
            (at_control(LaneError::StreamAborted), CloseCode::Done, false),
        ] {
            assert_eq!((end.close_code(), !end.close_text().is_empty()), (Some(code), is_explained), "{end}");
        }
        for end in [at_control(LaneError::ClosedLocally), LaneError::ClosedLocally.into()] {
            assert_eq!((end.close_code(), end.close_text().as_str()), (None, ""), "the lane is closed");
        }
    }

    #[test]
    fn failures_are_counted_and_clients_that_broke_no_rule_are_refused() {
        let peer = peer();
        for (end, counter) in [
            (malformed(), "protocol_violation"),
            (violation(), "protocol_violation"),
            (SessionError::Incompatible(2, 3), "incompatible"),
            (SessionError::NoHello, "no_hello"),
            (SessionError::AccessLost(Denied::Expired), "access_lost"),
            (LaneError::TimedOut { peer }.into(), "timed_out"),
            (at_control(closed_by_peer(Some(CloseCode::Malformed))), "closed_by_peer"),
            (closed_by_peer(None).into(), "closed_by_peer"),
            (at_control(LaneError::Reset { peer }), "connection_lost"),
        ] {
            assert_eq!((end.failure(), end.refusal()), (Some(counter), None), "{end}");
            assert!(!end.is_close_by_client(), "{end}");
        }
        for (end, counter) in [
            (SessionError::TooBusy, "too_busy"),
            (SessionError::Evicted, "evicted"),
            (no_memory(), "no_memory"),
            (SessionError::NoGrant, "no_grant"),
            (SessionError::WrongGrant, "wrong_grant"),
            (SessionError::TooManyTakers, "too_many_takers"),
            (SessionError::NotHere, "no_such_member"),
        ] {
            assert_eq!(
                (end.failure(), end.refusal()),
                (Some(counter), Some(Reason::Named(counter))),
                "{end}"
            );
        }
        let denied = SessionError::from(Denied::Expired);
        let refusal = Some(Reason::from(&Denied::Expired));
        assert_eq!((denied.failure(), denied.refusal()), (Some("unauthorised"), refusal));
    }

    #[test]
    fn an_ordinary_end_is_no_failure() {
        for (end, is_close_by_client) in [
            (at_control(LaneError::StreamAborted), true),
            (at_control(closed_by_peer(Some(CloseCode::Done))), true),
            (closed_by_peer(Some(CloseCode::Done)).into(), true),
            (LaneError::ClosedLocally.into(), false),
            (SessionError::ShuttingDown, false),
        ] {
            let found = (end.is_close_by_client(), end.failure(), end.refusal());
            assert_eq!(found, (is_close_by_client, None, None), "{end}");
        }
    }
}
