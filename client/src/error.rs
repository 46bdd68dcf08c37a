//! What can go wrong for a client, by what its user can do about it.

use crate::{device_snapshot::chain, link::LastWord};
use std::{fmt, sync::Arc};
use tensor_relay_device::{AllocError, CopyError, Device, PartsError, SinkError};
use tensor_relay_protocol::{
    AbortReason, Blame, CloseCode, EndReason, GLOBS_MAX, MessageError, Misbehaved, SELECTION_MAX_BYTES,
    Topic, Version, VersionDigest, VersionId,
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
    /// More globs than a message holds.
    #[error(
        "the selection has {globs} globs of {bytes} bytes in all, and at most {GLOBS_MAX} of {SELECTION_MAX_BYTES} bytes \
         are allowed: write fewer that match more"
    )]
    SelectionTooLarge {
        /// How many globs.
        globs: usize,
        /// How long they are together.
        bytes: usize,
    },
    /// The session has as many watches as a server takes.
    #[error(
        "this client watches {max} globs, as many as a session may: drop a watch, or connect another client"
    )]
    TooManyWatches {
        /// How many there may be.
        max: usize,
    },
    /// The server turned this client away.
    #[error("the server refused this client: {0}")]
    Refused(LaneError),
    /// The session ended.
    #[error(transparent)]
    Lane(#[from] LaneError),
    /// The connection was lost, and no other could be made in time.
    #[error("the connection was lost ({lost}), and the server was not reached again within {timeout_ms} ms")]
    NotReconnected {
        /// How it was lost.
        lost: Arc<Self>,
        /// How long it was tried.
        timeout_ms: u128,
    },
    /// The session ended before; this is why.
    #[error(transparent)]
    Ended(Arc<Self>),
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

    /// Whether another attempt may succeed where this one failed: the network or a server that is away is to blame, and
    /// not what one of the two ends is or did.
    pub(crate) fn is_worth_a_retry(&self) -> bool {
        match self {
            Self::Connect(error) => !matches!(
                error,
                ConnectError::WrongKey { .. } | ConnectError::Incompatible { .. } | ConnectError::Tls(_)
            ),
            Self::Refused(error) | Self::Lane(error) => is_worth_a_retry(error),
            Self::NoWelcome { .. } | Self::NoAnswer { .. } => true,
            Self::Memory(_)
            | Self::TooManyWatches { .. }
            | Self::SelectionTooLarge { .. }
            | Self::Message(_)
            | Self::Misbehaved(_) => false,
            Self::NotReconnected { .. } | Self::Ended(_) => false,
        }
    }

    /// Who has to act.
    pub fn blame(&self) -> Blame {
        match self {
            Self::Connect(
                ConnectError::Socket(_)
                | ConnectError::LaneAddress { .. }
                | ConnectError::Thread { .. }
                | ConnectError::Tls(_),
            )
            | Self::Memory(_)
            | Self::TooManyWatches { .. }
            | Self::SelectionTooLarge { .. } => Blame::Local,
            Self::Connect(
                ConnectError::Unreachable { .. }
                | ConnectError::FurtherUnreachable { .. }
                | ConnectError::Resolve { .. },
            ) => Blame::Network,
            Self::Lane(LaneError::TimedOut { .. }) => Blame::Network,
            Self::NotReconnected { lost: error, .. } | Self::Ended(error) => error.blame(),
            _ => Blame::Peer,
        }
    }
}

fn is_worth_a_retry(error: &LaneError) -> bool {
    match error {
        LaneError::ClosedHere => false,
        LaneError::ClosedByPeer { code: Some(code), .. } => !matches!(
            code,
            CloseCode::Malformed | CloseCode::Misbehaved | CloseCode::Incompatible | CloseCode::Unauthorised
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

/// Versions that are missing on a subscription in mode `every`, right before the next snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gap {
    /// The version that came last, or that the subscription was to begin after; none if the epoch is another.
    pub after: Option<VersionId>,
    /// The version that comes next.
    pub found: VersionId,
}

impl Gap {
    /// How many versions are missing; `None` where nobody can tell, because the publisher began a new epoch.
    pub fn missing(&self) -> Option<u64> {
        let after = self.after.as_ref().filter(|after| after.epoch == self.found.epoch)?;
        Some(self.found.version.0.saturating_sub(after.version.0 + 1))
    }
}

impl fmt::Display for Gap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { after, found } = self;
        let verb = |missing| if missing == 1 { "version is" } else { "versions are" };
        match (after, self.missing()) {
            (Some(after), Some(missing)) => write!(
                f,
                "{missing} {} missing of {}: {} was to come, {} is the next there is; the publisher did not retain \
                 what is missing long enough for this reader",
                verb(missing),
                found.topic,
                after.version.next(),
                found.version
            ),
            _ => write!(
                f,
                "{} has begun a new epoch, {}, whose first version here is {}: its publisher was started anew, and \
                 what it published last before may be missing",
                found.topic, found.epoch, found.version
            ),
        }
    }
}

/// Why a subscription delivers nothing now, or nothing more. Clones are cheap: every later call says the same.
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
    /// In mode `every`: versions are missing before the next snapshot. Not final: the next call goes on with it.
    #[error("{0}")]
    Gap(Box<Gap>),
    /// The user holds as many snapshots as it may, so the next one cannot be handed over. Not final: drop some and call
    /// again.
    #[error(
        "{} snapshots of {topic} are held (versions {}), and at most {max} may be: drop some, or raise `versions_held_max`; \
         waited {timeout_ms} ms", held.len(), join(held)
    )]
    HoldingTooMany {
        /// Which topic.
        topic: Topic,
        /// Which versions are held, in the order in which they were taken.
        held: Vec<Version>,
        /// How many may be.
        max: usize,
        /// How long it was waited for one to be dropped.
        timeout_ms: u128,
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
    /// There is no memory of the host for a version.
    #[error("{id} does not fit: {detail}; raise the memory budget or drop older snapshots")]
    OverBudget {
        /// Which version.
        id: VersionId,
        /// The numbers.
        detail: String,
    },
    /// There is no room for a version on the device that versions land on.
    #[error("{id} does not fit: {detail}; raise the device's memory budget or drop older snapshots")]
    NoRoomOnDevice {
        /// Which version.
        id: VersionId,
        /// Which device.
        device: Box<str>,
        /// The numbers.
        detail: String,
    },
    /// The device that versions land on did not take one. This machine is to blame, not the server. Not final where the
    /// device may take later versions: they are tried.
    #[error("{id} did not get to {device}, a device of this machine: {detail}")]
    Device {
        /// Which version.
        id: VersionId,
        /// Which device.
        device: Box<str>,
        /// What happened, and what to do.
        detail: String,
        /// Whether the device takes nothing any more.
        is_final: bool,
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

fn join(versions: &[Version]) -> String {
    versions.iter().map(Version::to_string).collect::<Vec<_>>().join(", ")
}

impl SubscriptionError {
    /// Whether nothing more will come. After an error that is not final, the next call goes on.
    pub fn is_final(&self) -> bool {
        !matches!(self, Self::Gap(_) | Self::HoldingTooMany { .. } | Self::Device { is_final: false, .. })
    }

    pub(crate) fn disconnected(topic: &Topic, error: &Arc<ClientError>) -> Self {
        Self::Disconnected { topic: topic.clone(), source: Arc::clone(error) }
    }
}

/// Why one version is given up, inside.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TransferError {
    #[error(transparent)]
    Memory(#[from] AllocError),
    #[error("there is no room on {device}: {source}")]
    DeviceMemory { device: Box<str>, source: AllocError },
    #[error("{source}")]
    DeviceRefused { device: Box<str>, source: AllocError },
    #[error("its memory does not fit: {0}")]
    Parts(#[from] PartsError),
    #[error("{}", chain(source))]
    Copy { device: Box<str>, source: Box<SinkError> },
    #[error(
        "no byte came for {timeout_ms} ms, while a copy to it was in flight or a chunk waited for one of its slots: it \
         hangs, or has fewer slots than are in use at once; later versions are tried"
    )]
    DeviceStalled { device: Box<str>, timeout_ms: u128 },
    #[error(transparent)]
    Chunk(Box<ReceiveError>),
    #[error("its chunks together hash to {found} where the server said {expected}")]
    Mismatch { expected: VersionDigest, found: VersionDigest },
    #[error("no byte came for {0} ms")]
    Stalled(u128),
    #[error("its memory could not be handed over: {0}")]
    Sink(Box<SinkError>),
}

impl From<SinkError> for TransferError {
    fn from(error: SinkError) -> Self {
        Self::Sink(Box::new(error))
    }
}

impl TransferError {
    /// Why `device` gave no memory: it has no room, or it is in trouble.
    pub(crate) fn device_memory(device: &Device, source: AllocError) -> Self {
        let device: Box<str> = device.name().into();
        match source {
            AllocError::Device { .. } => Self::DeviceRefused { device, source },
            _ => Self::DeviceMemory { device, source },
        }
    }

    /// Why a chunk did not arrive that was on its way to `device`, if to any.
    pub(crate) fn chunk(error: ReceiveError, device: Option<&Device>) -> Self {
        match (error, device) {
            (ReceiveError::Sink(source @ (SinkError::Copy(_) | SinkError::Busy { .. })), Some(device)) => {
                Self::Copy { device: device.name().into(), source: Box::new(source) }
            }
            (error, _) => Self::Chunk(Box::new(error)),
        }
    }

    /// Nothing moved for so long, while it was waited for `device`, if for any.
    pub(crate) fn stalled(timeout_ms: u128, device: Option<&Device>) -> Self {
        match device.map(|device| device.name().into()) {
            Some(device) => Self::DeviceStalled { device, timeout_ms },
            None => Self::Stalled(timeout_ms),
        }
    }

    /// Whether later versions are lost with this one.
    pub(crate) fn is_final(&self) -> bool {
        match self {
            Self::Copy { source, .. } => match &**source {
                SinkError::Copy(error) => error.is_final() || is_our_mistake(error),
                _ => false, // What an earlier copy may still write to is busy. The next version has other memory.
            },
            // Its thread is held up, and may be free for the next version.
            Self::DeviceRefused { source, .. } => !source.may_pass(),
            Self::DeviceStalled { .. } => false,
            _ => true,
        }
    }

    /// What the server is told.
    pub(crate) fn abort_reason(&self) -> AbortReason {
        match self {
            _ if self.is_want_of_memory() => AbortReason::OverBudget,
            Self::Stalled(_) => AbortReason::Stalled,
            Self::Copy { .. } | Self::DeviceRefused { .. } | Self::DeviceStalled { .. } => {
                AbortReason::DeviceFailed
            }
            _ => AbortReason::Corrupt,
        }
    }

    /// What the user is told.
    pub(crate) fn for_user(&self, id: &VersionId) -> SubscriptionError {
        let (id, detail) = (id.clone(), self.to_string());
        match self {
            Self::DeviceMemory { device, .. } => {
                SubscriptionError::NoRoomOnDevice { id, device: device.clone(), detail }
            }
            _ if self.is_want_of_memory() => SubscriptionError::OverBudget { id, detail },
            Self::Stalled(timeout_ms) => SubscriptionError::Stalled { id, timeout_ms: *timeout_ms },
            Self::Copy { device, .. }
            | Self::DeviceRefused { device, .. }
            | Self::DeviceStalled { device, .. } => {
                let (device, is_final) = (device.clone(), self.is_final());
                SubscriptionError::Device { id, device, detail, is_final }
            }
            _ => SubscriptionError::Corrupt { id, detail },
        }
    }

    fn is_want_of_memory(&self) -> bool {
        match self {
            Self::Memory(_) | Self::DeviceMemory { .. } => true,
            Self::Chunk(error) => matches!(**error, ReceiveError::Sink(SinkError::NoMemory(_))),
            _ => false,
        }
    }
}

/// Whether a copy was refused that should not have been asked for: the next one would be refused as well.
fn is_our_mistake(error: &CopyError) -> bool {
    matches!(error, CopyError::OutOfBounds { .. } | CopyError::ForeignSlot | CopyError::ForeignMemory)
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
    /// Whether another connection may do better.
    pub(crate) fn is_worth_a_retry(&self) -> bool {
        match self {
            Self::Client(error) => error.is_worth_a_retry(),
            Self::Manifest(ReceiveManifestError::Lane(error)) => is_worth_a_retry(error),
            Self::Manifest(_) | Self::ClosedHere => false,
        }
    }

    /// What the server is told.
    pub(crate) fn last_word(&self) -> LastWord {
        let by_user = matches!(self, Self::ClosedHere);
        LastWord { code: self.close_code(), text: self.to_string(), by_user }
    }

    fn close_code(&self) -> CloseCode {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tensor_relay_device::{Capacity, HostEngine, HostMemory};
    use tensor_relay_protocol::Epoch;

    #[test]
    fn a_device_in_trouble_is_not_one_without_room() {
        let engine = Arc::new(HostEngine::inline(HostMemory::new(1 << 20)));
        let device = Device::new(engine, Capacity { slots: 1, slot_bytes: 64 }).unwrap();
        let id = VersionId { topic: Topic::new("t").unwrap(), epoch: Epoch(1), version: Version(1) };
        let name = || "cuda:0".to_owned();
        use tensor_relay_device::cuda::CudaError;
        let no_answer = CudaError::NoAnswer { device: name(), waited: Duration::from_secs(60) };
        for (source, expected) in [(no_answer, false), (CudaError::Stopped { device: name() }, true)] {
            let error = TransferError::device_memory(&device, AllocError::Device { device: name(), source });
            assert_eq!((error.is_final(), error.abort_reason()), (expected, AbortReason::DeviceFailed));
            let told = error.for_user(&id);
            assert!(
                matches!(told, SubscriptionError::Device { .. }) && told.is_final() == expected,
                "{told}"
            );
        }
        let full = AllocError::DeviceFull { device: name(), asked_bytes: 3, free_bytes: 2, total_bytes: 4 };
        let error = TransferError::device_memory(&device, full);
        assert_eq!((error.is_final(), error.abort_reason()), (true, AbortReason::OverBudget));
        let told = error.for_user(&id);
        assert!(matches!(told, SubscriptionError::NoRoomOnDevice { .. }) && told.is_final(), "{told}");
    }
}
