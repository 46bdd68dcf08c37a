//! Addresses of further lanes and of other servers.

use super::{
    Field,
    field::{address, list},
    wire,
};
use crate::MessageError;

/// The most addresses in one message. Hosts have only a few addresses, and an attempt to connect may take seconds.
pub const ADDRESSES_MAX: usize = 16;

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

impl Transport {
    pub(super) fn code(self) -> u32 {
        match self {
            Self::Quic => 1,
            Self::Tcp => 2,
        }
    }

    /// `None` for a transport that this build does not know.
    pub(super) fn from_code(code: u32) -> Option<Self> {
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
