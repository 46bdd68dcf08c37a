//! The sidecar protocol: messages between a producer and a server on the same machine, over a Unix socket (SIDECAR.md
//! §14).
//!
//! A training process publishes versions through a `tensor-relay serve` on the same machine: it lends the tensors in
//! shared host or GPU memory and describes them in these messages. They are framed and validated like control messages:
//! `wire` contains the protobuf types; all other code uses the typed messages defined here.

mod memory;
mod producer;
mod server;
pub(crate) mod wire;

pub use memory::{CudaDevice, IpcHandle, Lend, Memory, MemoryKind};
pub use producer::{Hello, ProducerMessage, Publish};
pub use server::{Progress, Refusal, ServerMessage, Welcome};

use crate::{
    MessageError,
    message::{
        Field,
        field::{message_fields, message_kinds, numbers},
        frame,
    },
};
use std::ops::Deref;

/// The supported revisions of the sidecar protocol, which are independent of the network protocol's.
pub const REVISIONS: std::ops::RangeInclusive<u32> = 1..=1;

/// The most bytes of a manifest in one message. The remainder of the frame is for protobuf's tags and lengths.
pub const MANIFEST_PART_MAX_BYTES: usize = 60 << 10;

/// The id of a publication, or of a request to end a topic, within a connection. The producer chooses it and reuses
/// none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PublicationId(pub u64);

numbers! { PublicationId(u64) }

/// A text for people, such as the reason of a refusal. A longer one is truncated, at a character boundary; from a peer,
/// it is an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Text(String);

impl Text {
    /// The maximum length in bytes.
    pub const MAX_BYTES: usize = 1_024;
}

impl<T: AsRef<str>> From<T> for Text {
    fn from(text: T) -> Self {
        let text = text.as_ref();
        Self(text[..text.floor_char_boundary(Self::MAX_BYTES)].into())
    }
}

impl Deref for Text {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl Field for Text {
    type Wire = String;

    fn into_wire(self) -> String {
        self.0
    }

    fn from_wire(what: &'static str, text: String) -> Result<Self, MessageError> {
        match text.len() {
            bytes if bytes > Self::MAX_BYTES => {
                Err(MessageError::TooLarge { what, bytes, max: Self::MAX_BYTES })
            }
            _ => Ok(Self(text)),
        }
    }
}

/// Encodes a producer's message with its length in front.
pub fn encode_producer(message: ProducerMessage) -> Vec<u8> {
    frame(&wire::FromProducer::from(message))
}

/// Encodes a server's message with its length in front.
pub fn encode_server(message: ServerMessage) -> Vec<u8> {
    frame(&wire::ToProducer::from(message))
}

#[cfg(test)]
mod tests;
