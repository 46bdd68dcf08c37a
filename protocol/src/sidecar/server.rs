//! Messages from a server to a producer on the same machine.

use super::{MemoryKind, PublicationId, checked_text, wire};
use crate::{Epoch, MessageError, Version, message::required};
use std::fmt;

/// A message from a server to a producer.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ServerMessage {
    /// Accepts a producer.
    Welcome(Welcome),
    /// Reports that a version is published: from now on subscribers can receive it.
    Published {
        /// The publication's id.
        publication: PublicationId,
        /// The topic's epoch.
        epoch: Epoch,
        /// The version's number within the epoch.
        version: Version,
    },
    /// Reports that a version was not published, or a topic not ended. The topic is unchanged.
    Refused {
        /// The id of the publication, or of the request to end the topic.
        publication: PublicationId,
        /// The reason.
        reason: Refusal,
        /// Details of the reason, for people.
        text: String,
    },
    /// Reports changes in a version's state.
    Progress(Progress),
    /// Reports that a topic has ended.
    Ended {
        /// The request's id.
        request: PublicationId,
    },
    /// Ends the connection.
    Close {
        /// The reason, for people.
        text: String,
    },
}

/// A server's acceptance of a producer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Welcome {
    /// The revision of the connection.
    pub revision: u32,
    /// The server's name and version, for logs.
    pub agent: String,
    /// The chunk size in bytes that manifests must have.
    pub chunk_bytes: u32,
    /// The kinds of memory that the server accepts and this build knows.
    pub memories: Vec<MemoryKind>,
}

/// The state of a published version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// The publication's id.
    pub publication: PublicationId,
    /// The number of subscribers that committed the version.
    pub committed: u64,
    /// The number of consumers that loaded it, by their own report.
    pub loaded: u64,
    /// Whether the version left retention and its transfers ended, so that no more subscribers can commit it.
    pub left_retention: bool,
    /// Whether the server no longer uses the version's memory. No further message about the version follows.
    pub is_released: bool,
}

/// Why a version was not published, or a topic not ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Refusal {
    /// The server publishes into the topic itself.
    TopicTaken,
    /// A limit or the server's memory leaves no room for the version.
    NoRoom,
    /// The version's memory does not match its description, or can change.
    UnfitMemory,
    /// The server cannot use memory of this kind.
    UnsupportedMemory,
    /// The version's manifest is invalid, or does not match the memory.
    BadManifest,
    /// The topic expired or is not open, or the server is shutting down.
    TopicEnded,
    /// The server's access control list does not allow the request.
    Forbidden,
    /// A reason of a later revision.
    Other(u32),
}

impl From<ServerMessage> for wire::ToProducer {
    fn from(message: ServerMessage) -> Self {
        use wire::ServerKind as Kind;
        let kind = match message {
            ServerMessage::Welcome(welcome) => Kind::Welcome(wire::Welcome {
                revision: welcome.revision,
                agent: welcome.agent,
                chunk_bytes: welcome.chunk_bytes,
                memories: welcome.memories.iter().map(|kind| kind.code()).collect(),
            }),
            ServerMessage::Published { publication, epoch, version } => Kind::Published(wire::Published {
                publication: publication.0,
                epoch: epoch.0,
                version: version.0,
            }),
            ServerMessage::Refused { publication, reason, text } => {
                Kind::Refused(wire::Refused { publication: publication.0, reason: reason.code(), text })
            }
            ServerMessage::Progress(progress) => Kind::Progress(wire::Progress {
                publication: progress.publication.0,
                committed: progress.committed,
                loaded: progress.loaded,
                is_over: progress.left_retention,
                is_released: progress.is_released,
            }),
            ServerMessage::Ended { request } => Kind::Ended(wire::Ended { request: request.0 }),
            ServerMessage::Close { text } => Kind::Close(wire::Close { text }),
        };
        Self { kind: Some(kind) }
    }
}

impl TryFrom<wire::ToProducer> for ServerMessage {
    type Error = MessageError;

    fn try_from(message: wire::ToProducer) -> Result<Self, MessageError> {
        use wire::ServerKind as Kind;
        Ok(match required("kind", message.kind)? {
            Kind::Welcome(welcome) => Self::Welcome(Welcome {
                revision: welcome.revision,
                agent: checked_text("agent", welcome.agent)?,
                chunk_bytes: welcome.chunk_bytes,
                memories: welcome.memories.into_iter().filter_map(MemoryKind::from_code).collect(),
            }),
            Kind::Published(published) => Self::Published {
                publication: PublicationId(published.publication),
                epoch: Epoch(published.epoch),
                version: Version(published.version),
            },
            Kind::Refused(refused) => Self::Refused {
                publication: PublicationId(refused.publication),
                reason: Refusal::from_code(refused.reason),
                text: checked_text("text", refused.text)?,
            },
            Kind::Progress(progress) => Self::Progress(Progress {
                publication: PublicationId(progress.publication),
                committed: progress.committed,
                loaded: progress.loaded,
                left_retention: progress.is_over,
                is_released: progress.is_released,
            }),
            Kind::Ended(wire::Ended { request }) => Self::Ended { request: PublicationId(request) },
            Kind::Close(close) => Self::Close { text: checked_text("text", close.text)? },
        })
    }
}

impl Refusal {
    fn code(self) -> u32 {
        match self {
            Self::TopicTaken => 1,
            Self::NoRoom => 2,
            Self::UnfitMemory => 3,
            Self::UnsupportedMemory => 4,
            Self::BadManifest => 5,
            Self::TopicEnded => 6,
            Self::Forbidden => 7,
            Self::Other(code) => code,
        }
    }

    fn from_code(code: u32) -> Self {
        match code {
            1 => Self::TopicTaken,
            2 => Self::NoRoom,
            3 => Self::UnfitMemory,
            4 => Self::UnsupportedMemory,
            5 => Self::BadManifest,
            6 => Self::TopicEnded,
            7 => Self::Forbidden,
            other => Self::Other(other),
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TopicTaken => f.write_str("the server publishes into the topic itself"),
            Self::NoRoom => f.write_str("there is no room for it"),
            Self::UnfitMemory => f.write_str("its memory does not match its description, or can change"),
            Self::UnsupportedMemory => f.write_str("the server cannot use memory of this kind"),
            Self::BadManifest => f.write_str("its manifest is invalid, or does not match its memory"),
            Self::Forbidden => f.write_str("the server's access control list does not allow it"),
            Self::TopicEnded => f.write_str("its topic is not open, or the server is shutting down"),
            Self::Other(code) => write!(f, "reason {code}, which this build does not know"),
        }
    }
}
