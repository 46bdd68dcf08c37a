//! Messages from a producer to its server.

use super::{Field, Lend, MANIFEST_PART_MAX_BYTES, PublicationId, Text, message_fields, message_kinds};
use crate::{MessageError, Metadata, Topic};
use bytes::Bytes;

/// A message from a producer.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProducerMessage {
    /// Opens a connection.
    Hello(Hello),
    /// Sends the next part of the next version's manifest.
    Manifest(Bytes),
    /// Lends memory that contains bytes of the next version.
    Lend(Lend),
    /// Publishes the version that the messages since the last `Publish` describe.
    Publish(Publish),
    /// Withdraws a version.
    Withdraw(PublicationId),
    /// Ends a topic.
    End {
        /// The request's id, different from those of all publications.
        request: PublicationId,
        /// The topic.
        topic: Topic,
        /// Whether the topic's versions are withdrawn, too.
        withdraw: bool,
    },
}

/// A producer's identity and supported revisions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// The oldest supported revision.
    pub revision_min: u32,
    /// The newest supported revision.
    pub revision_max: u32,
    /// The producer's name and version, for logs.
    pub agent: Text,
}

/// A request to publish a version, after its manifest and memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Publish {
    /// The publication's id.
    pub publication: PublicationId,
    /// The topic.
    pub topic: Topic,
    /// The producer's metadata of the version.
    pub metadata: Metadata,
    /// A human-readable reason for lending this kind of memory.
    pub reason: Text,
}

message_kinds! {
    ProducerMessage as FromProducer, ProducerKind: Hello Lend Publish;
    Manifest(part) => ManifestPart { part }
    Withdraw(publication) => Withdraw { publication }
    End { request, topic, withdraw } => End { request, topic, withdraw }
}

message_fields! { Hello { revision_min, revision_max, agent } => Hello { revision_min, revision_max, agent } }
message_fields! {
    Publish { publication, topic, metadata, reason } => Publish { publication, topic, metadata, reason }
}

/// A part of a manifest.
impl Field for Bytes {
    type Wire = Vec<u8>;

    fn into_wire(self) -> Vec<u8> {
        self.into()
    }

    fn from_wire(_: &'static str, part: Vec<u8>) -> Result<Self, MessageError> {
        let (what, bytes, max) = ("a part of a manifest", part.len(), MANIFEST_PART_MAX_BYTES);
        match bytes > max {
            true => Err(MessageError::TooLarge { what, bytes, max }),
            false => Ok(part.into()),
        }
    }
}
