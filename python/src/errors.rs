//! The mapping of Rust errors to Python exceptions, whose classes are in `tensor_relay/errors.py`.
//!
//! The messages are the texts of the Rust errors, the same as on the command line.

use crate::exit;
use pyo3::{exceptions::PySystemExit, prelude::*};
use std::fmt::Display;
use tensor_relay_client::{
    ClientError, ConnectError, DeviceError, EndReason, FillCause, GetError, LaneError, SubscriptionError,
};
use tensor_relay_server::Token;

/// A class of `tensor_relay.errors`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Everything else: a file, a disk, a port, a thread.
    Other,
    Unreachable,
    Refused,
    Damaged,
    Timeout,
    NotFound,
    VersionNotFound,
    HoldingTooMany,
    TopicEnded,
    Missed,
    NoRoom,
    Ticket,
    Request,
    UnsupportedTensor,
    Publish,
    Target,
    Torn,
    Fork,
    Closed,
}

impl Kind {
    fn class(self) -> &'static str {
        match self {
            Self::Other => "TensorRelayError",
            Self::Unreachable => "ServerUnreachableError",
            Self::Refused => "ServerRefusedError",
            Self::Damaged => "DamagedError",
            Self::Timeout => "RelayTimeoutError",
            Self::NotFound => "TopicNotFoundError",
            Self::VersionNotFound => "VersionNotFoundError",
            Self::HoldingTooMany => "HoldingTooManyError",
            Self::TopicEnded => "TopicEndedError",
            Self::Missed => "VersionsMissedError",
            Self::NoRoom => "NoRoomError",
            Self::Ticket => "TicketError",
            Self::Request => "RequestError",
            Self::UnsupportedTensor => "UnsupportedTensorError",
            Self::Publish => "PublishError",
            Self::Target => "TargetError",
            Self::Torn => "TornError",
            Self::Fork => "ForkError",
            Self::Closed => "ClosedError",
        }
    }

    /// The exception, to be raised. In daemon threads during the interpreter's exit it is `SystemExit`, which ends them
    /// quietly: the exit has closed the objects that they use.
    pub(crate) fn raise(self, py: Python<'_>, message: impl Display) -> PyErr {
        if exit::ends_elsewhere() {
            return PySystemExit::new_err(());
        }
        let message = Token::redact(&message.to_string());
        let raised = py
            .import("tensor_relay.errors")
            .and_then(|errors| errors.getattr(self.class())?.call1((message,)));
        raised.map_or_else(|error| error, PyErr::from_value)
    }

    /// A closure for `map_err` that raises this exception with the error's own text.
    pub(crate) fn because<E: Display>(self, py: Python<'_>) -> impl Fn(E) -> PyErr {
        move |error| self.raise(py, error)
    }
}

/// The exception for a session that failed or ended.
pub(crate) fn of_client(py: Python<'_>, error: &ClientError) -> PyErr {
    kind_of_client(error).raise(py, error)
}

/// Whether another server than the ticket's answered.
fn is_wrong_server(error: &ClientError) -> bool {
    matches!(error, ClientError::Connect(ConnectError::WrongKey { .. } | ConnectError::UnexpectedUser { .. }))
}

fn kind_of_client(error: &ClientError) -> Kind {
    match error {
        error if error.is_unauthorised() || is_wrong_server(error) => Kind::Refused,
        ClientError::NotReconnected { last: Some(error), .. } if is_wrong_server(error) => Kind::Refused,
        ClientError::Connect(ConnectError::Incompatible { .. })
        | ClientError::Message(_)
        | ClientError::ProtocolViolation(_) => Kind::Damaged,
        ClientError::Lane(LaneError::ClosedLocally) => Kind::Closed,
        ClientError::Connect(
            ConnectError::Unreachable { .. }
            | ConnectError::TcpFailed { .. }
            | ConnectError::NoAnswer { .. }
            | ConnectError::Resolve { .. }
            | ConnectError::UnixSocket { .. }
            | ConnectError::Refused { .. }
            | ConnectError::Lane(_),
        )
        | ClientError::Refused(_)
        | ClientError::Lane(_)
        | ClientError::NoWelcome { .. }
        | ClientError::NoAnswer { .. }
        | ClientError::NotReconnected { .. }
        | ClientError::NoProgress { .. } => Kind::Unreachable,
        ClientError::Ended(error) => kind_of_client(error),
        ClientError::Memory(_) => Kind::NoRoom,
        ClientError::SelectionTooLarge { .. }
        | ClientError::Boxes(_)
        | ClientError::TooManyWatches { .. }
        | ClientError::StartNeedsEvery => Kind::Request,
        _ => Kind::Other,
    }
}

/// The exception for a subscription that failed or ended. If versions are held or missing, it has them as an attribute.
pub(crate) fn of_subscription(py: Python<'_>, error: &SubscriptionError) -> PyErr {
    let raised = kind_of_subscription(error).raise(py, error);
    let value = raised.value(py);
    // The classes have these attributes; setting one fails only when the interpreter is out of memory.
    let _ = match error {
        SubscriptionError::HoldingTooMany { held, .. } => {
            value.setattr("held", held.iter().map(|version| version.0).collect::<Vec<_>>())
        }
        SubscriptionError::Gap(gap) => value.setattr("missing", gap.missing()),
        _ => Ok(()),
    };
    raised
}

/// The exception for one version that was not received.
pub(crate) fn of_get(py: Python<'_>, error: &GetError) -> PyErr {
    match error {
        GetError::Client(error) => of_client(py, error),
        GetError::Subscription(error) => of_subscription(py, error),
    }
}

fn kind_of_subscription(error: &SubscriptionError) -> Kind {
    match error {
        SubscriptionError::NotFound { .. } | SubscriptionError::Aborted { .. } => Kind::NotFound,
        SubscriptionError::Ended { reason, .. } => match reason {
            EndReason::TopicEnded | EndReason::Withdrawn | EndReason::Expired => Kind::TopicEnded,
            EndReason::TooSlow | EndReason::Replaced => Kind::Missed,
            EndReason::Evicted => Kind::Unreachable,
            EndReason::Forbidden => Kind::Refused,
            EndReason::NotFound => Kind::VersionNotFound,
            _ => Kind::Other,
        },
        SubscriptionError::VersionNotFound { .. } => Kind::VersionNotFound,
        SubscriptionError::BoxMisfit { .. } => Kind::Request,
        SubscriptionError::Gap(_) => Kind::Missed,
        SubscriptionError::HoldingTooMany { .. } => Kind::HoldingTooMany,
        SubscriptionError::Disconnected { source, .. } => kind_of_client(source),
        SubscriptionError::Corrupt { .. } => Kind::Damaged,
        SubscriptionError::OverBudget { .. } | SubscriptionError::NoRoomOnDevice { .. } => Kind::NoRoom,
        SubscriptionError::Stalled { .. } => Kind::Unreachable,
        _ => Kind::Other,
    }
}

/// The exception for a version that was not received into a user's own tensors. If these are torn, it is the cause of a
/// `TornError`.
pub(crate) fn of_fill(py: Python<'_>, cause: &FillCause) -> PyErr {
    match cause {
        FillCause::Subscription(error) => of_subscription(py, error),
        FillCause::Buffers(error) => Kind::Target.raise(py, error),
        FillCause::Device(error) => of_device(py, error),
        other => Kind::Other.raise(py, other),
    }
}

/// The exception for tensors that could not be copied to or from a GPU.
pub(crate) fn of_device(py: Python<'_>, error: &DeviceError) -> PyErr {
    match error {
        DeviceError::NoMemory { .. } => Kind::NoRoom.raise(py, error),
        _ => Kind::Other.raise(py, error),
    }
}
