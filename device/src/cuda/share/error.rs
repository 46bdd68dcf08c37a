use std::time::Duration;

use super::DeviceUuid;
use crate::cuda::error::CudaError;

/// Why memory is not shared with another process, or not taken from one. As a rule the next way is taken then.
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
    /// The device is of a kind whose memory is its process's alone.
    #[error("{device} has no memory that processes share.")]
    NotShareable {
        /// The device.
        device: String,
    },
    /// The process has too many descriptors open.
    #[error("There is no descriptor for memory that is to be shared: {text}.")]
    NoDescriptor {
        /// What the system said.
        text: String,
    },
    /// The driver does not say which device it is, so another process could not find the same.
    #[error("The driver does not tell what {device} is called in other processes (cuDeviceGetUuid_v2).")]
    UnknownDevice {
        /// The engine.
        device: String,
    },
    /// The driver names the memory to nobody.
    #[error(
        "Memory on {device} cannot be named to another process where it is: {source} CUDA names plain allocations alone \
         (cudaMalloc): not memory pools (cudaMallocAsync), and not virtual memory (PyTorch's expandable segments)."
    )]
    NotExportable {
        /// The engine.
        device: String,
        /// What the driver said.
        source: CudaError,
    },
    /// The driver gives no memory that can be shared.
    #[error("There is no memory on {device} that could be shared as a file descriptor: {source}")]
    NoBuffer {
        /// The engine.
        device: String,
        /// What the driver said.
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
        /// What was asked for, in bytes.
        asked_bytes: u64,
        /// What is held.
        in_use_bytes: u64,
        /// The most that may be held.
        budget_bytes: u64,
    },
    /// The caller's part lies outside of the buffer.
    #[error("{len} bytes at {offset} do not lie in a shared buffer of {bytes} bytes.")]
    OutOfBuffer {
        /// Where the part was to begin.
        offset: u64,
        /// Its bytes.
        len: u64,
        /// The buffer's.
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
        /// How long the engine waited.
        waited: Duration,
    },
    /// The driver refused a copy into a shared buffer.
    #[error("A copy within {device}, into memory that is to be shared, was refused: {source}")]
    CopyRefused {
        /// The engine.
        device: String,
        /// What the driver said.
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
        /// How long the engine waited.
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
    /// The handle of another process's allocation opens nothing here.
    #[error(
        "{device} could not open the memory of another process by its handle: {} A handle is good while that process \
         lives and keeps the memory; not in that process itself, nor in containers that do not share a PID namespace with it.",
        without_advice(source)
    )]
    NotOpened {
        /// The engine.
        device: String,
        /// What the driver said.
        source: CudaError,
    },
    /// The file descriptor of another process's buffer gives no memory here.
    #[error("{device} could not map the memory of another process by its file descriptor: {source}")]
    NotMapped {
        /// The engine.
        device: String,
        /// What the driver said.
        source: CudaError,
    },
    /// The other process said that its memory is longer than it is.
    #[error(
        "Another process shared {len} bytes at {offset} of an allocation of {bytes} bytes. It is in error, and nothing of it \
         was taken."
    )]
    OutOfBounds {
        /// Where the part was said to begin.
        offset: u64,
        /// Its bytes, as was said.
        len: u64,
        /// The allocation's.
        bytes: u64,
    },
    /// The engine cannot be asked, or its device failed.
    #[error(transparent)]
    Engine(#[from] CudaError),
}

/// What the driver said, without its usual advice: an invalid context is here one that it cannot see.
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
