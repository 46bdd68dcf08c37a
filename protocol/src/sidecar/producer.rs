//! Messages from a producer to its server.

use super::{Lend, MANIFEST_PART_MAX_BYTES, PublicationId, checked_text, wire};
use crate::{
    MessageError, Metadata, Topic,
    message::{check_metadata, required},
};
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
    pub agent: String,
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
    pub reason: String,
}

impl From<ProducerMessage> for wire::FromProducer {
    fn from(message: ProducerMessage) -> Self {
        use wire::ProducerKind as Kind;
        let kind = match message {
            ProducerMessage::Hello(Hello { revision_min, revision_max, agent }) => {
                Kind::Hello(wire::Hello { revision_min, revision_max, agent })
            }
            ProducerMessage::Manifest(part) => Kind::Manifest(wire::ManifestPart { part: part.to_vec() }),
            ProducerMessage::Lend(lend) => Kind::Lend(lend.into()),
            ProducerMessage::Publish(publish) => Kind::Publish(wire::Publish {
                publication: publish.publication.0,
                topic: publish.topic.as_str().into(),
                metadata: publish.metadata.iter().map(Into::into).collect(),
                reason: publish.reason,
            }),
            ProducerMessage::Withdraw(publication) => {
                Kind::Withdraw(wire::Withdraw { publication: publication.0 })
            }
            ProducerMessage::End { request, topic, withdraw } => {
                Kind::End(wire::End { request: request.0, topic: topic.as_str().into(), withdraw })
            }
        };
        Self { kind: Some(kind) }
    }
}

impl TryFrom<wire::FromProducer> for ProducerMessage {
    type Error = MessageError;

    fn try_from(message: wire::FromProducer) -> Result<Self, MessageError> {
        use wire::ProducerKind as Kind;
        Ok(match required("kind", message.kind)? {
            Kind::Hello(hello) => Self::Hello(Hello {
                revision_min: hello.revision_min,
                revision_max: hello.revision_max,
                agent: checked_text("agent", hello.agent)?,
            }),
            Kind::Manifest(wire::ManifestPart { part }) => match part.len() {
                bytes if bytes > MANIFEST_PART_MAX_BYTES => {
                    let max = MANIFEST_PART_MAX_BYTES;
                    return Err(MessageError::TooLarge { what: "a part of a manifest", bytes, max });
                }
                _ => Self::Manifest(part.into()),
            },
            Kind::Lend(lend) => Self::Lend(lend.try_into()?),
            Kind::Publish(publish) => {
                let metadata: Metadata = publish.metadata.into_iter().map(Into::into).collect();
                check_metadata(&metadata)?;
                Self::Publish(Publish {
                    publication: PublicationId(publish.publication),
                    topic: Topic::new(&publish.topic)?,
                    metadata,
                    reason: checked_text("reason", publish.reason)?,
                })
            }
            Kind::Withdraw(wire::Withdraw { publication }) => Self::Withdraw(PublicationId(publication)),
            Kind::End(end) => Self::End {
                request: PublicationId(end.request),
                topic: Topic::new(&end.topic)?,
                withdraw: end.withdraw,
            },
        })
    }
}
