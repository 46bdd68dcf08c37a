//! What a producer and a server beside it say to each other over a Unix socket (SIDECAR.md §14).
//!
//! A training process hands versions to a `tensor-relay serve` on the same machine: the tensors in shared memory, and
//! these messages about them. They are framed and checked like control messages: `wire` holds them as protobuf has
//! them, the typed messages here cannot be wrong.

mod memory;
mod producer;
mod server;
pub(crate) mod wire;

pub use memory::{CudaDevice, IpcHandle, Lend, Memory, MemoryKind};
pub use producer::{Hello, ProducerMessage, Publish};
pub use server::{Progress, Refusal, ServerMessage, Welcome};

use crate::{MessageError, message::frame};
use prost::Message;

/// The revisions of this protocol that this build speaks. They are counted apart from those of the network's.
pub const REVISIONS: std::ops::RangeInclusive<u32> = 1..=1;

/// The most bytes of a text for people: why something was refused, or which way memory took.
pub const TEXT_MAX_BYTES: usize = 1_024;

/// The most bytes of a manifest that one message carries. The rest of the frame is for its tags.
pub const MANIFEST_PART_MAX_BYTES: usize = 60 << 10;

/// Names one publish, or one request to end a topic, within a connection. The producer chooses it, and never twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PublicationId(pub u64);

/// Writes a producer's message with its length in front.
pub fn encode_producer(message: ProducerMessage) -> Vec<u8> {
    frame(&wire::FromProducer::from(message))
}

/// Writes a server's message with its length in front.
pub fn encode_server(message: ServerMessage) -> Vec<u8> {
    frame(&wire::ToProducer::from(message))
}

impl ProducerMessage {
    /// Reads a message from the bytes that follow its length.
    ///
    /// # Errors
    /// [`MessageError`] when the bytes are no message of a producer, or one that breaks a rule.
    pub fn decode(bytes: &[u8]) -> Result<Self, MessageError> {
        wire::FromProducer::decode(bytes).map_err(MessageError::malformed)?.try_into()
    }
}

impl ServerMessage {
    /// Reads a message from the bytes that follow its length.
    ///
    /// # Errors
    /// [`MessageError`] when the bytes are no message of a server, or one that breaks a rule.
    pub fn decode(bytes: &[u8]) -> Result<Self, MessageError> {
        wire::ToProducer::decode(bytes).map_err(MessageError::malformed)?.try_into()
    }
}

/// `text` cut to what a message may carry, at the end of a character.
pub fn text_that_fits(mut text: String) -> String {
    text.truncate(text.floor_char_boundary(TEXT_MAX_BYTES));
    text
}

/// A text of a message.
fn text(what: &'static str, text: String) -> Result<String, MessageError> {
    match text.len() {
        bytes if bytes > TEXT_MAX_BYTES => Err(MessageError::TooLarge { what, bytes, max: TEXT_MAX_BYTES }),
        _ => Ok(text),
    }
}

#[cfg(test)]
mod tests;
