//! [`Peer`]: who is at the other end of a lane.

use std::{
    fmt,
    net::{IpAddr, Ipv6Addr, SocketAddr},
};
use tokio::net::unix::UCred;

use crate::LaneKind;

/// The other end of a lane: an address of the network, or a process of this host.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub enum Peer {
    /// An address; on the server's side, the one that the client claims.
    Network(SocketAddr),
    /// The process that connected to a Unix socket, or listened on it.
    Local(LocalProcess),
}

/// A process, as the kernel noted it when it connected or listened (`SO_PEERCRED`). It may have handed its socket to
/// another process since.
///
/// User and group are numbers of this process' user namespace. A user without a number here, for example root of a
/// container with user namespaces, appears as the [overflow uid](crate::unix::overflow_uid): many users share it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LocalProcess {
    /// The effective user.
    pub uid: u32,
    /// The effective group.
    pub gid: u32,
    /// The process; `None` in another PID namespace.
    pub pid: Option<u32>,
}

impl Peer {
    /// The address on the network; `None` for a process of this host.
    pub fn address(&self) -> Option<SocketAddr> {
        match self {
            Self::Network(address) => Some(*address),
            Self::Local(_) => None,
        }
    }

    /// The process of this host; `None` for an address, even one of this host.
    pub fn process(&self) -> Option<LocalProcess> {
        match self {
            Self::Network(_) => None,
            Self::Local(process) => Some(*process),
        }
    }

    /// The address by which limits count the peer. Each local user counts as a network of its own, `fc00:0:UID::/64`:
    /// RFC 4193 leaves fc00::/8 unused.
    pub fn ip(&self) -> IpAddr {
        match self {
            Self::Network(address) => address.ip(),
            Self::Local(process) => Ipv6Addr::from_bits(0xfc00 << 112 | u128::from(process.uid) << 64).into(),
        }
    }

    /// The kind of a lane over a byte stream to this peer.
    pub(crate) fn stream_kind(&self) -> LaneKind {
        match self {
            Self::Network(_) => LaneKind::Tcp,
            Self::Local(_) => LaneKind::Unix,
        }
    }

    /// Whether the peer is on this host: a local process, or a loopback address.
    pub fn is_on_this_host(&self) -> bool {
        self.address().is_none_or(|address| address.ip().is_loopback())
    }
}

impl From<SocketAddr> for Peer {
    fn from(address: SocketAddr) -> Self {
        Self::Network(address)
    }
}

impl From<UCred> for LocalProcess {
    fn from(found: UCred) -> Self {
        let pid = found.pid().and_then(|pid| u32::try_from(pid).ok());
        Self { uid: found.uid(), gid: found.gid(), pid: pid.filter(|pid| *pid > 0) }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Network(address) => address.fmt(f),
            Self::Local(process) => process.fmt(f),
        }
    }
}

/// As `Display`, since an address has one form for both.
impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for LocalProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pid {
            Some(pid) => write!(f, "uid {} (process {pid})", self.uid),
            None => write!(f, "uid {}", self.uid),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_users_have_names_and_networks_of_their_own() {
        let process = |uid, pid| Peer::Local(LocalProcess { uid, gid: 5, pid });
        assert_eq!(process(1_000, Some(4_242)).to_string(), "uid 1000 (process 4242)");
        assert_eq!(process(0, None).to_string(), "uid 0");
        assert_eq!(process(0x0001_0002, None).ip(), "fc00:0:1:2::".parse::<IpAddr>().unwrap());
        assert_ne!(process(1, None).ip(), process(2, None).ip());
        let address: SocketAddr = "192.0.2.1:47".parse().unwrap();
        assert_eq!(
            format!("{0} {0:?} {1}", Peer::from(address), Peer::from(address).ip()),
            "192.0.2.1:47 192.0.2.1:47 192.0.2.1"
        );
    }
}
