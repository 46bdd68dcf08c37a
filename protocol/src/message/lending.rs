//! Versions in memory that a server lends to clients of its host (PROTOCOL.md §3.19).

use super::{Field, field::message_fields, reasons, wire};
use crate::{MessageError, VersionDigest};

/// How a server passes the bytes of a version to a client that asked for memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lending {
    /// In memory that the client maps. No chunk is sent, unless the client declines the memory.
    Memory(Lent),
    /// In chunks, for this reason.
    Chunks(NotLent),
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
}

reasons! {
    /// Why the bytes of a version are sent in chunks to a client that asked for memory.
    NotLent:
    /// They do not lie in memory that can be shared.
    NotShareable = 1, "they are not in host memory that the server can share: a file that is read while it is sent, a GPU, \
                       memory that the publisher may still write, or that the system did not let it share";
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
}

message_fields! { Lent { inode, offset_bytes, digest } => Lent { inode, offset_bytes, digest } }

impl Field for Lending {
    type Wire = wire::Lending;

    fn into_wire(self) -> wire::Lending {
        match self {
            Self::Memory(lent) => wire::Lending { memory: Some(lent.into_wire()), chunks: 0 },
            Self::Chunks(reason) => wire::Lending { memory: None, chunks: reason.into_wire() },
        }
    }

    fn from_wire(_: &'static str, wire: wire::Lending) -> Result<Self, MessageError> {
        Ok(match wire.memory {
            Some(lent) => Self::Memory(Field::from_wire("memory", lent)?),
            None => Self::Chunks(Field::from_wire("chunks", wire.chunks)?),
        })
    }
}
