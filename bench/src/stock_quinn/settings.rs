//! The settings of bare quinn: those that measured fastest.

use super::socket::CappedSocket;
use crate::tls;
use anyhow::Result;
use quinn::{
    ClientConfig, Endpoint, EndpointConfig, ServerConfig, TokioRuntime, TransportConfig, VarInt,
    congestion::CubicConfig,
    crypto::rustls::{QuicClientConfig, QuicServerConfig},
};
use std::{net::SocketAddr, sync::Arc};

/// The settings of bare quinn, the same at both ends: those of a link that carries UDP payloads of `mtu` bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Settings {
    pub(super) mtu: u16,
}

impl Settings {
    /// An endpoint that listens on `address`.
    pub(super) fn server(self, address: SocketAddr) -> Result<Endpoint> {
        let mut config = ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(tls::server()?)?));
        config.transport_config(Arc::new(self.transport()));
        self.endpoint(address, Some(config))
    }

    /// An endpoint that can connect to `remote`.
    pub(super) fn client(self, remote: SocketAddr) -> Result<Endpoint> {
        let mut config = ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls::client()?)?));
        config.transport_config(Arc::new(self.transport()));
        let any_port = SocketAddr::new(unspecified(remote), 0);
        let mut endpoint = self.endpoint(any_port, None)?;
        endpoint.set_default_client_config(config);
        Ok(endpoint)
    }

    fn endpoint(self, address: SocketAddr, server: Option<ServerConfig>) -> Result<Endpoint> {
        let mut config = EndpointConfig::default();
        // quinn's default of 1472 would also limit the packets that the peer sends.
        config.max_udp_payload_size(self.mtu)?;
        let socket = Arc::new(CappedSocket::bind(address, self.mtu, SOCKET_BUFFER_BYTES)?);
        let endpoint = Endpoint::new_with_abstract_socket(config, server, socket, Arc::new(TokioRuntime))?;
        Ok(endpoint)
    }

    fn transport(self) -> TransportConfig {
        let window = VarInt::from_u32(WINDOW_BYTES);
        // quinn's default, which reduces its window at a loss. On links without loss no controller was faster.
        let mut congestion = CubicConfig::default();
        congestion.initial_window(INITIAL_WINDOW_BYTES);
        let mut config = TransportConfig::default();
        config
            .stream_receive_window(window)
            .receive_window(window)
            .send_window(WINDOW_BYTES.into())
            .initial_mtu(self.mtu)
            // The link's MTU is known; a lost probe could only reduce it.
            .mtu_discovery_config(None)
            .congestion_controller_factory(Arc::new(congestion));
        config
    }
}

fn unspecified(remote: SocketAddr) -> std::net::IpAddr {
    match remote {
        SocketAddr::V4(_) => std::net::Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
    }
}

/// The stream, connection and send window: the size of the receiver's socket buffer. Sizes from 1 to 8 MiB made no
/// difference; 64 MiB overflowed the socket buffer and cost 10 to 30 %.
const WINDOW_BYTES: u32 = 4 << 20;

/// The size of the socket's buffers: a complete window, so that a burst is not lost while the receiver's thread waits.
const SOCKET_BUFFER_BYTES: usize = 4 << 20;

/// The initial congestion window. quinn's 14,720 bytes are less than one packet at the largest `mtu`, which could then
/// never be sent.
const INITIAL_WINDOW_BYTES: u64 = 1 << 20;
