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
}

impl FromStr for Advertised {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        if let Ok(ip) = text.parse::<Ipv6Addr>() {
            return Ok(Self { host: format!("[{ip}]"), port: None });
        }
        let (host, port) = match text.rsplit_once(':') {
            Some((host, port)) if !text.ends_with(']') => {
                let port = port.parse().map_err(|_| AddressError::Port(port.into()))?;
                (host, Some(port))
            }
            _ => (text, None),
        };
        match host.is_empty() {
            true => Err(AddressError::NoHost),
            false => Ok(Self { host: host.into(), port }),
        }
    }
}

impl Advertised {
    /// The address as `host:port`; `port` is the listening port.
    pub fn with_port(&self, port: u16) -> String {
        format!("{}:{}", self.host, self.port.unwrap_or(port))
    }
}

/// The address under which other hosts most likely reach `listening`: itself, or one of this machine's if that is
/// unspecified. Returns whether it is a guess.
///
/// ```
/// let listening = "127.0.0.1:4747".parse().unwrap();
/// assert_eq!(tensor_relay_server::reachable(listening), (listening, false));
/// ```
pub fn reachable(listening: SocketAddr) -> (SocketAddr, bool) {
    if !listening.ip().is_unspecified() {
        return (listening, false);
    }
    (SocketAddr::new(outgoing_address(listening.is_ipv4()), listening.port()), true)
}

/// The source address of this machine's default route, or the loopback address without one. "Connecting" a UDP socket
/// sends nothing; it only looks up the route. The destinations are reserved for documentation (RFC 5737, RFC 3849).
fn outgoing_address(ipv4: bool) -> IpAddr {
    let (any, documentation_address): (IpAddr, IpAddr) = match ipv4 {
        true => (Ipv4Addr::UNSPECIFIED.into(), Ipv4Addr::new(192, 0, 2, 1).into()),
        false => (Ipv6Addr::UNSPECIFIED.into(), Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into()),
    };
    let route = UdpSocket::bind((any, 0)).and_then(|socket| {
        socket.connect((documentation_address, 9))?;
        socket.local_addr()
    });
    match route {
        Ok(local) if !local.ip().is_unspecified() => local.ip(),
        _ if ipv4 => Ipv4Addr::LOCALHOST.into(),
        _ => Ipv6Addr::LOCALHOST.into(),
    }
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
    }

    #[test]
    fn a_specified_address_is_advertised_unchanged() {
        let address = "127.0.0.1:5".parse().unwrap();
        assert_eq!(reachable(address), (address, false));
        let (guess, guessed) = reachable("0.0.0.0:5".parse().unwrap());
        assert!(guessed && !guess.ip().is_unspecified() && guess.port() == 5);
    }
}
