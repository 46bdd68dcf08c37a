//! [`TcpAcceptor`]: accepts a listener's TCP connections.

use std::{future::poll_fn, net::SocketAddr, sync::Arc, time::Duration};
use tensor_relay_protocol::CloseCode;
use tokio::sync::watch;

use crate::{
    ByteStream, Identity, Lane, LaneError, StreamListener,
    lane::{ByteStreamConnection, Role, Secured, Settings},
    tls,
};

/// The delay after a failed accept, usually caused by too many open files.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// Accepts a listener's TCP connections.
pub(super) struct TcpAcceptor {
    listener: Box<dyn StreamListener>,
    config: Arc<rustls::ServerConfig>,
    settings: Settings,
    /// Whether lanes may move to lane threads.
    can_move: bool,
    /// Closes all lanes; each holds a receiver.
    closing: watch::Sender<Option<CloseCode>>,
}

impl TcpAcceptor {
    pub(super) fn new(
        listener: Box<dyn StreamListener>,
        identity: &Identity,
        settings: Settings,
        can_move: bool,
    ) -> Result<Self, rustls::Error> {
        let config = Arc::new(tls::stream_server_config(identity)?);
        Ok(Self { listener, config, settings, can_move, closing: watch::Sender::default() })
    }

    /// Waits for the next connection. Cancel safe.
    pub(super) async fn accept(&self) -> TcpArrival {
        loop {
            match poll_fn(|cx| self.listener.poll_accept(cx)).await {
                Ok((stream, peer)) => {
                    let (config, closing) = (Arc::clone(&self.config), self.closing.subscribe());
                    let (settings, can_move) = (self.settings, self.can_move);
                    return TcpArrival { stream, peer, config, settings, can_move, closing };
                }
                Err(error) => {
                    tracing::warn!(%error, "A TCP connection could not be accepted.");
                    tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
                }
            }
        }
    }

    pub(super) fn close(&self, code: CloseCode) {
        self.closing.send_replace(Some(code));
    }

    /// Waits until all lanes have ended.
    pub(super) async fn wait_idle(&self) {
        self.closing.closed().await;
    }
}

/// A TCP connection before its handshake.
pub(super) struct TcpArrival {
    stream: Box<dyn ByteStream>,
    pub(super) peer: SocketAddr,
    config: Arc<rustls::ServerConfig>,
    settings: Settings,
    can_move: bool,
    closing: watch::Receiver<Option<CloseCode>>,
}

impl TcpArrival {
    pub(super) async fn accept(self) -> Result<Lane, LaneError> {
        let Self { stream, peer, config, settings, can_move, closing } = self;
        let failed = |detail: String| LaneError::Protocol { peer, detail };
        let secured = Secured::accept(stream, config)
            .await
            .map_err(|error| failed(error.to_string()))?;
        if !secured.is_protocol_agreed() {
            return Err(failed("it did not offer this protocol in its handshake".into()));
        }
        let client = secured.peer_certificate();
        secured.tune(settings);
        let connection = ByteStreamConnection::start(secured, Role::Server, peer, settings, Some(closing));
        if !can_move {
            drop(connection.take_mover());
        }
        Ok(Lane::tcp(connection).with_client(client))
    }
}
