//! Errors that abort one version, with the reason for the server and the error for the user.

use super::SubscriptionError;
use crate::device_snapshot::chain;
use tensor_relay_device::{AllocError, CopyError, Device, PartsError, SinkError};
use tensor_relay_protocol::{AbortReason, BoxError, ChunkIndex, VersionDigest, VersionId};
use tensor_relay_transport::ingress::ReceiveError;

/// Why the client aborts one version: the internal form of [`SubscriptionError`].
#[derive(Debug, thiserror::Error)]
pub(crate) enum TransferError {
    #[error(transparent)]
    Memory(#[from] AllocError),
    #[error("there is no room on {device}: {source}")]
    DeviceMemory { device: Box<str>, source: AllocError },
    #[error("{source}")]
    DeviceRefused { device: Box<str>, source: AllocError },
    #[error("its layout does not match its memory: {0}")]
    Parts(#[from] PartsError),
    #[error("{}", chain(source))]
    Copy { device: Box<str>, source: Box<SinkError> },
    #[error(
        "no byte was received for {timeout_ms} ms, while a copy to the device was in flight or a chunk waited for one of \
         its slots: the device hangs, or has too few slots; later versions are tried"
    )]
    DeviceStalled { device: Box<str>, timeout_ms: u128 },
    #[error(transparent)]
    Chunk(Box<ReceiveError>),
    #[error("its digest is {found}, but the server sent {expected}")]
    Mismatch { expected: VersionDigest, found: VersionDigest },
    #[error("chunk {0} differs from the server's own list of hashes")]
    OtherHash(ChunkIndex),
    #[error(transparent)]
    Box(BoxError),
    #[error("no byte was received for {0} ms")]
    Stalled(u128),
    #[error("its memory could not be committed: {0}")]
    Sink(Box<SinkError>),
}

impl From<SinkError> for TransferError {
    fn from(error: SinkError) -> Self {
        Self::Sink(Box::new(error))
    }
}

impl TransferError {
    /// The error for a failed allocation on a device: not enough memory, or a failure of the device.
    pub(crate) fn device_memory(device: &Device, source: AllocError) -> Self {
        let device: Box<str> = device.name().into();
        match source {
            AllocError::Device { .. } => Self::DeviceRefused { device, source },
            _ => Self::DeviceMemory { device, source },
        }
    }

    /// The error for a chunk that failed; `device` is its destination, if that is on a device.
    pub(crate) fn chunk(error: ReceiveError, device: Option<&Device>) -> Self {
        match (error, device) {
            (
                ReceiveError::Sink(
                    source @ (SinkError::Copy(_) | SinkError::Within(_) | SinkError::Busy { .. }),
                ),
                Some(device),
            ) => Self::Copy { device: device.name().into(), source: Box::new(source) },
            (error, _) => Self::Chunk(Box::new(error)),
        }
    }

    /// The error for a stall; `device` is the device that the version waits for, if any.
    pub(crate) fn stalled(timeout_ms: u128, device: Option<&Device>) -> Self {
        match device.map(|device| device.name().into()) {
            Some(device) => Self::DeviceStalled { device, timeout_ms },
            None => Self::Stalled(timeout_ms),
        }
    }

    /// Whether the subscription ends with this version.
    pub(crate) fn is_final(&self) -> bool {
        match self {
            Self::Copy { source, .. } => match &**source {
                SinkError::Copy(error) => error.is_final() || is_invalid(error),
                _ => false, // `Busy`: an earlier copy may still write. The next version has other memory.
            },
            // A blocked device thread may be free for the next version.
            Self::DeviceRefused { source, .. } => !source.is_temporary(),
            Self::DeviceStalled { .. } => false,
            _ => true,
        }
    }

    /// The reason sent to the server.
    pub(crate) fn abort_reason(&self) -> AbortReason {
        match self {
            _ if self.is_out_of_memory() => AbortReason::OverBudget,
            Self::Stalled(_) => AbortReason::Stalled,
            Self::Box(_) => AbortReason::BoxMisfit,
            Self::Copy { .. } | Self::DeviceRefused { .. } | Self::DeviceStalled { .. } => {
                AbortReason::DeviceFailed
            }
            _ => AbortReason::Corrupt,
        }
    }

    /// The error for the user.
    pub(crate) fn for_user(&self, id: &VersionId) -> SubscriptionError {
        let (id, detail) = (id.clone(), self.to_string());
        match self {
            Self::DeviceMemory { device, .. } => {
                SubscriptionError::NoRoomOnDevice { id, device: device.clone(), detail }
            }
            _ if self.is_out_of_memory() => SubscriptionError::OverBudget { id, detail },
            Self::Box(source) => SubscriptionError::BoxMisfit { id, source: source.clone() },
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

    fn is_out_of_memory(&self) -> bool {
        match self {
            Self::Memory(_) | Self::DeviceMemory { .. } => true,
            Self::Chunk(error) => matches!(**error, ReceiveError::Sink(SinkError::NoMemory(_))),
            _ => false,
        }
    }
}

/// Whether a copy was refused as invalid: the next one would be refused as well.
fn is_invalid(error: &CopyError) -> bool {
    matches!(error, CopyError::OutOfBounds { .. } | CopyError::ForeignSlot | CopyError::ForeignMemory)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{sync::Arc, time::Duration};
    use tensor_relay_device::{Capacity, HostEngine, HostMemory};
    use tensor_relay_protocol::{Epoch, Topic, Version};

    #[test]
    fn a_failed_device_is_not_a_full_device() {
        let engine = Arc::new(HostEngine::inline(HostMemory::new(1 << 20)));
        let device = Device::new(engine, Capacity { slots: 1, slot_bytes: 64 }).unwrap();
        let id = VersionId { topic: Topic::new("t").unwrap(), epoch: Epoch(1), version: Version(1) };
        let name = || "cuda:0".to_owned();
        use tensor_relay_device::cuda::CudaError;
        let no_answer = CudaError::NoAnswer { device: name(), waited: Duration::from_secs(60) };
        for (source, expected) in [(no_answer, false), (CudaError::Stopped { device: name() }, true)] {
            let error = TransferError::device_memory(&device, AllocError::Device { device: name(), source });
            assert_eq!((error.is_final(), error.abort_reason()), (expected, AbortReason::DeviceFailed));
            let user_error = error.for_user(&id);
            assert!(
                matches!(user_error, SubscriptionError::Device { .. }) && user_error.is_final() == expected,
                "{user_error}"
            );
        }
        let full = AllocError::DeviceFull { device: name(), asked_bytes: 3, free_bytes: 2, total_bytes: 4 };
        let error = TransferError::device_memory(&device, full);
        assert_eq!((error.is_final(), error.abort_reason()), (true, AbortReason::OverBudget));
        let user_error = error.for_user(&id);
        assert!(
            matches!(user_error, SubscriptionError::NoRoomOnDevice { .. }) && user_error.is_final(),
            "{user_error}"
        );
    }
}
