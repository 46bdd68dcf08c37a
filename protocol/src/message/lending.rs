//! Versions in memory that a server lends to clients of its host (PROTOCOL.md §3.19).

use super::{Field, field::message_fields, reasons, wire};
use crate::{
    MessageError, VersionDigest,
    sidecar::{CudaDevice, IpcHandle},
};

/// The GPU on which a client wants versions in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WantedGpu {
    /// The GPU.
    pub device: CudaDevice,
    /// Whether the client uses them where they are, in memory that others have as well and to which it does not write.
    /// Otherwise it copies them.
    pub in_place: bool,
}

/// How a server passes the bytes of a version to a client that asked for memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lending {
    /// In memory that the client maps. No chunk is sent, unless the client declines the memory.
    Memory(Lent),
    /// In memory of the client's GPU, likewise.
    Gpu(LentOnGpu),
    /// In chunks, for this reason.
    Chunks(NotLent),
}

impl Lending {
    /// Whether no chunk is sent, unless the client declines.
    pub fn is_memory(&self) -> bool {
        self.digest().is_some()
    }

    /// The digest under which the bytes are committed, if they are in memory.
    pub fn digest(&self) -> Option<VersionDigest> {
        match self {
            Self::Memory(lent) => Some(lent.digest),
            Self::Gpu(lent) => Some(lent.digest),
            Self::Chunks(_) => None,
        }
    }
}

/// Memory with the whole payload of a version. Its descriptor was sent before, beside the bytes of the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lent {
    /// The inode of the descriptor, which tells it from others.
    pub inode: u64,
    /// Where the payload begins in it.
    pub offset_bytes: u64,
    /// The digest of the selected chunks; if the server does not know it, a random number that stands for it in `have`
    /// and `Loaded`, as long as the server has the version.
    pub digest: VersionDigest,
    /// Why it is not memory of the GPU that the client named, where the version lies on a GPU.
    pub why_not_gpu: Option<NotLent>,
}

/// Memory of a GPU with the whole payload of a version, from its beginning. What comes with it was sent before, beside
/// the bytes of the connection: one end of a lifeline and, unless there is a handle, the memory's descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LentOnGpu {
    /// The inode of the lifeline, by which the client finds what was sent.
    pub inode: u64,
    /// The GPU.
    pub gpu: CudaDevice,
    /// The length of the memory, which is at least the payload's.
    pub buffer_bytes: u64,
    /// CUDA's handle of the memory, if it is not shared as a descriptor.
    pub handle: Option<IpcHandle>,
    /// As [`Lent::digest`].
    pub digest: VersionDigest,
    /// Whether other clients of the same user have it as well: the client may use it as long as it likes, and must not
    /// write to it. Otherwise it is for this client alone, which copies out of it at once.
    pub in_place: bool,
}

reasons! {
    /// Why the bytes of a version are sent in chunks to a client that asked for memory.
    NotLent:
    /// They do not lie in memory that can be shared.
    NotShareable = 1, "they are not in memory that the server can share: a file that is read while it is sent, memory that \
                       the publisher may still write, or that the system did not let it share";
    /// The server needs its memory for later versions.
    Full = 2, "the server has no room for three more versions beside those that clients keep, or this client keeps 64: drop \
               snapshots of earlier versions, or give the server more memory";
    /// Descriptors cannot be passed.
    NoDescriptors = 3, "the server cannot pass descriptors: a sandbox forbids it, or no descriptor is free";
    /// The client could not map the memory, and declined it.
    Declined = 4, "the memory could not be mapped here; the reason is in the log";
    /// The system of the server has no memory that can be shared.
    NoMemfd = 5, "the system of the server refused to make memory that can be shared; the reason is in its log";
    /// To send them costs less than to map them.
    Small = 6, "they are so few that to send them costs less than to map them";
    /// The version lies on another GPU than the client's.
    OtherGpu = 7, "they are on another GPU than the client's";
    /// The server's GPU cannot share memory.
    NoGpuMemory = 8, "the driver of the server's GPU refused to make memory that can be shared, or to copy them there; the \
                      reason is in the server's log";
    /// The server's GPU has no room for a copy.
    GpuFull = 9, "the server's GPU has no room for a copy of them, or holds copies for eight others, or for this client";
}

message_fields! { Lent { inode, offset_bytes, digest, why_not_gpu } => Lent { inode, offset_bytes, digest, why_not_gpu } }
message_fields! { WantedGpu { device, in_place } => WantedGpu { device, in_place } }
message_fields! {
    LentOnGpu { inode, gpu, buffer_bytes, handle, digest, in_place } =>
    LentOnGpu { inode, gpu, buffer_bytes, handle, digest, in_place }
}

impl Field for Lending {
    type Wire = wire::Lending;

    fn into_wire(self) -> wire::Lending {
        match self {
            Self::Memory(lent) => wire::Lending { memory: Some(lent.into_wire()), ..Default::default() },
            Self::Gpu(lent) => wire::Lending { gpu: Some(lent.into_wire()), ..Default::default() },
            Self::Chunks(reason) => wire::Lending { chunks: reason.into_wire(), ..Default::default() },
        }
    }

    fn from_wire(_: &'static str, wire: wire::Lending) -> Result<Self, MessageError> {
        Ok(match (wire.memory, wire.gpu) {
            (Some(lent), _) => Self::Memory(Field::from_wire("memory", lent)?),
            (None, Some(lent)) => Self::Gpu(Field::from_wire("gpu", lent)?),
            (None, None) => Self::Chunks(Field::from_wire("chunks", wire.chunks)?),
        })
    }
}
