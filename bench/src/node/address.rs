//! The address of a node.

use super::PORT;
use std::{fmt, net::Ipv6Addr, str::FromStr};

/// `HOST[:PORT]` of a node. The host is a name, an IPv4 address or an IPv6 address, the latter in brackets if a port
/// follows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeAddress {
    host: String,
    port: u16,
}

/// The error for a text that is no node address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not HOST or HOST:PORT")]
pub struct NodeAddressError(String);

impl NodeAddress {
    /// The same host with another port.
    pub(crate) fn with_port(&self, port: u16) -> Self {
        Self { host: self.host.clone(), port }
    }
}

impl fmt::Display for NodeAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

impl FromStr for NodeAddress {
    type Err = NodeAddressError;

    fn from_str(text: &str) -> Result<Self, NodeAddressError> {
        let invalid = || NodeAddressError(text.into());
        if text.parse::<Ipv6Addr>().is_ok() {
            return Ok(Self { host: text.into(), port: PORT });
        }
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (host, after) = rest.split_once(']').ok_or_else(invalid)?;
                host.parse::<Ipv6Addr>().map_err(|_| invalid())?;
                (host, after)
            }
            None => text.split_at(text.find(':').unwrap_or(text.len())),
        };
        let is_valid = |c: char| c.is_ascii_alphanumeric() || ".-_:".contains(c);
        let port = match port {
            "" => PORT,
            port => port.strip_prefix(':').and_then(|port| port.parse().ok()).ok_or_else(invalid)?,
        };
        match !host.is_empty() && host.chars().all(is_valid) && port != 0 {
            true => Ok(Self { host: host.into(), port }),
            false => Err(invalid()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_parsed() {
        for (text, expected) in [
            ("node-1", "node-1:4748"),
            ("node-1.example:99", "node-1.example:99"),
            ("10.0.0.7", "10.0.0.7:4748"),
            ("10.0.0.7:1", "10.0.0.7:1"),
            ("fe80::1", "[fe80::1]:4748"),
            ("[fe80::1]", "[fe80::1]:4748"),
            ("[fe80::1]:7", "[fe80::1]:7"),
        ] {
            let address: NodeAddress = text.parse().unwrap();
            assert_eq!(address.to_string(), expected);
            assert!(address.with_port(5).to_string().ends_with(":5"));
        }
    }

    #[test]
    fn invalid_addresses_are_refused() {
        for text in [
            "", ":1", "a:", "a:b", "a:0", "a:70000", "a b", "a:1:2", "[::1", "[x]:1", "[::1]1", "r://a",
            "a/b",
        ] {
            assert!(text.parse::<NodeAddress>().is_err(), "{text:?}");
        }
    }
}
