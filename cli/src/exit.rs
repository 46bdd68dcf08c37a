//! The exit codes and their errors. `--help` and docs/operation.md repeat the codes.

use crate::{
    publish::WaitTimeout,
    subscribe::{NoMatchingTopic, NotWithin, NothingSelected, hook::HookError},
};
use std::error::Error;
use tensor_relay_client::{ClientError, ConnectError, EndReason, SubscriptionError, TicketError};
use tensor_relay_server::sidecar::{self, ConnectionLost, PublishError, Refusal};

/// An exit code of `tensor-relay`. clap also exits with 2 for wrong usage; the code after a signal is 128 plus the
/// signal's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Exit {
    Done = 0,
    Failed = 1,
    Usage = 2,
    Unreachable = 3,
    Refused = 4,
    NotFound = 5,
    Damaged = 6,
    Missed = 7,
    HookFailed = 8,
    /// The reader's place was taken by another process: a restart would take it back.
    ReaderReplaced = 9,
    HungUp = 129,
    Interrupted = 130,
    Terminated = 143,
}

/// An error of usage that clap cannot detect.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct UsageError(pub(crate) String);

/// The code of the first error in the chain of causes that has one.
pub(crate) fn code_of(error: &anyhow::Error) -> Exit {
    error.chain().find_map(code_of_cause).unwrap_or(Exit::Failed)
}

/// An error with its causes, in one line. A cause that is already part of the text is not repeated.
pub(crate) fn message_of(error: &anyhow::Error) -> String {
    error.chain().fold(String::new(), |message, cause| match cause.to_string() {
        cause if message.is_empty() => cause,
        cause if message.contains(&cause) => message,
        cause => format!("{message}: {cause}"),
    })
}

fn code_of_cause(cause: &(dyn Error + 'static)) -> Option<Exit> {
    match () {
        () if cause.is::<TicketError>() || cause.is::<UsageError>() => Some(Exit::Usage),
        () if cause.is::<NoMatchingTopic>() || cause.is::<NothingSelected>() => Some(Exit::NotFound),
        () if cause.is::<HookError>() => Some(Exit::HookFailed),
        () if cause.is::<NotWithin>() || cause.is::<WaitTimeout>() || cause.is::<ConnectionLost>() => {
            Some(Exit::Unreachable)
        }
        () => cause
            .downcast_ref()
            .map(code_of_client_error)
            .or_else(|| cause.downcast_ref().map(code_of_subscription_error))
            .or_else(|| cause.downcast_ref().map(code_of_socket_error))
            .or_else(|| cause.downcast_ref().and_then(code_of_publish_error)),
    }
}

fn code_of_publish_error(error: &PublishError) -> Option<Exit> {
    match error {
        PublishError::ConnectionLost(_) => Some(Exit::Unreachable),
        PublishError::Refused { reason: Refusal::Forbidden, .. } => Some(Exit::Refused),
        _ => None,
    }
}

/// The code of a failed connection to a publish socket.
fn code_of_socket_error(error: &sidecar::ConnectError) -> Exit {
    match error {
        sidecar::ConnectError::NotPermitted { .. }
        | sidecar::ConnectError::Refused { .. }
        | sidecar::ConnectError::Stranger { .. } => Exit::Refused,
        _ => Exit::Unreachable,
    }
}

fn code_of_client_error(error: &ClientError) -> Exit {
    match error {
        error if error.is_unauthorised() => Exit::Refused,
        error if is_wrong_server(error) => Exit::Refused,
        ClientError::NotReconnected { last: Some(error), .. } if is_wrong_server(error) => Exit::Refused,
        ClientError::Connect(
            ConnectError::Unreachable { .. }
            | ConnectError::TcpFailed { .. }
            | ConnectError::NoAnswer { .. }
            | ConnectError::Resolve { .. }
            | ConnectError::UnixSocket { .. }
            | ConnectError::Refused { .. }
            | ConnectError::Incompatible { .. }
            | ConnectError::Lane(_),
        )
        | ClientError::Refused(_)
        | ClientError::NoWelcome { .. }
        | ClientError::NoAnswer { .. }
        | ClientError::Lane(_)
        | ClientError::NotReconnected { .. }
        | ClientError::NoProgress { .. } => Exit::Unreachable,
        ClientError::Ended(error) => code_of_client_error(error),
        ClientError::StartNeedsEvery => Exit::Usage,
        ClientError::Message(_) | ClientError::ProtocolViolation(_) => Exit::Damaged,
        _ => Exit::Failed,
    }
}

/// Whether another server than the ticket's answered.
fn is_wrong_server(error: &ClientError) -> bool {
    matches!(error, ClientError::Connect(ConnectError::WrongKey { .. } | ConnectError::UnexpectedUser { .. }))
}

fn code_of_subscription_error(error: &SubscriptionError) -> Exit {
    match error {
        SubscriptionError::NotFound { .. }
        | SubscriptionError::Aborted { .. }
        | SubscriptionError::BoxMisfit { .. } => Exit::NotFound,
        SubscriptionError::Corrupt { .. } => Exit::Damaged,
        SubscriptionError::Gap(_) => Exit::Missed,
        SubscriptionError::Stalled { .. } => Exit::Unreachable,
        SubscriptionError::Disconnected { source, .. } => code_of_client_error(source),
        SubscriptionError::Ended { reason, .. } => match reason {
            EndReason::TopicEnded | EndReason::Withdrawn | EndReason::Expired => Exit::NotFound,
            EndReason::TooSlow => Exit::Missed,
            EndReason::Replaced => Exit::ReaderReplaced,
            EndReason::Evicted => Exit::Unreachable,
            EndReason::Forbidden => Exit::Refused,
            _ => Exit::Failed,
        },
        _ => Exit::Failed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn the_first_cause_with_a_code_decides() {
        let ticket = anyhow::Error::from(TicketError::NoKey).context("reading a ticket");
        assert_eq!(code_of(&ticket), Exit::Usage);
        assert_eq!(code_of(&anyhow::anyhow!("anything")), Exit::Failed);
    }

    #[test]
    fn a_cause_is_not_repeated() {
        let io = std::io::Error::from(std::io::ErrorKind::StorageFull);
        let error = Err::<(), _>(io)
            .with_context(|| "cannot write x: no storage space")
            .unwrap_err();
        assert_eq!(message_of(&error), "cannot write x: no storage space");
        assert_eq!(message_of(&anyhow::anyhow!("b").context("a")), "a: b");
    }
}
