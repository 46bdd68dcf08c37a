//! The addresses that tickets name.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    str::FromStr,
};

/// An address to advertise: a host, and a port if it differs from the listening port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Advertised {
    host: String,
    port: Option<u16>,
}

/// Why a text is not an address to advertise.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AddressError {
    /// The part after the last colon is not a port.
    #[error("{0:?} is not a port")]
    Port(String),
    /// There is no host.
    #[error("it has no host: write HOST or HOST:PORT")]
    NoHost,
    /// The host is `0.0.0.0` or `[::]`: a client would connect to itself.
    #[error("{0} means every address of a machine: write the one that clients reach")]
    Unspecified(IpAddr),
}

impl FromStr for Advertised {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        if let Ok(ip) = text.parse::<Ipv6Addr>() {
            return Self::checked(format!("[{ip}]"), None);
        }
        let (host, port) = match text.rsplit_once(':') {
            Some((host, port)) if !text.ends_with(']') => {
                let port = port.parse().map_err(|_| AddressError::Port(port.into()))?;
                (host, Some(port))
            }
            _ => (text, None),
        };
        Self::checked(host.into(), port)
    }
}

impl Advertised {
    fn checked(host: String, port: Option<u16>) -> Result<Self, AddressError> {
        match host.trim_matches(['[', ']']).parse::<IpAddr>() {
            _ if host.is_empty() => Err(AddressError::NoHost),
            Ok(ip) if ip.is_unspecified() => Err(AddressError::Unspecified(ip)),
            _ => Ok(Self { host, port }),
        }
    }

    /// The address as `host:port`; `port` is the listening port.
    pub fn with_port(&self, port: u16) -> String {
        format!("{}:{}", self.host, self.port.unwrap_or(port))
    }
}

/// The addresses under which other hosts most likely reach `listening`, never an unspecified one: itself, or this
/// machine's source addresses on its default routes, of IPv4 first. Without a route, a loopback address, which only this
/// machine reaches.
///
/// ```
/// let listening = "127.0.0.1:4747".parse().unwrap();
/// assert_eq!(tensor_relay_server::reachable(listening), [listening]);
/// ```
pub fn reachable(listening: SocketAddr) -> Vec<SocketAddr> {
    let guesses = match listening.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => vec![outgoing_address(true)],
        IpAddr::V6(ip) if ip.is_unspecified() => vec![outgoing_address(true), outgoing_address(false)],
        ip => vec![Some(ip)],
    };
    let mut found: Vec<IpAddr> = guesses.into_iter().flatten().collect();
    if found.is_empty() {
        found.push(Ipv4Addr::LOCALHOST.into());
    }
    found.into_iter().map(|ip| SocketAddr::new(ip, listening.port())).collect()
}

/// The source address of this machine's default route; `None` without one. "Connecting" a UDP socket sends nothing; it
/// only looks up the route. The destinations are reserved for documentation (RFC 5737, RFC 3849).
fn outgoing_address(ipv4: bool) -> Option<IpAddr> {
    let (any, documentation_address): (IpAddr, IpAddr) = match ipv4 {
        true => (Ipv4Addr::UNSPECIFIED.into(), Ipv4Addr::new(192, 0, 2, 1).into()),
        false => (Ipv6Addr::UNSPECIFIED.into(), Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into()),
    };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect((documentation_address, 9)).ok()?;
    let local = socket.local_addr().ok()?.ip();
    (!local.is_unspecified()).then_some(local)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_without_a_port_gets_the_listening_port() {
        for (text, expected) in [
            ("gpu-7", "gpu-7:4747"),
            ("gpu-7:9", "gpu-7:9"),
            ("10.0.0.1", "10.0.0.1:4747"),
            ("fe80::1", "[fe80::1]:4747"),
            ("[fe80::1]:9", "[fe80::1]:9"),
            ("[fe80::1]", "[fe80::1]:4747"),
        ] {
            assert_eq!(text.parse::<Advertised>().unwrap().with_port(4747), expected);
        }
        assert!("host:port".parse::<Advertised>().is_err());
        assert!(":1".parse::<Advertised>().is_err());
        for unspecified in ["0.0.0.0", "0.0.0.0:4747", "::", "[::]", "[::]:4747"] {
            let refused = unspecified.parse::<Advertised>();
            assert!(matches!(refused, Err(AddressError::Unspecified(_))), "{unspecified}");
        }
    }

    #[test]
    fn a_specified_address_is_advertised_unchanged() {
        let address = "127.0.0.1:5".parse().unwrap();
        assert_eq!(reachable(address), [address]);
        for all in ["0.0.0.0:5", "[::]:5"] {
            let guesses = reachable(all.parse().unwrap());
            assert!(!guesses.is_empty());
            assert!(
                guesses.iter().all(|guess| !guess.ip().is_unspecified() && guess.port() == 5),
                "{guesses:?}"
            );
        }
    }
}
