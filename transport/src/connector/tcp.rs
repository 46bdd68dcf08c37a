//! Opens lanes over TCP: connection, handshake, and errors.

use std::{
    io,
    net::SocketAddr,
    sync::{Arc, OnceLock},
};

use super::{ConnectError, Connector, local_address, wrong_key};
use crate::{
    ByteStream, Fingerprint, Lane, LaneError,
    lane::{ByteStreamConnection, Role, Secured, Settings},
    tls,
};

impl Connector {
    /// Opens a TCP connection, without the TLS handshake.
    pub(super) async fn open_stream(
        &self,
        address: SocketAddr,
        lane_number: usize,
    ) -> Result<Box<dyn ByteStream>, ConnectError> {
        let local = local_address(&self.local, address, lane_number)?;
        let opened = self
            .network
            .connect(local, address, self.way.and_then(|way| way.segment_max))
            .await;
        opened.map_err(|source| match source.kind() {
            io::ErrorKind::AddrNotAvailable if !self.local.is_empty() => {
                ConnectError::LaneAddress { address: local, source }
            }
            _ => ConnectError::TcpFailed { addresses: address.to_string(), detail: source.to_string() },
        })
    }

    /// Performs the TLS handshake, verifies the server's key against `keys`, and starts a lane.
    pub(super) async fn handshake(
        &self,
        stream: Box<dyn ByteStream>,
        address: SocketAddr,
        keys: &[Fingerprint],
    ) -> Result<Lane, ConnectError> {
        let rejected_key = Arc::new(OnceLock::new());
        let config = tls::stream_client_config(keys, self.identity.as_deref(), Arc::clone(&rejected_key));
        let config = config.map_err(|error| ConnectError::Tls(error.to_string()))?;
        let name = tls::SERVER_NAME
            .try_into()
            .map_err(|_| ConnectError::Tls("no server name".into()))?;
        let secured = Secured::connect(stream, Arc::new(config), name).await;
        let secured = secured.map_err(|error| match rejected_key.get() {
            Some(found) => wrong_key(address, *found, keys),
            None => handshake_error(address, error),
        })?;
        if !secured.is_protocol_agreed() {
            return Err(ConnectError::Incompatible { address });
        }
        let settings = Settings::from(&self.tuning);
        secured.tune(settings);
        Ok(Lane::byte_stream(ByteStreamConnection::start(
            secured,
            Role::Client,
            address.into(),
            settings,
            None,
        )))
    }
}

/// The error for a failed handshake. A server that refuses connections closes them before the handshake.
fn handshake_error(address: SocketAddr, error: io::Error) -> ConnectError {
    let tls = error.get_ref().and_then(|error| error.downcast_ref::<rustls::Error>());
    match (tls, error.kind()) {
        (Some(rustls::Error::AlertReceived(rustls::AlertDescription::NoApplicationProtocol)), _) => {
            ConnectError::Incompatible { address }
        }
        (Some(rustls::Error::InvalidMessage(_)), _) => ConnectError::Incompatible { address },
        (None, io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe) => {
            ConnectError::Refused { address }
        }
        _ => LaneError::Protocol { peer: address.into(), detail: error.to_string() }.into(),
    }
}
