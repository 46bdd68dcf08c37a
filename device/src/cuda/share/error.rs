use std::time::Duration;

use crate::cuda::{device_uuid::DeviceUuid, driver::OUT_OF_MEMORY, error::CudaError};

/// Why memory could not be exported to or imported from another process. Usually the caller tries the next method.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShareError {
    /// There is nothing to share.
    #[error("The memory has no bytes, so there is nothing to share.")]
    Empty,
    /// The caller named memory of another engine.
    #[error(
        "The memory belongs to another engine. Share it with the engine that allocated it, or that it was lent to."
    )]
    ForeignMemory,
    /// Memory of this kind of device cannot be shared.
    #[error("Memory of {device} cannot be shared between processes, nor copied within the device.")]
    NotShareable {
        /// The device.
        device: String,
    },
    /// The descriptor could not be duplicated; usually the process has too many open ones.
    #[error("The descriptor of shared memory could not be duplicated: {text}.")]
    NoDescriptor {
        /// The system's message.
        text: String,
    },
    /// The driver does not report the device's UUID, so another process could not find it.
    #[error(
        "The driver does not report the UUID of {device}, by which other processes find it (cuDeviceGetUuid_v2)."
    )]
    UnknownDevice {
        /// The name of the engine.
        device: String,
    },
    /// The driver refuses an IPC handle for the memory.
    #[error(
        "Memory on {device} cannot be shared in place with another process: {source} CUDA can share plain allocations \
         (cudaMalloc) only: not memory pools (cudaMallocAsync), nor virtual memory (PyTorch's expandable segments)."
    )]
    NotExportable {
        /// The name of the engine.
        device: String,
        /// The driver's error.
        source: CudaError,
    },
    /// The driver cannot allocate shareable memory.
    #[error("Memory on {device} that can be shared as a file descriptor could not be allocated: {source}")]
    NoBuffer {
        /// The name of the engine.
        device: String,
        /// The driver's error.
        source: CudaError,
    },
    /// The engine's budget has no room for a shared buffer.
    #[error(
        "{asked_bytes} bytes of {device}'s memory were asked for, for a shared buffer, while {in_use_bytes} bytes of the \
         budget of {budget_bytes} bytes are in use. Raise the device memory budget, or release versions that are still held"
    )]
    OverBudget {
        /// The name of the engine.
        device: String,
        /// The requested bytes.
        asked_bytes: u64,
        /// The bytes in use.
        in_use_bytes: u64,
        /// The limit.
        budget_bytes: u64,
    },
    /// The caller's part is out of bounds of the buffer.
    #[error("{len} bytes at offset {offset} are out of bounds of a shared buffer of {bytes} bytes.")]
    OutOfBuffer {
        /// The offset of the part.
        offset: u64,
        /// The length of the part.
        len: u64,
        /// The buffer's length.
        bytes: u64,
    },
    /// The streams that write the memory take too long.
    #[error(
        "A stream on {device} that writes memory to be shared or staged did not finish its work within {waited:?}. The kernels on it \
         take that long, or hang: raise the fence timeout, or do it later."
    )]
    FenceTimedOut {
        /// The name of the engine.
        device: String,
        /// The time that the engine waited.
        waited: Duration,
    },
    /// The driver refused a copy within the device.
    #[error("A copy within {device} was refused: {source}")]
    CopyRefused {
        /// The name of the engine.
        device: String,
        /// The driver's error.
        source: CudaError,
    },
    /// A copy within the device takes too long.
    #[error(
        "A copy within {device} did not end within {waited:?}. The device has a problem, or is very \
         busy: look at nvidia-smi, and at the kernel's log for Xid messages."
    )]
    CopyTimedOut {
        /// The name of the engine.
        device: String,
        /// The time that the engine waited.
        waited: Duration,
    },
    /// The memory is on another device than this engine's.
    #[error(
        "The memory is on the device {theirs}, but {device} of this process is {ours}. Use the engine of that device: its \
         number may differ between processes with different CUDA_VISIBLE_DEVICES."
    )]
    OtherDevice {
        /// The name of the engine.
        device: String,
        /// The engine's device.
        ours: DeviceUuid,
        /// The memory's device.
        theirs: DeviceUuid,
    },
    /// The IPC handle of another process's allocation cannot be opened here.
    #[error(
        "{device} could not open the memory of another process by its handle: {} A handle is valid while that process \
         lives and keeps the memory, but not in that process itself.",
        without_advice(source)
    )]
    NotOpened {
        /// The name of the engine.
        device: String,
        /// The driver's error.
        source: CudaError,
    },
    /// The file descriptor of another process's buffer cannot be mapped here.
    #[error("{device} could not map the memory of another process by its file descriptor: {source}")]
    NotMapped {
        /// The name of the engine.
        device: String,
        /// The driver's error.
        source: CudaError,
    },
    /// A range is out of bounds of the other process's memory.
    #[error(
        "{len} bytes at offset {offset} are out of bounds of another process's memory of {bytes} bytes. Nothing was \
         imported."
    )]
    OutOfBounds {
        /// The stated offset.
        offset: u64,
        /// The stated length.
        len: u64,
        /// The length of the memory.
        bytes: u64,
    },
    /// The engine does not answer, or its device failed.
    #[error(transparent)]
    Engine(#[from] CudaError),
}

impl ShareError {
    /// Whether there is no room for shared memory, in the engine's budget or on the device.
    pub fn is_full(&self) -> bool {
        match self {
            Self::OverBudget { .. } => true,
            Self::NoBuffer { source: CudaError::Driver(error), .. } => error.code == OUT_OF_MEMORY,
            _ => false,
        }
    }

    /// Whether a copy within the device may still read or write its memory after this error.
    pub fn may_still_copy(&self) -> bool {
        matches!(self, Self::CopyTimedOut { .. } | Self::Engine(_))
    }
}

/// The driver's error without its usual advice, which would be misleading for handles of another process.
fn without_advice(error: &CudaError) -> String {
    match error {
        CudaError::Driver(error) => error.refusal(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::DriverError;

    #[test]
    fn a_refused_export_says_why_and_what_can_be_shared() {
        let source = CudaError::Driver(DriverError {
            call: "cuIpcGetMemHandle",
            code: 1,
            name: "CUDA_ERROR_INVALID_VALUE".into(),
            text: "invalid argument".into(),
        });
        assert_eq!(
            ShareError::NotExportable { device: "cuda:0".into(), source }.to_string(),
            "Memory on cuda:0 cannot be shared in place with another process: The CUDA driver refused cuIpcGetMemHandle with \
             CUDA_ERROR_INVALID_VALUE (1): invalid argument. CUDA can share plain allocations (cudaMalloc) only: not memory \
             pools (cudaMallocAsync), nor virtual memory (PyTorch's expandable segments)."
        );
    }
}
