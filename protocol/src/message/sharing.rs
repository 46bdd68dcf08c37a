//! Messages by which the receivers of a version take its chunks from each other (PROTOCOL.md §3.15).

use super::{
    Field, LaneGrant, SubscriptionId, Transport,
    field::{address, exactly, list, message_fields},
    wire,
};
use crate::{ChunkIndex, CodecId, EncodingEntry, EncodingHash, Epoch, MessageError, RangeSet, Version};
use std::{net::SocketAddr, sync::Arc};

/// The most sources in one message. A client uses a few at once, and receives others when they fail.
pub const SOURCES_MAX: usize = 64;

/// The most addresses of a peer: one for each transport.
pub const PEER_ADDRESSES_MAX: usize = 2;

/// The most ranges of chunks of a source. The peer itself names the chunks that it holds; these help to choose peers.
pub const SOURCE_RANGES_MAX: usize = 16;

/// The most encodings in one message: so many fit a frame.
pub const ENCODINGS_MAX: usize = 1_024;

/// The bytes of one encoding in a message.
const ENTRY_BYTES: usize = 48;

/// An address at which a client listens for peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerAddress {
    /// The transport.
    pub transport: Transport,
    /// The address, without a name to look up. An unspecified one stands for the address of the client's session.
    pub address: SocketAddr,
}

/// Where a client listens for peers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Share {
    /// The addresses; none from a client that only takes.
    pub addresses: Vec<PeerAddress>,
    /// The SHA-256 of its public key; `None` from a client that neither serves nor takes any more.
    pub key: Option<[u8; 32]>,
    /// Where it is.
    pub site: Site,
}

/// Where a client is, e.g. a rack or a data centre, by a label that its operator chose. Chunks pass from one site to another
/// as seldom as possible.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Site(Arc<str>);

impl Default for Site {
    fn default() -> Self {
        Self("".into())
    }
}

/// A peer that holds chunks of a version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// Its addresses: at least one.
    pub addresses: Vec<PeerAddress>,
    /// The SHA-256 of its public key.
    pub key: [u8; 32],
    /// The grant that the client presents to it.
    pub grant: LaneGrant,
    /// The chunks that it holds, as far as the server knows.
    pub chunks: RangeSet,
    /// Whether it is at the site of the client.
    pub is_near: bool,
}

/// A change of the chunks that the sender of this message can send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// The subscription.
    pub subscription: SubscriptionId,
    /// The topic's epoch.
    pub epoch: Epoch,
    /// The version.
    pub version: Version,
    /// Further chunks that it can send.
    pub added: RangeSet,
    /// Chunks that it can send no longer.
    pub withdrawn: RangeSet,
}

message_fields! { Share { addresses, key, site } => Share { addresses, key, site }, Share::check }

message_fields! {
    Held { subscription, epoch, version, added, withdrawn } =>
    Held { subscription, epoch, version, added, withdrawn },
    Held::check
}

impl Share {
    fn check(&self) -> Result<(), MessageError> {
        match self.key.is_some() || self.addresses.is_empty() {
            true => Ok(()),
            false => Err(MessageError::MissingField("key")),
        }
    }
}

impl Site {
    /// The site with a label of at most [`MAX_BYTES`](Self::MAX_BYTES) printable ASCII characters; without any, it is
    /// that of all who name none.
    ///
    /// # Errors
    /// [`MessageError`] for another label.
    pub fn new(label: &str) -> Result<Self, MessageError> {
        let (what, bytes, max) = ("the label of a site", label.len(), Self::MAX_BYTES);
        if bytes > max {
            return Err(MessageError::TooLarge { what, bytes, max });
        }
        match label.bytes().all(|byte| byte.is_ascii_graphic()) {
            true => Ok(Self(label.into())),
            false => {
                let text = "a label of a site that has other characters than printable ASCII";
                Err(MessageError::Malformed(text.into()))
            }
        }
    }

    /// The longest label.
    pub const MAX_BYTES: usize = 64;

    /// The label.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Field for Site {
    type Wire = String;

    fn into_wire(self) -> String {
        self.as_str().into()
    }

    fn from_wire(_: &'static str, wire: String) -> Result<Self, MessageError> {
        Self::new(&wire)
    }
}

impl Held {
    fn check(&self) -> Result<(), MessageError> {
        match self.added.intersection(&self.withdrawn).is_empty() {
            true => Ok(()),
            false => Err(MessageError::Malformed("chunks that are both added and withdrawn".into())),
        }
    }
}

/// Addresses with unknown transports are validated and then ignored.
impl Field for Vec<PeerAddress> {
    type Wire = Vec<wire::LaneAddress>;

    fn into_wire(self) -> Self::Wire {
        let wire = |PeerAddress { transport, address }: PeerAddress| wire::LaneAddress {
            transport: transport.code(),
            address: address.to_string(),
        };
        self.into_iter().map(wire).collect()
    }

    fn from_wire(field: &'static str, wire: Self::Wire) -> Result<Self, MessageError> {
        let addresses = list(field, PEER_ADDRESSES_MAX, wire, |wire| {
            let address = address(wire.address)?
                .parse()
                .map_err(|_| MessageError::Malformed("a peer's address that is not an IP address".into()))?;
            Ok(Transport::from_code(wire.transport).map(|transport| PeerAddress { transport, address }))
        });
        Ok(addresses?.into_iter().flatten().collect())
    }
}

/// Sources with unknown transports alone are validated and then ignored.
impl Field for Vec<Source> {
    type Wire = Vec<wire::Source>;

    fn into_wire(self) -> Self::Wire {
        let wire = |Source { addresses, key, grant, chunks, is_near }: Source| wire::Source {
            is_near,
            addresses: addresses.into_wire(),
            key: key.to_vec(),
            grant: grant.into_wire(),
            chunks: chunks.into_wire(),
        };
        self.into_iter().map(wire).collect()
    }

    fn from_wire(field: &'static str, wire: Self::Wire) -> Result<Self, MessageError> {
        let sources = list(field, SOURCES_MAX, wire, |wire| {
            if wire.addresses.is_empty() {
                return Err(MessageError::MissingField("addresses"));
            }
            let (what, found, max) = ("chunks", wire.chunks.len(), SOURCE_RANGES_MAX);
            if found > max {
                return Err(MessageError::TooMany { what, found, max });
            }
            Ok(Source {
                addresses: Field::from_wire("addresses", wire.addresses)?,
                key: exactly("key", &wire.key)?,
                grant: Field::from_wire("grant", wire.grant)?,
                chunks: Field::from_wire(what, wire.chunks)?,
                is_near: wire.is_near,
            })
        });
        Ok(sources?.into_iter().filter(|source| !source.addresses.is_empty()).collect())
    }
}

/// Each entry has the chunk in bytes 0..4, the codec in byte 4, zeros in 5..8, the base in 8..16 and the hash in 16..48.
/// Entries with unknown codecs are validated and then ignored.
impl Field for Vec<EncodingEntry> {
    type Wire = Vec<u8>;

    fn into_wire(self) -> Vec<u8> {
        let wire = |entry: EncodingEntry| {
            let mut bytes = [0; ENTRY_BYTES];
            bytes[..4].copy_from_slice(&entry.chunk.0.to_le_bytes());
            bytes[4] = entry.codec.code();
            bytes[8..16].copy_from_slice(&entry.base.map_or(0, |base| base.0).to_le_bytes());
            bytes[16..].copy_from_slice(&entry.hash.0);
            bytes
        };
        self.into_iter().flat_map(wire).collect()
    }

    fn from_wire(field: &'static str, wire: Vec<u8>) -> Result<Self, MessageError> {
        let entries = list(field, ENCODINGS_MAX, wire.chunks(ENTRY_BYTES).collect(), |bytes| {
            let bytes: [u8; ENTRY_BYTES] = exactly(field, bytes)?;
            if bytes[5..8] != [0; 3] {
                return Err(MessageError::ReservedNotZero);
            }
            let (mut chunk, mut base, mut hash) = ([0; 4], [0; 8], [0; 32]);
            chunk.copy_from_slice(&bytes[..4]);
            base.copy_from_slice(&bytes[8..16]);
            hash.copy_from_slice(&bytes[16..]);
            Ok(CodecId::from_code(bytes[4]).map(|codec| EncodingEntry {
                chunk: ChunkIndex(u32::from_le_bytes(chunk)),
                codec,
                base: Some(Version(u64::from_le_bytes(base))).filter(|base| base.0 != 0),
                hash: EncodingHash(hash),
            }))
        });
        Ok(entries?.into_iter().flatten().collect())
    }
}
