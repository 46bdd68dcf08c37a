//! [`StreamAcceptor`]: accepts a listener's TCP connections, or the connections of its Unix socket.

use std::{future::poll_fn, sync::Arc, time::Duration};
use tensor_relay_protocol::CloseCode;
use tokio::sync::watch;

use crate::{
    ByteStream, Identity, Lane, LaneError, Peer, StreamListener,
    lane::{ByteStreamConnection, Role, Secured, Settings},
    tls,
};

/// The delay after a failed accept, usually caused by too many open files.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// Accepts a listener's TCP connections, or the connections of its Unix socket.
pub(super) struct StreamAcceptor {
    listener: Box<dyn StreamListener>,
    /// Of TLS; `None` for a Unix socket.
    config: Option<Arc<rustls::ServerConfig>>,
    settings: Settings,
    /// Whether lanes may move to lane threads.
    can_move: bool,
    /// Closes all lanes; each holds a receiver.
    closing: watch::Sender<Option<CloseCode>>,
}

impl StreamAcceptor {
    /// Accepts from `listener`, with TLS.
    pub(super) fn new(
        listener: Box<dyn StreamListener>,
        identity: &Identity,
        settings: Settings,
        can_move: bool,
    ) -> Result<Self, rustls::Error> {
        let config = Arc::new(tls::stream_server_config(identity)?);
        Ok(Self { listener, config: Some(config), settings, can_move, closing: watch::Sender::default() })
    }

    /// Accepts from `listener` without TLS.
    pub(super) fn without_tls(listener: Box<dyn StreamListener>, settings: Settings) -> Self {
        Self { listener, config: None, settings, can_move: true, closing: watch::Sender::default() }
    }

    /// Waits for the next connection. Cancel safe.
    pub(super) async fn accept(&self) -> StreamArrival {
        loop {
            match poll_fn(|cx| self.listener.poll_accept(cx)).await {
                Ok((stream, peer)) => {
                    let (config, closing) = (self.config.clone(), self.closing.subscribe());
                    let (settings, can_move) = (self.settings, self.can_move);
                    return StreamArrival { stream, peer, config, settings, can_move, closing };
                }
                Err(error) => {
                    tracing::warn!(%error, "A connection could not be accepted.");
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

/// A connection before its handshake.
pub(super) struct StreamArrival {
    stream: Box<dyn ByteStream>,
    pub(super) peer: Peer,
    /// Of TLS; `None` for a Unix socket.
    config: Option<Arc<rustls::ServerConfig>>,
    settings: Settings,
    can_move: bool,
    closing: watch::Receiver<Option<CloseCode>>,
}

impl StreamArrival {
    pub(super) async fn accept(self) -> Result<Lane, LaneError> {
        let Self { stream, peer, config, settings, can_move, closing } = self;
        let failed = |detail: String| LaneError::Protocol { peer, detail };
        let secured = match config {
            Some(config) => Secured::accept(stream, config)
                .await
                .map_err(|error| failed(error.to_string()))?,
            None => Secured::plain(stream),
        };
        if !secured.is_protocol_agreed() {
            return Err(failed("it did not offer this protocol in its handshake".into()));
        }
        let client = secured.peer_certificate();
        secured.tune(settings);
        let connection = ByteStreamConnection::start(secured, Role::Server, peer, settings, Some(closing));
        if !can_move {
            drop(connection.take_mover());
        }
        Ok(Lane::byte_stream(connection).with_client(client))
    }
}
