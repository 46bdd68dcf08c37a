//! The kinds of memory that a producer can lend, and their descriptions in messages.

use super::{Field, wire};
use crate::{
    MessageError,
    message::{exactly, field::bytes, required},
};
use std::{fmt, ops::Range};

/// A range of a payload, with the lent memory that contains its bytes.
///
/// A producer sends a version's ranges one by one before `Publish`. With GPU memory there may be thousands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lend {
    /// The range of the payload.
    pub range: Range<u64>,
    /// The memory that contains the range's bytes.
    pub memory: Memory,
}

/// Memory that another process can open, with the handle to open it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Memory {
    /// A sealed memfd, whose descriptor accompanies the message.
    Memfd {
        /// The offset of the bytes in the memfd: a multiple of 4096, which parsing does not check.
        offset: u64,
    },
    /// A plain GPU allocation, opened by its CUDA IPC handle.
    CudaIpc {
        /// The GPU.
        device: CudaDevice,
        /// The handle from `cuIpcGetMemHandle`.
        handle: Box<IpcHandle>,
        /// The offset of the bytes in the allocation.
        offset: u64,
    },
    /// A GPU buffer, exported as a descriptor that accompanies the message.
    CudaFd {
        /// The GPU.
        device: CudaDevice,
        /// The size of the whole buffer, which the import call requires.
        buffer_bytes: u64,
        /// The offset of the bytes in the buffer.
        offset: u64,
    },
}

/// A kind of memory. A server names the kinds that it accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemoryKind {
    /// Shared memory of the host.
    Memfd,
    /// A GPU allocation, by CUDA IPC handle.
    CudaIpc,
    /// A GPU buffer, by descriptor.
    CudaFd,
}

/// The UUID of a GPU. Unlike a device number, it is the same in every process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CudaDevice(pub [u8; 16]);

/// The bytes of a `CUipcMemHandle`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IpcHandle(pub [u8; 64]);

bytes! { CudaDevice IpcHandle }

impl Memory {
    /// The kind of this memory.
    pub fn kind(&self) -> MemoryKind {
        match self {
            Self::Memfd { .. } => MemoryKind::Memfd,
            Self::CudaIpc { .. } => MemoryKind::CudaIpc,
            Self::CudaFd { .. } => MemoryKind::CudaFd,
        }
    }
}

impl MemoryKind {
    /// Every kind that this build knows.
    pub const ALL: &'static [Self] = &[Self::Memfd, Self::CudaIpc, Self::CudaFd];

    /// The kind's number on the wire.
    pub fn code(self) -> u32 {
        match self {
            Self::Memfd => 1,
            Self::CudaIpc => 2,
            Self::CudaFd => 3,
        }
    }

    /// The name in errors and output.
    pub fn name(self) -> &'static str {
        match self {
            Self::Memfd => "memfd",
            Self::CudaIpc => "cuda_ipc",
            Self::CudaFd => "cuda_fd",
        }
    }

    /// Whether a file descriptor accompanies the `Lend` message.
    pub fn has_descriptor(self) -> bool {
        match self {
            Self::Memfd | Self::CudaFd => true,
            Self::CudaIpc => false,
        }
    }
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Field for Vec<MemoryKind> {
    type Wire = Vec<u32>;

    fn into_wire(self) -> Vec<u32> {
        self.into_iter().map(MemoryKind::code).collect()
    }

    /// Passes over the kinds that this build does not know.
    fn from_wire(_: &'static str, codes: Vec<u32>) -> Result<Self, MessageError> {
        let known = MemoryKind::ALL.iter().copied();
        Ok(known.filter(|kind| codes.contains(&kind.code())).collect())
    }
}

impl Field for Lend {
    type Wire = wire::Lend;

    fn into_wire(self) -> wire::Lend {
        let Self { range, memory } = self;
        let memory = match memory {
            Memory::Memfd { offset } => wire::Memory::Memfd(wire::Memfd { offset }),
            Memory::CudaIpc { device, handle, offset } => wire::Memory::CudaIpc(wire::CudaIpc {
                device: device.into_wire(),
                handle: handle.into_wire(),
                offset,
            }),
            Memory::CudaFd { device, buffer_bytes, offset } => {
                wire::Memory::CudaFd(wire::CudaFd { device: device.into_wire(), buffer_bytes, offset })
            }
        };
        wire::Lend { start: range.start, bytes: range.end - range.start, memory: Some(memory) }
    }

    fn from_wire(_: &'static str, wire: wire::Lend) -> Result<Self, MessageError> {
        let end = wire.start.checked_add(wire.bytes).filter(|_| wire.bytes > 0);
        let end =
            end.ok_or_else(|| MessageError::Malformed("a lent range that is empty or overflows".into()))?;
        let memory = match required("memory", wire.memory)? {
            wire::Memory::Memfd(wire::Memfd { offset }) => Memory::Memfd { offset },
            wire::Memory::CudaIpc(wire::CudaIpc { device, handle, offset }) => Memory::CudaIpc {
                device: Field::from_wire("device", device)?,
                handle: Box::new(Field::from_wire("handle", handle)?),
                offset,
            },
            wire::Memory::CudaFd(wire::CudaFd { device, buffer_bytes, offset }) => {
                Memory::CudaFd { device: Field::from_wire("device", device)?, buffer_bytes, offset }
            }
        };
        Ok(Self { range: wire.start..end, memory })
    }
}
