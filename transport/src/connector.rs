//! [`Connector`]: opens lanes to servers.

mod listening_user;
mod race;
mod socket;
mod tcp;

use crate::{
    Fingerprint, Identity, Lane, LaneError, LaneKind, LaneKindReason, LaneThread, Network, SystemNetwork,
    Transport, Tuning, Way,
    lane::{QuicConnection, lane_error},
    tls,
};
use quinn::crypto::rustls::QuicClientConfig;
use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::{Path, PathBuf},
    sync::{Arc, OnceLock, atomic::AtomicBool},
};
use tokio::task::JoinSet;

pub use listening_user::UnexpectedUser;

/// The maximum number of addresses tried for one ticket: a name may resolve to many.
const ADDRESSES_MAX: usize = 16;

/// The beginning of an address that is a Unix socket; its path follows.
const SOCKET_PREFIX: &str = "unix:";

/// Opens lanes to servers.
#[derive(Debug, Clone)]
pub struct Connector {
    network: Arc<dyn Network>,
    tuning: Tuning,
    /// The local addresses of lanes, used round-robin; any address if empty.
    local: Arc<[IpAddr]>,
    transport: Transport,
    /// Whether TCP is tried first even if the path does not seem short.
    expects_tcp: bool,
    /// The only way that lanes may take.
    way: Option<Way>,
    /// The client's key, for servers that authenticate clients.
    identity: Option<Arc<Identity>>,
    /// The only user whose process may listen at a Unix socket, if one is named.
    server_uid: Option<u32>,
    /// Whether UDP seemed to be blocked when this connector last chose between QUIC and TCP: TCP connected first,
    /// although the path was not short.
    udp_is_blocked: Arc<AtomicBool>,
}

/// Why a lane could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// None of the names in the ticket could be resolved.
    #[error(
        "cannot find an address for {hosts}: {detail}; check the name, or have the server advertise an address"
    )]
    Resolve {
        /// The names.
        hosts: String,
        /// The resolver's error.
        detail: String,
    },
    /// The server did not answer over UDP.
    #[error(
        "no answer from {addresses} over UDP within {timeout_ms} ms: is the server running there, is its UDP port \
         published, and does a firewall between drop UDP?"
    )]
    Unreachable {
        /// The addresses tried.
        addresses: String,
        /// The time waited.
        timeout_ms: u128,
    },
    /// The server answered neither over UDP nor over TCP.
    #[error(
        "no answer from {addresses}: nothing over UDP within {timeout_ms} ms, and over TCP: {tcp}; is the server running there, \
         is its port published for UDP and TCP, and does a firewall between drop them?"
    )]
    NoAnswer {
        /// The addresses tried.
        addresses: String,
        /// The time waited.
        timeout_ms: u128,
        /// The failure over TCP.
        tcp: String,
    },
    /// TCP connections failed.
    #[error(
        "cannot connect to {addresses} over TCP: {detail}; is the server running there, does it listen on TCP, is its TCP port \
         published, and does a firewall between drop it?"
    )]
    TcpFailed {
        /// The addresses tried.
        addresses: String,
        /// The system's error, or the timeout.
        detail: String,
    },
    /// The server's key is not in the ticket.
    #[error(
        "the server at {address} has key {found}, the ticket expects {expected}: the ticket is from another server or \
         an earlier key of this one, or the connection is intercepted; get a fresh ticket from the server itself"
    )]
    WrongKey {
        /// The server's address.
        address: SocketAddr,
        /// Its key.
        found: Fingerprint,
        /// The keys of the ticket.
        expected: String,
    },
    /// The server refuses new connections.
    #[error(
        "the server at {address} refuses new connections: it has as many sessions as it may, or it is shutting down"
    )]
    Refused {
        /// The server's address.
        address: SocketAddr,
    },
    /// The server does not speak this protocol.
    #[error(
        "the server at {address} does not speak {}: it is another program, or another major version",
        alpn()
    )]
    Incompatible {
        /// The server's address.
        address: SocketAddr,
    },
    /// The connection failed after an answer, or the peer of [`Connector::connect_over`] did not answer.
    #[error(transparent)]
    Lane(#[from] LaneError),
    /// The server's Unix socket cannot be connected to.
    #[error("cannot connect to the socket {}: {source}; {}", path.display(), socket::advice(source.kind()))]
    UnixSocket {
        /// The path.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A process of an unexpected user listens at the server's Unix socket. Nothing was sent to it.
    #[error(
        "a process of user {found_uid} listens at the socket {}, and was sent nothing: {why}. If it is the server, name its \
         user in the ticket (`unix:PATH?server_uid={found_uid}`), or have it listen in a folder that it owns and nobody else \
         may write to",
        path.display()
    )]
    UnexpectedUser {
        /// The path.
        path: PathBuf,
        /// The listening user.
        found_uid: u32,
        /// Why it is not expected.
        why: UnexpectedUser,
    },
    /// A local address for lanes cannot be used.
    #[error(
        "cannot open a socket at {address}, one of the lane addresses (`--lane-address`): {source}; name addresses that \
         this machine has"
    )]
    LaneAddress {
        /// The address.
        address: IpAddr,
        /// The system's error.
        source: io::Error,
    },
    /// A lane's thread could not be started.
    #[error(
        "cannot start a thread for lane {lane}: {source}; use fewer lanes, or allow this process more threads"
    )]
    Thread {
        /// The lane's number.
        lane: usize,
        /// The system's error.
        source: io::Error,
    },
    /// A further lane timed out, although the first lane works.
    #[error(
        "lane {lane} got no answer from {peer} within {timeout_ms} ms, though the session's first lane did: can {local} reach \
         that address over {kind}, and does a firewall between drop it?"
    )]
    FurtherUnreachable {
        /// The lane's number.
        lane: usize,
        /// Its kind.
        kind: LaneKind,
        /// Its local address.
        local: IpAddr,
        /// The server.
        peer: SocketAddr,
        /// The time waited.
        timeout_ms: u128,
    },
    /// A local socket could not be opened.
    #[error("cannot open a socket: {0}")]
    Socket(#[from] io::Error),
    /// TLS could not be set up.
    #[error("cannot set up TLS: {0}")]
    Tls(String),
}

fn alpn() -> String {
    String::from_utf8_lossy(tensor_relay_protocol::ALPN).into_owned()
}

/// The TLS alert `no_application_protocol`, as a QUIC error code (RFC 9001 §4.8).
const NO_APPLICATION_PROTOCOL: u64 = 0x100 + 120;

/// The QUIC error code `CONNECTION_REFUSED` (RFC 9000 §20.1).
const CONNECTION_REFUSED: u64 = 0x2;

impl Connector {
    /// Connects over this machine's network.
    pub fn new(tuning: Tuning) -> Self {
        Self::over(Arc::new(SystemNetwork), tuning)
    }

    /// Connects over the given network.
    pub fn over(network: Arc<dyn Network>, tuning: Tuning) -> Self {
        Self {
            network,
            tuning,
            local: Arc::default(),
            transport: Transport::Auto,
            expects_tcp: false,
            way: None,
            identity: None,
            server_uid: None,
            udp_is_blocked: Arc::default(),
        }
    }

    /// Binds lanes to these local `addresses`, round-robin: one for each network interface.
    pub fn with_local_addresses(self, addresses: &[IpAddr]) -> Self {
        Self { local: addresses.into(), ..self }
    }

    /// Restricts lanes to what `transport` allows.
    pub fn with_transport(self, transport: Transport) -> Self {
        Self { transport, ..self }
    }

    /// Tries TCP first even if it does not connect within milliseconds, and QUIC after a second. For a peer of a swarm whose
    /// other connections use TCP: their queues make a short path seem long, and QUIC beside TCP's BBR on one link gets a
    /// fraction of it.
    pub fn expecting_tcp(self) -> Self {
        Self { expects_tcp: true, ..self }
    }

    /// Restricts lanes to one way, because others do not carry chunks on this path.
    pub fn with_way(self, way: Way) -> Self {
        let transport = match way.kind {
            LaneKind::Quic => Transport::Quic,
            LaneKind::Tcp => Transport::Tcp,
            LaneKind::Unix => Transport::Auto, // An address that is a socket needs no choice.
        };
        Self { transport, way: Some(way), ..self }
    }

    /// Authenticates to servers with the key of `identity`.
    pub fn with_identity(self, identity: Arc<Identity>) -> Self {
        Self { identity: Some(identity), ..self }
    }

    /// Connects to Unix sockets only at which a process of this user listens. Without it, that is this process's user, root,
    /// or the owner of a folder in which nobody else can have put the socket.
    pub fn with_server_uid(self, server_uid: Option<u32>) -> Self {
        Self { server_uid, ..self }
    }

    /// The allowed kinds of lanes.
    pub fn transport(&self) -> Transport {
        self.transport
    }

    /// The tuning of its lanes.
    pub fn tuning(&self) -> &Tuning {
        &self.tuning
    }

    /// Opens a lane to the first of `hosts` (`host:port`) that answers with one of `keys`. If one of them is `unix:PATH`,
    /// connects to that Unix socket only; the user who listens there takes the place of a key
    /// ([`with_server_uid`](Self::with_server_uid)).
    ///
    /// Attempts start in the order of the addresses, 250 ms apart or as soon as one fails, and run concurrently; once
    /// one succeeds, the others are dropped. If the [`Transport`] allows both kinds, TCP is tried first on a short
    /// path, where it connects within a few milliseconds: QUIC follows if TCP fails or has not answered within 250 ms.
    /// On any other path QUIC is tried first: TCP follows after 250 ms, or at once if UDP seemed to be blocked the last
    /// time.
    ///
    /// # Errors
    /// [`ConnectError`], after at most the connect timeout for resolving addresses and again for connecting. If several
    /// attempts fail, the most informative error is returned, for example a wrong key rather than a timeout.
    pub async fn connect(&self, hosts: &[String], keys: &[Fingerprint]) -> Result<Lane, ConnectError> {
        let timeout = self.tuning.connect_timeout();
        if let Some(path) = hosts.iter().find_map(|host| host.strip_prefix(SOCKET_PREFIX)) {
            return self.connect_socket(Path::new(path), timeout).await;
        }
        let addresses = tokio::time::timeout(timeout, resolve(hosts)).await.unwrap_or_else(|_| {
            let detail = "the resolver did not answer".to_owned();
            Err(ConnectError::Resolve { hosts: hosts.join(", "), detail })
        })?;
        match self.race(&addresses, keys, timeout).await {
            Ok(lane) if self.way.is_some() => Ok(lane.with_reason(LaneKindReason::OthersFailed)),
            Ok(lane) => Ok(lane),
            Err(error) => Err(self.describe_timeout(hosts.join(", "), error)),
        }
    }

    /// Opens a lane of `kind` to `peer`, for a session that moves to another transport.
    ///
    /// # Errors
    /// [`ConnectError`], within the connect timeout.
    pub async fn connect_over(
        &self,
        kind: LaneKind,
        peer: SocketAddr,
        keys: &[Fingerprint],
    ) -> Result<Lane, ConnectError> {
        let connected =
            tokio::time::timeout(self.tuning.connect_timeout(), self.connect_one(peer, kind, keys, 0)).await;
        let lane = connected.unwrap_or_else(|_| Err(LaneError::TimedOut { peer: peer.into() }.into()))?;
        Ok(lane.with_reason(LaneKindReason::Faster))
    }

    /// Opens a further lane of a session, with the number `lane_number` (the first lane is 0), to `peer`, the address
    /// of the first lane. Unless the network is simulated, the lane runs on a dedicated thread, which ends with the
    /// lane.
    ///
    /// # Errors
    /// [`ConnectError`], within the connect timeout.
    pub async fn connect_further(
        &self,
        peer: SocketAddr,
        keys: &[Fingerprint],
        lane_number: usize,
        kind: LaneKind,
    ) -> Result<Lane, ConnectError> {
        let timeout = self.tuning.connect_timeout();
        let (this, keys) = (self.clone(), keys.to_vec());
        let connect = async move { this.connect_one(peer, kind, &keys, lane_number).await };
        let thread = match self.network.allows_lane_threads() {
            true => {
                let thread = LaneThread::start(&format!("lane-{lane_number}"));
                Some(Arc::new(thread.map_err(|source| ConnectError::Thread { lane: lane_number, source })?))
            }
            false => None,
        };
        let connecting = async {
            match &thread {
                Some(thread) => {
                    let mut connecting = JoinSet::new();
                    connecting.spawn_on(connect, thread.handle());
                    match connecting.join_next().await {
                        Some(Ok(connected)) => connected,
                        Some(Err(panic)) if panic.is_panic() => std::panic::resume_unwind(panic.into_panic()),
                        _ => Err(LaneError::ClosedLocally.into()),
                    }
                }
                None => connect.await,
            }
        };
        let connected = tokio::time::timeout(timeout, connecting).await;
        match connected.unwrap_or_else(|_| Err(LaneError::TimedOut { peer: peer.into() }.into())) {
            Ok(lane) => Ok(lane.further(lane_number, thread)),
            Err(ConnectError::Lane(LaneError::TimedOut { .. })) => {
                let local = local_address(&self.local, peer, lane_number)?;
                let timeout_ms = timeout.as_millis();
                Err(ConnectError::FurtherUnreachable { lane: lane_number, kind, local, peer, timeout_ms })
            }
            Err(error) => Err(error),
        }
    }

    /// Replaces a timeout by an error that names the transports and addresses tried. If both transports were tried,
    /// also replaces a failure over TCP, which the new error contains. Returns other errors unchanged.
    fn describe_timeout(&self, addresses: String, error: ConnectError) -> ConnectError {
        let timeout_ms = self.tuning.connect_timeout().as_millis();
        match (error, self.transport) {
            (ConnectError::Lane(LaneError::TimedOut { .. }), Transport::Quic) => {
                ConnectError::Unreachable { addresses, timeout_ms }
            }
            (ConnectError::Lane(LaneError::TimedOut { .. }), transport) => {
                let tcp = format!("no answer within {timeout_ms} ms");
                match transport {
                    Transport::Tcp => ConnectError::TcpFailed { addresses, detail: tcp },
                    _ => ConnectError::NoAnswer { addresses, timeout_ms, tcp },
                }
            }
            (ConnectError::TcpFailed { detail: tcp, .. }, Transport::Auto) => {
                ConnectError::NoAnswer { addresses, timeout_ms, tcp }
            }
            (error, _) => error,
        }
    }

    async fn connect_one(
        &self,
        address: SocketAddr,
        kind: LaneKind,
        keys: &[Fingerprint],
        lane_number: usize,
    ) -> Result<Lane, ConnectError> {
        match kind {
            LaneKind::Quic => self.connect_quic(address, keys, lane_number).await,
            LaneKind::Tcp => {
                let stream = self.open_stream(address, lane_number).await?;
                self.handshake(stream, address, keys).await
            }
            LaneKind::Unix => Err(io::Error::from(io::ErrorKind::Unsupported).into()), // An address has a port.
        }
    }

    async fn connect_quic(
        &self,
        address: SocketAddr,
        keys: &[Fingerprint],
        lane_number: usize,
    ) -> Result<Lane, ConnectError> {
        let rejected_key = Arc::new(OnceLock::new());
        let config = self.client_config(address, keys, Arc::clone(&rejected_key))?;
        let endpoint = self.endpoint_towards(address, lane_number)?;
        let connecting = endpoint
            .connect_with(config, address, tls::SERVER_NAME)
            .map_err(|error| ConnectError::Tls(error.to_string()))?;
        match connecting.await {
            Ok(connection) => {
                let window = self.tuning.send_window();
                Ok(Lane::quic(QuicConnection::new(connection, endpoint, window, None)))
            }
            Err(error) => Err(handshake_error(address, error, keys, rejected_key.get().copied())),
        }
    }

    /// Binds the socket of one lane, of the peer's address family.
    fn endpoint_towards(
        &self,
        peer: SocketAddr,
        lane_number: usize,
    ) -> Result<quinn::Endpoint, ConnectError> {
        let address = local_address(&self.local, peer, lane_number)?;
        let bound = self.network.bind(SocketAddr::new(address, 0), &self.tuning);
        let socket = bound.map_err(|source| match self.local.is_empty() {
            true => source.into(),
            false => ConnectError::LaneAddress { address, source },
        })?;
        let config = self.tuning.endpoint(self.network.rng_seed());
        Ok(quinn::Endpoint::new_with_abstract_socket(config, None, socket, self.network.runtime())?)
    }

    fn client_config(
        &self,
        address: SocketAddr,
        keys: &[Fingerprint],
        rejected_key: Arc<OnceLock<Fingerprint>>,
    ) -> Result<quinn::ClientConfig, ConnectError> {
        let tls = tls::client_config(keys, self.identity.as_deref(), rejected_key)
            .map_err(|e| ConnectError::Tls(e.to_string()))?;
        let crypto = QuicClientConfig::try_from(tls).map_err(|e| ConnectError::Tls(e.to_string()))?;
        let mut config = quinn::ClientConfig::new(Arc::new(crypto));
        config.transport_config(Arc::new(self.tuning.client(self.network.path_payload(address))));
        Ok(config)
    }
}

/// The local address of lane `lane_number` to `peer`: one of `local` of the peer's address family, round-robin, or the
/// unspecified address if `local` is empty.
fn local_address(local: &[IpAddr], peer: SocketAddr, lane_number: usize) -> io::Result<IpAddr> {
    let fitting: Vec<IpAddr> = local.iter().copied().filter(|ip| ip.is_ipv4() == peer.is_ipv4()).collect();
    match (fitting.is_empty(), local.is_empty(), peer) {
        (false, ..) => Ok(fitting[lane_number % fitting.len()]),
        (true, true, SocketAddr::V4(_)) => Ok(Ipv4Addr::UNSPECIFIED.into()),
        (true, true, SocketAddr::V6(_)) => Ok(Ipv6Addr::UNSPECIFIED.into()),
        (true, false, _) => {
            let detail =
                format!("none of the lane addresses {local:?} is of the family of {peer}: name one that is");
            Err(io::Error::new(io::ErrorKind::AddrNotAvailable, detail))
        }
    }
}

async fn resolve(hosts: &[String]) -> Result<Vec<SocketAddr>, ConnectError> {
    let mut addresses = Vec::new();
    let mut detail = "no address is known for it".to_owned();
    for host in hosts {
        match tokio::net::lookup_host(host).await {
            Ok(found) => addresses.extend(found),
            Err(error) => detail = error.to_string(),
        }
    }
    addresses.truncate(ADDRESSES_MAX);
    match addresses.is_empty() {
        true => Err(ConnectError::Resolve { hosts: hosts.join(", "), detail }),
        false => Ok(addresses),
    }
}

fn handshake_error(
    address: SocketAddr,
    error: quinn::ConnectionError,
    keys: &[Fingerprint],
    rejected_key: Option<Fingerprint>,
) -> ConnectError {
    if let Some(found) = rejected_key {
        return wrong_key(address, found, keys);
    }
    match &error {
        quinn::ConnectionError::ConnectionClosed(close)
            if u64::from(close.error_code) == NO_APPLICATION_PROTOCOL =>
        {
            ConnectError::Incompatible { address }
        }
        quinn::ConnectionError::ConnectionClosed(close)
            if u64::from(close.error_code) == CONNECTION_REFUSED =>
        {
            ConnectError::Refused { address }
        }
        quinn::ConnectionError::VersionMismatch => ConnectError::Incompatible { address },
        _ => lane_error(address, error).into(),
    }
}

fn wrong_key(address: SocketAddr, found: Fingerprint, keys: &[Fingerprint]) -> ConnectError {
    let expected = keys.iter().map(ToString::to_string).collect::<Vec<_>>().join(" or ");
    ConnectError::WrongKey { address, found, expected }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_use_local_addresses_of_the_peers_family_in_turn() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let (v4, v6) = ("192.0.2.9:1".parse().unwrap(), "[2001:db8::9]:1".parse().unwrap());
        let local = [ip("10.0.0.1"), ip("fd00::1"), ip("10.0.1.1")];
        let of = |peer| [0, 1, 2, 3].map(|lane| local_address(&local, peer, lane).unwrap());
        assert_eq!(of(v4), [local[0], local[2], local[0], local[2]]);
        assert_eq!(of(v6), [local[1]; 4]);
        assert_eq!(local_address(&[], v4, 1).unwrap(), ip("0.0.0.0"));
        assert_eq!(local_address(&[], v6, 1).unwrap(), ip("::"));
        let error = local_address(&local[..1], v6, 0).unwrap_err();
        assert!(error.to_string().contains("10.0.0.1"), "{error}");
    }
}
