//! [`Listener`]: accepts a server's lanes.

mod quic;
mod retry;
mod streams;

use crate::{
    Identity, Lane, LaneError, LaneKind, Network, Peer, SystemNetwork, Transport, Tuning,
    unix::SocketListener,
};
use quic::{QuicAcceptor, QuicArrival};
pub use retry::HANDSHAKES_PER_SECOND;
use rustix::io::Errno;
use std::{
    fmt,
    future::pending,
    io,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    sync::Arc,
};
use streams::{StreamAcceptor, StreamArrival};
use tensor_relay_protocol::CloseCode;

/// Accepts lanes over UDP, over TCP, or over both with one port number; and over a Unix socket.
pub struct Listener {
    local: SocketAddr,
    tuning: Tuning,
    quic: Option<QuicAcceptor>,
    tcp: Option<StreamAcceptor>,
    socket: Option<(PathBuf, StreamAcceptor)>,
}

/// Why a port cannot be bound. The cause is local.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BindError {
    /// Another process has the UDP port.
    #[error("UDP port {} of {} is in use by another process: stop that, or choose another port", address.port(), address.ip())]
    InUse {
        /// The requested address.
        address: SocketAddr,
    },
    /// Another process has the TCP port.
    #[error("TCP port {} of {} is in use by another process: stop that, or choose another port", address.port(), address.ip())]
    TcpInUse {
        /// The requested address.
        address: SocketAddr,
    },
    /// Another system error.
    #[error("cannot listen on {address}: {source}")]
    Io {
        /// The requested address.
        address: SocketAddr,
        /// The system's error.
        source: io::Error,
    },
    /// TLS rejects the identity.
    #[error("cannot use the server's key for TLS: {0}")]
    Tls(String),
}

/// The maximum number of attempts to bind a port number chosen by the system for both UDP and TCP.
const BIND_ATTEMPTS: u32 = 16;

impl Listener {
    /// Listens on `address` of this machine, over UDP and TCP with one port number. Port 0 lets the system choose one.
    /// `[::]` is every address, of IPv4 too, and of IPv4 alone on a system without IPv6.
    ///
    /// # Errors
    /// [`BindError`], for example when another process has the UDP port or the TCP port.
    pub fn bind(address: SocketAddr, identity: &Identity, tuning: Tuning) -> Result<Self, BindError> {
        Self::bind_for(Transport::Auto, address, identity, tuning)
    }

    /// Listens on `address` of this machine for the lanes that `transport` allows.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn bind_for(
        transport: Transport,
        address: SocketAddr,
        identity: &Identity,
        tuning: Tuning,
    ) -> Result<Self, BindError> {
        Self::bind_on(Arc::new(SystemNetwork), transport, address, identity, tuning)
    }

    /// Listens on `address` of `network` for the lanes that `transport` allows.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn bind_on(
        network: Arc<dyn Network>,
        transport: Transport,
        mut address: SocketAddr,
        identity: &Identity,
        tuning: Tuning,
    ) -> Result<Self, BindError> {
        let mut attempts = 1..BIND_ATTEMPTS;
        loop {
            let attempt = attempts.next();
            match Self::bind_once(Arc::clone(&network), transport, address, identity, tuning.clone()) {
                // Another process uses the same TCP port number as the UDP port that the system chose.
                Err(BindError::TcpInUse { .. }) if address.port() == 0 && attempt.is_some() => {}
                Err(BindError::Io { source, .. }) if is_without_ipv6(address, &source) => {
                    address.set_ip(Ipv4Addr::UNSPECIFIED.into());
                }
                bound => return bound,
            }
        }
    }

    fn bind_once(
        network: Arc<dyn Network>,
        transport: Transport,
        mut local: SocketAddr,
        identity: &Identity,
        tuning: Tuning,
    ) -> Result<Self, BindError> {
        let failed = |address| move |source| BindError::Io { address, source };
        let quic = match transport.allows(LaneKind::Quic) {
            true => {
                let acceptor = QuicAcceptor::open(Arc::clone(&network), local, identity, tuning.clone())?;
                local = acceptor.local_address().map_err(failed(local))?;
                Some(acceptor)
            }
            false => None,
        };
        let tcp = match transport.allows(LaneKind::Tcp) {
            true => {
                let listener = network.listen(local).map_err(|source| match source.kind() {
                    io::ErrorKind::AddrInUse => BindError::TcpInUse { address: local },
                    _ => BindError::Io { address: local, source },
                })?;
                local = listener.local_address().map_err(failed(local))?;
                let acceptor =
                    StreamAcceptor::new(listener, identity, (&tuning).into(), network.allows_lane_threads());
                Some(acceptor.map_err(|error| BindError::Tls(error.to_string()))?)
            }
            false => None,
        };
        Ok(Self { local, tuning, quic, tcp, socket: None })
    }

    /// Accepts lanes over the Unix `socket` too.
    #[must_use]
    pub fn and_socket(self, socket: SocketListener) -> Self {
        let path = socket.path().to_owned();
        let acceptor = StreamAcceptor::without_tls(Box::new(socket), (&self.tuning).into());
        Self { socket: Some((path, acceptor)), ..self }
    }

    /// Accepts lanes over the Unix `socket` only: a server of one host. Its [local address](Self::local_address) is
    /// 0.0.0.0 with port 0.
    pub fn on_socket(socket: SocketListener, tuning: Tuning) -> Self {
        let local = (Ipv4Addr::UNSPECIFIED, 0).into();
        Self { local, tuning, quic: None, tcp: None, socket: None }.and_socket(socket)
    }

    /// The path of its Unix socket.
    pub fn socket_path(&self) -> Option<&Path> {
        self.socket.as_ref().map(|(path, _)| &**path)
    }

    /// The local address on the network.
    pub fn local_address(&self) -> SocketAddr {
        self.local
    }

    /// The accepted kinds of lanes on the network; `Auto` without a network.
    pub fn transport(&self) -> Transport {
        match (&self.quic, &self.tcp) {
            (Some(_), None) => Transport::Quic,
            (None, Some(_)) => Transport::Tcp,
            _ => Transport::Auto,
        }
    }

    /// The tuning of its lanes.
    pub fn tuning(&self) -> &Tuning {
        &self.tuning
    }

    /// Waits for a client's connection attempt; `None` once the listener was closed, unless it does not listen on UDP.
    /// Cancel safe.
    pub async fn accept(&self) -> Option<Arrival> {
        let quic = async {
            match &self.quic {
                Some(acceptor) => acceptor.accept().await,
                None => pending().await,
            }
        };
        let stream = async |acceptor: Option<&StreamAcceptor>| match acceptor {
            Some(acceptor) => acceptor.accept().await,
            None => pending().await,
        };
        tokio::select! {
            arrival = quic => Some(Arrival(PendingHandshake::Quic(Box::new(arrival?)))),
            arrival = stream(self.tcp.as_ref()) => Some(Arrival(PendingHandshake::Stream(arrival))),
            arrival = stream(self.socket_acceptor()) => Some(Arrival(PendingHandshake::Stream(arrival))),
        }
    }

    fn socket_acceptor(&self) -> Option<&StreamAcceptor> {
        self.socket.as_ref().map(|(_, acceptor)| acceptor)
    }

    /// Closes every lane. Later connections are not accepted over QUIC, and are closed after their handshake otherwise.
    pub fn close(&self, code: CloseCode) {
        if let Some(quic) = &self.quic {
            quic.close(code);
        }
        for acceptor in self.tcp.iter().chain(self.socket_acceptor()) {
            acceptor.close(code);
        }
    }

    /// Waits until all lanes have ended, with their last packets sent.
    pub async fn wait_idle(&self) {
        if let Some(quic) = &self.quic {
            quic.wait_idle().await;
        }
        for acceptor in self.tcp.iter().chain(self.socket_acceptor()) {
            acceptor.wait_idle().await;
        }
    }
}

/// The address itself, or the IPv4 address in one of a socket for both IPv4 and IPv6.
pub(crate) fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// Whether `[::]` cannot be bound because the system has no IPv6.
fn is_without_ipv6(address: SocketAddr, error: &io::Error) -> bool {
    address.is_ipv6()
        && address.ip().is_unspecified()
        && error.raw_os_error() == Some(Errno::AFNOSUPPORT.raw_os_error())
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener").field("local", &self.local).finish_non_exhaustive()
    }
}

/// An incoming connection attempt, before its handshake.
pub struct Arrival(PendingHandshake);

enum PendingHandshake {
    Quic(Box<QuicArrival>),
    Stream(StreamArrival),
}

impl Arrival {
    /// The client: its claimed address, or its process.
    pub fn peer(&self) -> Peer {
        match &self.0 {
            PendingHandshake::Quic(arrival) => canonical(arrival.peer()).into(),
            PendingHandshake::Stream(arrival) => arrival.peer,
        }
    }

    /// The kind of lane.
    pub fn kind(&self) -> LaneKind {
        match &self.0 {
            PendingHandshake::Quic(_) => LaneKind::Quic,
            PendingHandshake::Stream(arrival) => arrival.peer.stream_kind(),
        }
    }

    /// Performs the handshake. The caller adds a deadline.
    ///
    /// # Errors
    /// [`LaneError`] when the handshake fails, for example because of corrupted or hostile packets; other lanes are not
    /// affected.
    pub async fn accept(self) -> Result<Lane, LaneError> {
        match self.0 {
            PendingHandshake::Quic(arrival) => arrival.accept().await,
            PendingHandshake::Stream(arrival) => arrival.accept().await,
        }
    }

    /// Refuses the client immediately. Over TCP and a Unix socket the connection is closed.
    pub fn refuse(self) {
        if let PendingHandshake::Quic(arrival) = self.0 {
            arrival.refuse();
        }
    }
}

impl fmt::Debug for Arrival {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arrival").field("peer", &self.peer()).finish_non_exhaustive()
    }
}
