//! The endpoints of bare quinn, with the settings that measured fastest: those of a link that carries UDP payloads of
//! `mtu` bytes.

use super::socket::CappedSocket;
use crate::tls;
use anyhow::Result;
use quinn::{
    ClientConfig, Endpoint, EndpointConfig, ServerConfig, TokioRuntime, TransportConfig, VarInt,
    congestion::CubicConfig,
    crypto::rustls::{QuicClientConfig, QuicServerConfig},
};
use std::{net::SocketAddr, sync::Arc};

/// An endpoint that listens on `address`.
pub(super) fn server(address: SocketAddr, mtu: u16) -> Result<Endpoint> {
    let mut config = ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(tls::server()?)?));
    config.transport_config(Arc::new(transport(mtu)));
    endpoint(address, mtu, Some(config))
}

/// An endpoint that can connect to servers.
pub(super) fn client(mtu: u16) -> Result<Endpoint> {
    let mut config = ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls::client()?)?));
    config.transport_config(Arc::new(transport(mtu)));
    let mut endpoint = endpoint(([0, 0, 0, 0], 0).into(), mtu, None)?;
    endpoint.set_default_client_config(config);
    Ok(endpoint)
}

fn endpoint(address: SocketAddr, mtu: u16, server: Option<ServerConfig>) -> Result<Endpoint> {
    let mut config = EndpointConfig::default();
    // quinn's default of 1472 would also limit the packets that the peer sends.
    config.max_udp_payload_size(mtu)?;
    let socket = Arc::new(CappedSocket::bind(address, mtu, SOCKET_BUFFER_BYTES)?);
    Ok(Endpoint::new_with_abstract_socket(config, server, socket, Arc::new(TokioRuntime))?)
}

fn transport(mtu: u16) -> TransportConfig {
    let window = VarInt::from_u32(WINDOW_BYTES);
    // quinn's default, which reduces its window at a loss. On links without loss no controller was faster.
    let mut congestion = CubicConfig::default();
    congestion.initial_window(INITIAL_WINDOW_BYTES);
    let mut config = TransportConfig::default();
    config
        .stream_receive_window(window)
        .receive_window(window)
        .send_window(WINDOW_BYTES.into())
        .initial_mtu(mtu)
        // The link's MTU is known; a lost probe could only reduce it.
        .mtu_discovery_config(None)
        .congestion_controller_factory(Arc::new(congestion));
    config
}

/// The stream, connection and send window: the size of the receiver's socket buffer. Sizes from 1 to 8 MiB made no
/// difference; 64 MiB overflowed the socket buffer and cost 10 to 30 %.
const WINDOW_BYTES: u32 = 4 << 20;

/// The size of the socket's buffers: a complete window, so that a burst is not lost while the receiver's thread waits.
const SOCKET_BUFFER_BYTES: usize = 4 << 20;

/// The initial congestion window. quinn's 14,720 bytes are less than one packet at the largest `mtu`, which could then
/// never be sent.
const INITIAL_WINDOW_BYTES: u64 = 1 << 20;
