//! [`PeerNetwork`]: a network of clients that the operator names.

use std::{fmt, net::IpAddr, str::FromStr};

/// A network in which a server may dial the ports of clients that share, e.g. `10.0.0.0/8` or `fd00::/8`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerNetwork {
    first: IpAddr,
    prefix_bits: u8,
}

/// A text is no network.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a network: write an address and the length of its prefix, e.g. 10.0.0.0/8 or fd00::/8")]
pub struct PeerNetworkError(String);

impl PeerNetwork {
    /// Whether the network has this address. An IPv4 address in IPv6 notation counts as the former.
    pub fn contains(&self, address: IpAddr) -> bool {
        match (self.first, address.to_canonical()) {
            (IpAddr::V4(first), IpAddr::V4(address)) => {
                let mask = u32::MAX.checked_shl(32 - u32::from(self.prefix_bits)).unwrap_or(0);
                first.to_bits() & mask == address.to_bits() & mask
            }
            (IpAddr::V6(first), IpAddr::V6(address)) => {
                let mask = u128::MAX.checked_shl(128 - u32::from(self.prefix_bits)).unwrap_or(0);
                first.to_bits() & mask == address.to_bits() & mask
            }
            _ => false,
        }
    }
}

impl FromStr for PeerNetwork {
    type Err = PeerNetworkError;

    fn from_str(text: &str) -> Result<Self, PeerNetworkError> {
        let parsed = || {
            let (first, prefix_bits) = text.split_once('/')?;
            let (first, prefix_bits) = (first.parse::<IpAddr>().ok()?, prefix_bits.parse().ok()?);
            let bits_max = if first.is_ipv4() { 32 } else { 128 };
            (prefix_bits <= bits_max).then_some(Self { first, prefix_bits })
        };
        parsed().ok_or_else(|| PeerNetworkError(text.into()))
    }
}

impl fmt::Display for PeerNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.first, self.prefix_bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_has_the_addresses_with_its_prefix() {
        for (network, inside, outside) in [
            ("10.0.0.0/8", "10.255.1.2", "11.0.0.1"),
            ("10.1.2.3/32", "10.1.2.3", "10.1.2.2"),
            ("10.1.2.128/25", "::ffff:10.1.2.129", "10.1.2.127"),
            ("fd00::/8", "fdff::1", "fe00::1"),
            ("fd00::1/128", "fd00::1", "fd00::2"),
            ("0.0.0.0/0", "1.2.3.4", "::1"),
            ("::/0", "::1", "1.2.3.4"),
        ] {
            let parsed: PeerNetwork = network.parse().unwrap();
            assert!(parsed.contains(inside.parse().unwrap()), "{network} has {inside}");
            assert!(!parsed.contains(outside.parse().unwrap()), "{network} lacks {outside}");
            assert_eq!(parsed.to_string(), network);
        }
    }

    #[test]
    fn other_texts_are_no_networks() {
        for wrong in ["", "10.0.0.0", "10.0.0.0/33", "fd00::/129", "/8", "a/8", "10.0.0.0/-1", "10.0.0.0/8/8"]
        {
            assert_eq!(wrong.parse::<PeerNetwork>(), Err(PeerNetworkError(wrong.into())));
        }
    }
}
