//! The kinds of memory that a producer can lend, and what each must say of itself.

use super::wire;
use crate::{
    MessageError,
    message::{exactly, required},
};
use std::{fmt, ops::Range};

/// A part of a payload in memory that the producer lends.
///
/// The parts of a version are said one by one before it is published: a GPU's may be thousands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lend {
    /// Which bytes of the payload lie there.
    pub range: Range<u64>,
    /// Where they lie.
    pub memory: Memory,
}

/// Where bytes of a payload lie, so that another process can reach them.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Memory {
    /// In a sealed memfd, whose descriptor comes with the message.
    Memfd {
        /// Where in it they begin: a multiple of 4096.
        offset: u64,
    },
    /// In a plain allocation of a GPU, which the server opens by CUDA's handle for it.
    CudaIpc {
        /// Which GPU, whatever number either process knows it by.
        device: CudaDevice,
        /// What `cuIpcGetMemHandle` gave.
        handle: Box<IpcHandle>,
        /// Where in the allocation they begin.
        offset: u64,
    },
    /// In a buffer of a GPU that was exported as a descriptor, which comes with the message.
    CudaFd {
        /// Which GPU, whatever number either process knows it by.
        device: CudaDevice,
        /// The size of the whole buffer, which importing it asks for.
        buffer_bytes: u64,
        /// Where in it they begin.
        offset: u64,
    },
}

/// A kind of memory, without where it lies: what a server says that it takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemoryKind {
    /// Shared memory of the host.
    Memfd,
    /// An allocation of a GPU, by CUDA's own handle.
    CudaIpc,
    /// A buffer of a GPU, by descriptor.
    CudaFd,
}

/// The UUID of a GPU: the same in every process, whichever devices it sees and however it numbers them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CudaDevice(pub [u8; 16]);

/// The bytes of a `CUipcMemHandle`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IpcHandle(pub [u8; 64]);

impl Memory {
    /// Which kind it is.
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

    /// The number in messages.
    pub fn code(self) -> u32 {
        match self {
            Self::Memfd => 1,
            Self::CudaIpc => 2,
            Self::CudaFd => 3,
        }
    }

    /// The word for people and scripts.
    pub fn name(self) -> &'static str {
        match self {
            Self::Memfd => "memfd",
            Self::CudaIpc => "cuda_ipc",
            Self::CudaFd => "cuda_fd",
        }
    }

    /// Whether a descriptor comes with the message that lends it.
    pub fn has_descriptor(self) -> bool {
        match self {
            Self::Memfd | Self::CudaFd => true,
            Self::CudaIpc => false,
        }
    }

    /// The kind with this number, if this build knows it.
    pub(super) fn from_code(code: u32) -> Option<Self> {
        Self::ALL.iter().copied().find(|kind| kind.code() == code)
    }
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl From<Lend> for wire::Lend {
    fn from(Lend { range, memory }: Lend) -> Self {
        let memory = match memory {
            Memory::Memfd { offset } => wire::Memory::Memfd(wire::Memfd { offset }),
            Memory::CudaIpc { device, handle, offset } => wire::Memory::CudaIpc(wire::CudaIpc {
                device: device.0.to_vec(),
                handle: handle.0.to_vec(),
                offset,
            }),
            Memory::CudaFd { device, buffer_bytes, offset } => {
                wire::Memory::CudaFd(wire::CudaFd { device: device.0.to_vec(), buffer_bytes, offset })
            }
        };
        Self { start: range.start, bytes: range.end - range.start, memory: Some(memory) }
    }
}

impl TryFrom<wire::Lend> for Lend {
    type Error = MessageError;

    fn try_from(wire: wire::Lend) -> Result<Self, MessageError> {
        let end = wire.start.checked_add(wire.bytes).filter(|_| wire.bytes > 0);
        let end =
            end.ok_or_else(|| MessageError::Malformed("lent memory without bytes, or with too many".into()))?;
        let memory = match required("memory", wire.memory)? {
            wire::Memory::Memfd(wire::Memfd { offset }) => Memory::Memfd { offset },
            wire::Memory::CudaIpc(ipc) => Memory::CudaIpc {
                device: CudaDevice(exactly("device", &ipc.device)?),
                handle: Box::new(IpcHandle(exactly("handle", &ipc.handle)?)),
                offset: ipc.offset,
            },
            wire::Memory::CudaFd(fd) => Memory::CudaFd {
                device: CudaDevice(exactly("device", &fd.device)?),
                buffer_bytes: fd.buffer_bytes,
                offset: fd.offset,
            },
        };
        Ok(Self { range: wire.start..end, memory })
    }
}
