//! [`QuicAcceptor`]: accepts a listener's QUIC connections, on a UDP socket.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};
use tensor_relay_device::Lock;

use quinn::{ConnectionId, ConnectionIdGenerator, EndpointConfig, crypto::rustls::QuicServerConfig};
use rustls::pki_types::CertificateDer;
use tensor_relay_protocol::CloseCode;

use super::{BindError, retry::RetryPolicy};
use crate::{
    ClientCertificate, Identity, Lane, LaneError, Network, Tuning,
    lane::{QuicConnection, lane_error},
    network::moving::MovingRuntime,
    tls,
    window::SendWindow,
};

/// The maximum number of connections that wait to be accepted: more than a server lets wait for their handshake, so that
/// those of one network do not keep out others. For each, [`INCOMING_BUFFER_BYTES`] from an unknown client may be
/// buffered, together at most 64 MiB.
const INCOMING_MAX: usize = 4_096;

/// The maximum number of buffered bytes from a client that was not accepted yet.
const INCOMING_BUFFER_BYTES: u64 = 64 << 10;

/// Accepts a listener's QUIC connections.
pub(super) struct QuicAcceptor {
    endpoint: quinn::Endpoint,
    crypto: Arc<QuicServerConfig>,
    network: Arc<dyn Network>,
    /// The runtime on which lanes start, if they can move to other threads.
    moving: Option<Arc<MovingRuntime>>,
    tuning: Tuning,
    retry: Lock<RetryPolicy>,
}

impl QuicAcceptor {
    pub(super) fn open(
        network: Arc<dyn Network>,
        address: SocketAddr,
        identity: &Identity,
        tuning: Tuning,
    ) -> Result<Self, BindError> {
        let tls = tls::server_config(identity).map_err(|e| BindError::Tls(e.to_string()))?;
        let crypto = QuicServerConfig::try_from(tls).map_err(|e| BindError::Tls(e.to_string()))?;
        let crypto = Arc::new(crypto);
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::AddrInUse => BindError::InUse { address },
            _ => BindError::Io { address, source },
        };
        let socket = network.bind(address, &tuning).map_err(failed)?;
        let config = server_config(&crypto, &tuning, None);
        let moving = network
            .allows_lane_threads()
            .then(|| Arc::new(MovingRuntime::over(network.runtime())));
        let runtime: Arc<dyn quinn::Runtime> = match &moving {
            Some(moving) => Arc::<MovingRuntime>::clone(moving),
            None => network.runtime(),
        };
        let endpoint = quinn::Endpoint::new_with_abstract_socket(
            with_stateless_resets(tuning.endpoint(network.rng_seed()), identity),
            Some(config),
            socket,
            runtime,
        );
        let endpoint = endpoint.map_err(failed)?;
        Ok(Self { endpoint, crypto, network, moving, tuning, retry: Lock::default() })
    }

    pub(super) fn local_address(&self) -> io::Result<SocketAddr> {
        self.endpoint.local_addr()
    }

    /// Waits for the next connection; `None` once the listener was closed. Cancel safe.
    pub(super) async fn accept(&self) -> Option<QuicArrival> {
        loop {
            let incoming = self.endpoint.accept().await?;
            if !incoming.remote_address_validated() && self.handle_unvalidated() && incoming.may_retry() {
                let _ = incoming.retry();
                continue;
            }
            let path_payload = self.network.path_payload(incoming.remote_address());
            let config = server_config(&self.crypto, &self.tuning, path_payload);
            return Some(QuicArrival {
                incoming,
                config: Arc::new(config),
                endpoint: self.endpoint.clone(),
                window: self.tuning.send_window(),
                moving: self.moving.clone(),
            });
        }
    }

    /// Counts a client with an unvalidated address; returns whether the client has to validate its address by Retry
    /// first.
    fn handle_unvalidated(&self) -> bool {
        let now = self.network.runtime().now();
        let mut policy = self.retry.lock();
        policy.handle_unvalidated(now, self.endpoint.open_connections())
    }

    pub(super) fn close(&self, code: CloseCode) {
        self.endpoint.close(quinn::VarInt::from_u32(code.code()), b"");
    }

    /// Waits until the last packets are sent.
    pub(super) async fn wait_idle(&self) {
        self.endpoint.wait_idle().await;
    }
}

/// A QUIC connection before its handshake.
pub(super) struct QuicArrival {
    incoming: quinn::Incoming,
    config: Arc<quinn::ServerConfig>,
    endpoint: quinn::Endpoint,
    window: SendWindow,
    moving: Option<Arc<MovingRuntime>>,
}

impl QuicArrival {
    pub(super) fn peer(&self) -> SocketAddr {
        self.incoming.remote_address()
    }

    pub(super) fn refuse(self) {
        self.incoming.refuse();
    }

    pub(super) async fn accept(self) -> Result<Lane, LaneError> {
        let peer = self.incoming.remote_address();
        let accept = || self.incoming.accept_with(self.config);
        let (connecting, mover) = match &self.moving {
            Some(runtime) => runtime.accepting(accept),
            None => (accept(), None),
        };
        let connecting = connecting.map_err(|error| lane_error(peer, error))?;
        let connection = connecting.await.map_err(|error| lane_error(peer, error))?;
        let certificates = connection
            .peer_identity()
            .and_then(|certificates| certificates.downcast::<Vec<CertificateDer<'static>>>().ok());
        let client = certificates.and_then(|certificates| ClientCertificate::new(&certificates));
        Ok(Lane::quic(QuicConnection::new(connection, self.endpoint, self.window, mover)).with_client(client))
    }
}

/// Enables stateless resets (RFC 9000 §10.3) for connections of an earlier process, or of another one with the same
/// identity: the key for resets is derived from the identity. So clients reconnect immediately instead of after their
/// idle timeout.
fn with_stateless_resets(mut config: EndpointConfig, identity: &Identity) -> EndpointConfig {
    config.reset_key(Arc::new(identity.derived_key("stateless reset")));
    config.cid_generator(|| Box::new(RandomConnectionIds));
    config
}

/// Generates random connection IDs. quinn's default IDs are signed with a per-process key, so packets for a previous
/// process would be dropped silently.
struct RandomConnectionIds;

impl RandomConnectionIds {
    const BYTES: usize = 8;
}

impl ConnectionIdGenerator for RandomConnectionIds {
    fn generate_cid(&mut self) -> ConnectionId {
        ConnectionId::new(&rand::random::<[u8; Self::BYTES]>())
    }

    fn cid_len(&self) -> usize {
        Self::BYTES
    }

    fn cid_lifetime(&self) -> Option<Duration> {
        None
    }
}

fn server_config(
    crypto: &Arc<QuicServerConfig>,
    tuning: &Tuning,
    path_payload: Option<u16>,
) -> quinn::ServerConfig {
    let mut config =
        quinn::ServerConfig::with_crypto(Arc::clone(crypto) as Arc<dyn quinn::crypto::ServerConfig>);
    config.transport_config(Arc::new(tuning.server(path_payload)));
    config.max_incoming(INCOMING_MAX);
    config.incoming_buffer_size(INCOMING_BUFFER_BYTES);
    config.incoming_buffer_size_total(INCOMING_MAX as u64 * INCOMING_BUFFER_BYTES);
    config
}
