//! [`Logins`]: bounds unauthenticated connections, so that no network can lock others out.

use crate::shares::{Eviction, Place, Shares};
use std::net::{IpAddr, Ipv6Addr};

/// The maximum memory of an unauthenticated connection: 128 KiB for an unfinished handshake, or later for a message of
/// up to 64 KiB and the buffers before it; and a task.
pub(crate) const LOGIN_BYTES: u64 = 150 << 10;

/// The minimum number of places in a small container: fewer could be filled from a few networks.
pub(crate) const PLACES_MIN: usize = 64;

/// The unauthenticated connections of a server, by network. Cheap to clone.
///
/// A new connection always gets a place. If there are too many, the oldest of the network with the most is evicted: an
/// attacker who fills the places from a few networks locks out no other network.
#[derive(Debug, Clone)]
pub struct Logins(Shares<IpAddr>);

/// The place of one connection, until this is dropped.
pub type Login = Place<IpAddr>;

/// The network of an address: an IPv4 address itself, or the first 64 bits of an IPv6 address, because one host may
/// have all addresses with that prefix.
pub(crate) fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
        address => address,
    }
}

impl Logins {
    /// Places for `max` connections.
    pub fn new(max: usize) -> Self {
        Self(Shares::new(max))
    }

    /// Gives a place to a connection from `address`; evicts another connection if necessary.
    pub fn enter(&self, address: IpAddr) -> (Login, Eviction) {
        self.0.enter(network_of(address))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    #[test]
    fn a_64_bit_prefix_is_one_network() {
        let one = |number: u128| IpAddr::from(Ipv6Addr::from_bits(0x2001_0db8 << 96 | number));
        assert_eq!(network_of(one(1)), network_of(one(u128::from(u64::MAX))));
        assert_ne!(network_of(one(1)), network_of(one(1 << 64)));
        let address = Ipv4Addr::new(10, 0, 0, 1);
        assert_eq!(network_of(address.to_ipv6_mapped().into()), network_of(address.into()));
    }
}
