//! Connections of the admin port: few, short and bounded.

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use std::time::Duration;
use tensor_relay_server::Strangers;
use tokio::{
    net::{TcpListener, TcpStream},
    time::{sleep, timeout},
};

/// How many connections there may be: a scraper, a prober, and some people with a page open. A further one always has a
/// place: of the network that has most, the oldest makes room for it, so that nobody keeps probes from elsewhere out.
const CONNECTIONS_MAX: usize = 32;

/// How long the head of a request may take, and so how long a connection may say nothing.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);

/// The longest life of a connection: nobody can hold one of the places for good.
const CONNECTION_MAX: Duration = Duration::from_secs(60);

/// How large the head of a request may be, and how much is buffered of what is sent. No request here has a body.
const BUFFER_BYTES: usize = 16 << 10;

/// How many headers a request may have.
const HEADERS_MAX: usize = 64;

/// How long to wait when the system has no descriptor to spare for a connection.
const REST: Duration = Duration::from_millis(200);

/// Accepts connections for ever.
pub(super) async fn accept(listener: TcpListener, routes: Router) {
    let places = Strangers::new(CONNECTIONS_MAX);
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                let routes = routes.clone();
                let (place, mut eviction) = places.enter(peer.ip());
                tokio::spawn(async move {
                    tokio::select! {
                        _ = timeout(CONNECTION_MAX, answer(stream, routes)) => {}
                        () = eviction.came() => {}
                    }
                    drop(place);
                });
            }
            Err(error) => {
                tracing::debug!(%error, "The admin port could not accept a connection.");
                sleep(REST).await;
            }
        }
    }
}

/// Answers the requests of one connection. Failures are the other end's.
async fn answer(stream: TcpStream, routes: Router) {
    let answered = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(BUFFER_BYTES)
        .max_headers(HEADERS_MAX)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes))
        .await;
    if let Err(error) = answered {
        tracing::debug!(%error, "A connection to the admin port failed.");
    }
}
