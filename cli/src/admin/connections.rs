//! Connections of the admin port: few, short and bounded.

use super::routes::Routes;
use hyper::{server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::{convert::Infallible, future::ready, sync::Arc, time::Duration};
use tensor_relay_server::Logins;
use tokio::{
    net::{TcpListener, TcpStream},
    time::{sleep, timeout},
};

/// The maximum number of connections: a scraper, a prober, and a few browsers. A connection beyond it evicts the oldest
/// connection of the network that has the most, so that no client can block the probes of other networks.
const CONNECTIONS_MAX: usize = 32;

/// The deadline for the head of a request, which also bounds how long a connection may be silent.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);

/// The maximum lifetime of a connection, so that no client can occupy one for good.
const CONNECTION_LIFETIME_MAX: Duration = Duration::from_secs(60);

/// The maximum size of the head of a request, and of the read buffer. No request here has a body.
const BUFFER_BYTES: usize = 16 << 10;

/// The maximum number of headers of a request.
const HEADERS_MAX: usize = 64;

/// The pause after a failed accept, e.g. when no descriptor is free.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(200);

/// Accepts and serves connections. Never returns.
pub(super) async fn accept(listener: TcpListener, routes: Routes) {
    let routes = Arc::new(routes);
    let logins = Logins::new(CONNECTIONS_MAX);
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                let routes = Arc::clone(&routes);
                let (login, mut eviction) = logins.enter(peer.ip());
                tokio::spawn(async move {
                    tokio::select! {
                        _ = timeout(CONNECTION_LIFETIME_MAX, answer(stream, routes)) => {}
                        () = eviction.evicted() => {}
                    }
                    drop(login);
                });
            }
            Err(error) => {
                tracing::debug!(%error, "The admin port could not accept a connection.");
                sleep(ACCEPT_RETRY_DELAY).await;
            }
        }
    }
}

/// Answers the request of one connection. Errors are only logged, because the peer causes them.
async fn answer(stream: TcpStream, routes: Arc<Routes>) {
    let service = service_fn(|request| ready(Ok::<_, Infallible>(routes.answer(&request))));
    let answered = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(BUFFER_BYTES)
        .max_headers(HEADERS_MAX)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service)
        .await;
    if let Err(error) = answered {
        tracing::debug!(%error, "A connection to the admin port failed.");
    }
}
