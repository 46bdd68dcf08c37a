//! Messages on the control stream: a length of four bytes, little-endian, then the protobuf (PROTOCOL.md §3.1).

use super::{ClientMessage, METADATA_MAX_BYTES, ServerMessage, wire};
use crate::{MessageError, RELAYS_MAX, TopicEntry};
use prost::Message;

/// The largest control message, in bytes. Larger data is sent on data streams.
pub const FRAME_MAX_BYTES: usize = 64 << 10;

/// An upper bound of the encoding of one [`TopicEntry`]: a name of 255 bytes, five numbers, relays, and
/// their tags.
const TOPIC_ENTRY_MAX_BYTES: usize = 320 + RELAYS_MAX * 18;

const _: () =
    assert!(METADATA_MAX_BYTES * 2 <= FRAME_MAX_BYTES, "an Announce with full metadata fits a frame");

/// Encodes a client's message with its length in front.
pub fn encode_client(message: ClientMessage) -> Vec<u8> {
    frame(&wire::FromClient::from(message))
}

/// Encodes a server's message with its length in front.
pub fn encode_server(message: ServerMessage) -> Vec<u8> {
    frame(&wire::FromServer::from(message))
}

/// Encodes a message with its length in front.
pub(crate) fn frame(message: &impl Message) -> Vec<u8> {
    let bytes = message.encoded_len();
    let mut out = Vec::with_capacity(4 + bytes);
    out.extend_from_slice(&(bytes as u32).to_le_bytes());
    message.encode_raw(&mut out);
    out
}

/// Decodes the length in front of a message.
///
/// # Errors
/// [`MessageError::TooLarge`] beyond [`FRAME_MAX_BYTES`], so that the peer cannot make this end allocate more.
pub fn decode_frame_length(prefix: [u8; 4]) -> Result<usize, MessageError> {
    match u32::from_le_bytes(prefix) as usize {
        bytes if bytes > FRAME_MAX_BYTES => {
            Err(MessageError::TooLarge { what: "control message", bytes, max: FRAME_MAX_BYTES })
        }
        bytes => Ok(bytes),
    }
}

impl ServerMessage {
    /// Splits the answer to `List` into messages that each fit a frame.
    pub fn topics(entries: Vec<TopicEntry>) -> Vec<Self> {
        const PER_MESSAGE: usize = FRAME_MAX_BYTES / TOPIC_ENTRY_MAX_BYTES;
        let parts = entries.len().div_ceil(PER_MESSAGE).max(1);
        let mut entries = entries.into_iter();
        (1..=parts)
            .map(|part| Self::Topics {
                topics: entries.by_ref().take(PER_MESSAGE).collect(),
                more: part < parts,
            })
            .collect()
    }
}

#[cfg(test)]
mod tests;
