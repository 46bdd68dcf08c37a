//! Messages from a server to a producer on the same machine.

use super::{MemoryKind, PublicationId, Text, message_fields, message_kinds};
use crate::{Epoch, Version, message::reasons};

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
        text: Text,
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
        text: Text,
    },
}

/// A server's acceptance of a producer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Welcome {
    /// The revision of the connection.
    pub revision: u32,
    /// The server's name and version, for logs.
    pub agent: Text,
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

reasons! {
    /// Why a version was not published, or a topic not ended.
    Refusal:
    /// The server publishes into the topic itself.
    TopicTaken = 1, "the server publishes into the topic itself";
    /// A limit or the server's memory leaves no room for the version.
    NoRoom = 2, "there is no room for it";
    /// The version's memory does not match its description, or can change.
    UnfitMemory = 3, "its memory does not match its description, or can change";
    /// The server cannot use memory of this kind.
    UnsupportedMemory = 4, "the server cannot use memory of this kind";
    /// The version's manifest is invalid, or does not match the memory.
    BadManifest = 5, "its manifest is invalid, or does not match its memory";
    /// The topic expired or is not open, or the server is shutting down.
    TopicEnded = 6, "its topic is not open, or the server is shutting down";
    /// The server's access control list does not allow the request.
    Forbidden = 7, "the server's access control list does not allow it";
}

message_kinds! {
    ServerMessage as ToProducer, ServerKind: Welcome Progress;
    Published { publication, epoch, version } => Published { publication, epoch, version }
    Refused { publication, reason, text } => Refused { publication, reason, text }
    Ended { request } => Ended { request }
    Close { text } => Close { text }
}

message_fields! {
    Welcome { revision, agent, chunk_bytes, memories } => Welcome { revision, agent, chunk_bytes, memories }
}
message_fields! {
    Progress { publication, committed, loaded, left_retention: is_over, is_released } =>
    Progress { publication, committed, loaded, is_over, is_released }
}
