//! What a producer says to the server beside it.

use super::{Lend, MANIFEST_PART_MAX_BYTES, PublicationId, text, wire};
use crate::{
    MessageError, Metadata, Topic,
    message::{check_metadata, required},
};
use bytes::Bytes;

/// A message from a producer.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProducerMessage {
    /// Its first message.
    Hello(Hello),
    /// A part of the manifest of the version that is published next, in order.
    Manifest(Bytes),
    /// Memory that holds bytes of the version that is published next.
    Lend(Lend),
    /// Publishes what was said since the last publish.
    Publish(Publish),
    /// Takes a version back before its turn.
    Withdraw(PublicationId),
    /// Says that nothing will follow in a topic, or takes all of it back.
    End {
        /// Names this request, among publications.
        request: PublicationId,
        /// Which topic.
        topic: Topic,
        /// Whether what is retained goes, too.
        withdraw: bool,
    },
}

/// The beginning of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// The oldest revision that the producer speaks.
    pub revision_min: u32,
    /// The newest revision that the producer speaks.
    pub revision_max: u32,
    /// Its name and version, for logs.
    pub agent: String,
}

/// A version, complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Publish {
    /// What the producer calls it.
    pub publication: PublicationId,
    /// Into which topic it goes.
    pub topic: Topic,
    /// What the producer says of it.
    pub metadata: Metadata,
    /// Why the tensors come by the way that they do, for people.
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
                agent: text("agent", hello.agent)?,
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
                    reason: text("reason", publish.reason)?,
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
