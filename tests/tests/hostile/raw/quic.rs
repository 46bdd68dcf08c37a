//! Raw QUIC connections.

use super::End;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
};
use tensor_relay_protocol::CloseCode;
use tensor_relay_tests::{pair::Sim, simnet::Host};
use tensor_relay_transport::Network;

/// Connects with a custom TLS configuration.
pub(crate) async fn connect_with_tls(
    sim: &Sim,
    number: u8,
    tls: rustls::ClientConfig,
) -> (quinn::Endpoint, quinn::Connection) {
    let endpoint = endpoint(&sim.client_host(number), 0, None);
    let config = quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls).unwrap()));
    let connecting = endpoint.connect_with(config, sim.server_address(), "tensor-relay");
    let connection = connecting.unwrap().await.unwrap();
    (endpoint, connection)
}

pub(super) fn listen(host: &Host, address: SocketAddr, tls: rustls::ServerConfig) -> quinn::Endpoint {
    let config = quinn::ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(tls).unwrap()));
    endpoint(host, address.port(), Some(config))
}

fn endpoint(host: &Host, port: u16, server: Option<quinn::ServerConfig>) -> quinn::Endpoint {
    let address: SocketAddr = (Ipv4Addr::UNSPECIFIED, port).into();
    let socket = host.bind(address, &Default::default()).unwrap();
    let mut config = quinn::EndpointConfig::default();
    config.rng_seed(host.rng_seed());
    quinn::Endpoint::new_with_abstract_socket(config, server, socket, host.runtime()).unwrap()
}

impl From<quinn::ConnectionError> for End {
    fn from(error: quinn::ConnectionError) -> Self {
        match error {
            quinn::ConnectionError::ApplicationClosed(close) => {
                let text = String::from_utf8_lossy(&close.reason).into_owned();
                Self::Closed(CloseCode::from_code(close.error_code.into_inner()), text)
            }
            // RFC 9001 §4.8: a TLS alert and 0x100.
            quinn::ConnectionError::ConnectionClosed(close)
                if (0x100..0x200).contains(&u64::from(close.error_code)) =>
            {
                Self::Alert
            }
            other => Self::Other(other.to_string()),
        }
    }
}
