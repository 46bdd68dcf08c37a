//! The connections of the hub.

use super::service::Service;
use hyper::{server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::{convert::Infallible, sync::Arc, time::Duration};
use tensor_relay_server::Logins;
use tokio::{
    net::{TcpListener, TcpStream},
    time::sleep,
};

/// The maximum number of connections: 200 clients with 8 each, and as many again. Each needs up to 200 KiB. A connection
/// beyond it evicts the oldest one of the network that has the most, which its client continues.
const CONNECTIONS_MAX: usize = 2_048;

/// The deadline for the head of a request, which also bounds how long a connection may be idle.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);

/// The time in which a client must receive something of what is sent to it.
const UNREAD_TIMEOUT: Duration = Duration::from_secs(60);

/// The maximum size of the head of a request, and of what is collected before it is written.
const BUFFER_BYTES: usize = 64 << 10;

/// The maximum number of headers of a request.
const HEADERS_MAX: usize = 64;

/// The pause after a failed accept, e.g. when no descriptor is free.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(200);

/// Accepts and serves connections. Never returns.
pub(super) async fn accept(listener: TcpListener, service: Arc<Service>) {
    let logins = Logins::new(CONNECTIONS_MAX);
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                let service = Arc::clone(&service);
                let (login, mut eviction) = logins.enter(peer.ip());
                tokio::spawn(async move {
                    tokio::select! {
                        () = answer(stream, service) => {}
                        () = eviction.evicted() => {}
                    }
                    drop(login);
                });
            }
            Err(error) => {
                tracing::debug!(%error, "The hub could not accept a connection.");
                sleep(ACCEPT_RETRY_DELAY).await;
            }
        }
    }
}

/// Answers the requests of one connection. Errors are only logged, because the peer causes them, or it is told.
async fn answer(stream: TcpStream, service: Arc<Service>) {
    let timeout_ms = UNREAD_TIMEOUT.as_millis() as u32;
    if let Err(error) = rustix::net::sockopt::set_tcp_user_timeout(&stream, timeout_ms) {
        tracing::debug!(%error, "A connection has no deadline for unread data.");
    }
    let _ = stream.set_nodelay(true); // Otherwise heads of answers may wait for acknowledgements.
    let service = service_fn(|request| async { Ok::<_, Infallible>(service.answer(request).await) });
    let answered = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(BUFFER_BYTES)
        .max_headers(HEADERS_MAX)
        .serve_connection(TokioIo::new(stream), service)
        .await;
    if let Err(error) = answered {
        tracing::debug!(%error, "A connection to the hub ended.");
    }
}
