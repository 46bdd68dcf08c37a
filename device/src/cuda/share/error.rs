use std::time::Duration;

use crate::cuda::{device_uuid::DeviceUuid, error::CudaError};

/// Why memory could not be exported to or imported from another process. Usually the caller tries the next way.
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
    /// The device's kind of memory cannot be shared.
    #[error("{device} has no memory that processes share.")]
    NotShareable {
        /// The device.
        device: String,
    },
    /// The process has too many open descriptors.
    #[error("There is no descriptor for memory that is to be shared: {text}.")]
    NoDescriptor {
        /// The system's message.
        text: String,
    },
    /// The driver does not report the device's UUID, so another process could not find it.
    #[error("The driver does not tell what {device} is called in other processes (cuDeviceGetUuid_v2).")]
    UnknownDevice {
        /// The engine.
        device: String,
    },
    /// The driver refuses an IPC handle for the memory.
    #[error(
        "Memory on {device} cannot be named to another process where it is: {source} CUDA names plain allocations alone \
         (cudaMalloc): not memory pools (cudaMallocAsync), and not virtual memory (PyTorch's expandable segments)."
    )]
    NotExportable {
        /// The engine.
        device: String,
        /// The driver's error.
        source: CudaError,
    },
    /// The driver cannot allocate shareable memory.
    #[error("There is no memory on {device} that could be shared as a file descriptor: {source}")]
    NoBuffer {
        /// The engine.
        device: String,
        /// The driver's error.
        source: CudaError,
    },
    /// The engine's budget has no room for a shared buffer.
    #[error(
        "{asked_bytes} bytes of {device}'s memory were asked for, to share copies, while {in_use_bytes} bytes of the budget \
         of {budget_bytes} bytes are in use. Raise the device memory budget, or release versions that are still held"
    )]
    OverBudget {
        /// The engine.
        device: String,
        /// The requested bytes.
        asked_bytes: u64,
        /// The bytes in use.
        in_use_bytes: u64,
        /// The limit.
        budget_bytes: u64,
    },
    /// The caller's part is out of bounds of the buffer.
    #[error("{len} bytes at {offset} do not lie in a shared buffer of {bytes} bytes.")]
    OutOfBuffer {
        /// The offset of the part.
        offset: u64,
        /// Its bytes.
        len: u64,
        /// The buffer's length.
        bytes: u64,
    },
    /// The streams that write the memory take too long.
    #[error(
        "A stream on {device} that was to be waited for before memory is shared was not past its work within {waited:?}. The \
         kernels on it take that long, or hang: raise the fence timeout, or share later."
    )]
    FenceTimedOut {
        /// The engine.
        device: String,
        /// The time that the engine waited.
        waited: Duration,
    },
    /// The driver refused a copy into a shared buffer.
    #[error("A copy within {device}, into memory that is to be shared, was refused: {source}")]
    CopyRefused {
        /// The engine.
        device: String,
        /// The driver's error.
        source: CudaError,
    },
    /// A copy into a shared buffer takes too long.
    #[error(
        "A copy within {device}, into memory that is to be shared, did not end within {waited:?}. The device is in trouble, \
         or very busy: look at nvidia-smi, and at the kernel's log for Xid messages."
    )]
    CopyTimedOut {
        /// The engine.
        device: String,
        /// The time that the engine waited.
        waited: Duration,
    },
    /// The memory is on a device that this engine does not have.
    #[error(
        "The memory is on the device {theirs}, and {device} of this process is {ours}. Use the engine of that device; one and \
         the same has different numbers in processes with different CUDA_VISIBLE_DEVICES."
    )]
    OtherDevice {
        /// The engine.
        device: String,
        /// Its device.
        ours: DeviceUuid,
        /// The other process's.
        theirs: DeviceUuid,
    },
    /// The IPC handle of another process's allocation cannot be opened here.
    #[error(
        "{device} could not open the memory of another process by its handle: {} A handle is good while that process \
         lives and keeps the memory; not in that process itself, nor in containers that do not share a PID namespace with it.",
        without_advice(source)
    )]
    NotOpened {
        /// The engine.
        device: String,
        /// The driver's error.
        source: CudaError,
    },
    /// The file descriptor of another process's buffer cannot be mapped here.
    #[error("{device} could not map the memory of another process by its file descriptor: {source}")]
    NotMapped {
        /// The engine.
        device: String,
        /// The driver's error.
        source: CudaError,
    },
    /// The other process's length exceeds its memory.
    #[error(
        "Another process shared {len} bytes at {offset} of an allocation of {bytes} bytes. It is in error, and nothing of it \
         was taken."
    )]
    OutOfBounds {
        /// The stated offset.
        offset: u64,
        /// The stated length.
        len: u64,
        /// The allocation's length.
        bytes: u64,
    },
    /// The engine does not answer, or its device failed.
    #[error(transparent)]
    Engine(#[from] CudaError),
}

/// The driver's error without its usual advice: an invalid context means here one that it cannot see.
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
    fn a_refusal_says_why_and_what_else_there_is() {
        let source = CudaError::Driver(DriverError {
            call: "cuIpcGetMemHandle",
            code: 1,
            name: "CUDA_ERROR_INVALID_VALUE".into(),
            text: "invalid argument".into(),
        });
        assert_eq!(
            ShareError::NotExportable { device: "cuda:0".into(), source }.to_string(),
            "Memory on cuda:0 cannot be named to another process where it is: The CUDA driver refused cuIpcGetMemHandle with \
             CUDA_ERROR_INVALID_VALUE (1): invalid argument. CUDA names plain allocations alone (cudaMalloc): not memory \
             pools (cudaMallocAsync), and not virtual memory (PyTorch's expandable segments)."
        );
    }
}
