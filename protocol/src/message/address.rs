//! Addresses of further lanes, of other servers, and of peers that serve chunks.

use super::{
    Field, LaneGrant,
    field::{address, exactly, list},
    wire,
};
use crate::MessageError;

/// The most addresses in one message. Hosts have only a few addresses, and an attempt to connect may take seconds.
pub const ADDRESSES_MAX: usize = 16;

/// The most sources in one message. A client uses a few at once, and receives others when they fail.
pub const SOURCES_MAX: usize = 64;

/// The transport of a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Transport {
    /// QUIC over UDP.
    Quic,
    /// TLS over TCP.
    Tcp,
}

/// An address at which lanes of a session may be opened.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct LaneAddress {
    /// The transport.
    pub transport: Transport,
    /// `host:port`; `None` for the address of the control connection.
    pub address: Option<String>,
}

/// A peer that serves chunks of a subscription.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// The transport by which the peer is reached.
    pub transport: Transport,
    /// `host:port`.
    pub address: String,
    /// The SHA-256 of the peer's public key.
    pub key: [u8; 32],
    /// The grant that the client presents to the peer.
    pub grant: LaneGrant,
}

impl Transport {
    fn code(self) -> u32 {
        match self {
            Self::Quic => 1,
            Self::Tcp => 2,
        }
    }

    /// `None` for a transport that this build does not know.
    fn from_code(code: u32) -> Option<Self> {
        [Self::Quic, Self::Tcp].into_iter().find(|transport| transport.code() == code)
    }
}

/// Addresses with unknown transports are validated and then ignored.
impl Field for Vec<LaneAddress> {
    type Wire = Vec<wire::LaneAddress>;

    fn into_wire(self) -> Self::Wire {
        let wire = |LaneAddress { transport, address }: LaneAddress| wire::LaneAddress {
            transport: transport.code(),
            address: address.unwrap_or_default(),
        };
        self.into_iter().map(wire).collect()
    }

    fn from_wire(field: &'static str, wire: Self::Wire) -> Result<Self, MessageError> {
        let addresses = list(field, ADDRESSES_MAX, wire, |wire| {
            let address = Some(wire.address).filter(|text| !text.is_empty()).map(address).transpose()?;
            Ok(Transport::from_code(wire.transport).map(|transport| LaneAddress { transport, address }))
        });
        Ok(addresses?.into_iter().flatten().collect())
    }
}

/// Sources with unknown transports are validated and then ignored.
impl Field for Vec<Source> {
    type Wire = Vec<wire::Source>;

    fn into_wire(self) -> Self::Wire {
        let wire = |Source { transport, address, key, grant }: Source| wire::Source {
            transport: transport.code(),
            address,
            key: key.to_vec(),
            grant: grant.into_wire(),
        };
        self.into_iter().map(wire).collect()
    }

    fn from_wire(field: &'static str, wire: Self::Wire) -> Result<Self, MessageError> {
        let sources = list(field, SOURCES_MAX, wire, |wire| {
            let (address, key) = (address(wire.address)?, exactly("key", &wire.key)?);
            let grant = LaneGrant::from_wire("grant", wire.grant)?;
            Ok(Transport::from_code(wire.transport).map(|transport| Source {
                transport,
                address,
                key,
                grant,
            }))
        });
        Ok(sources?.into_iter().flatten().collect())
    }
}

/// The addresses of other servers.
impl Field for Vec<String> {
    type Wire = Self;

    fn into_wire(self) -> Self {
        self
    }

    fn from_wire(field: &'static str, wire: Self) -> Result<Self, MessageError> {
        list(field, ADDRESSES_MAX, wire, address)
    }
}
