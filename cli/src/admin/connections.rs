//! The connections of the admin port: few, short, and each within its bounds.

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use std::{sync::Arc, time::Duration};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::{sleep, timeout},
};

/// How many connections there may be: a scraper, a prober, and some people with a page open, which keeps one. Others wait
/// in the queue of the system until one of these ends.
const CONNECTIONS_MAX: usize = 32;

/// How long the head of a request may take, and so how long a connection may be idle.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a connection may last, whatever it does: nobody can hold one of the places for good.
const CONNECTION_MAX: Duration = Duration::from_secs(60);

/// How large the head of a request may be, and how much is buffered of what is sent. No request here has a body.
const BUFFER_BYTES: usize = 16 << 10;

/// How many headers a request may have.
const HEADERS_MAX: usize = 64;

/// How long to wait when the system has no descriptor to spare for a connection.
const REST: Duration = Duration::from_millis(200);

/// Accepts connections for ever.
pub(super) async fn accept(listener: TcpListener, routes: Router) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let routes = routes.clone();
                tokio::spawn(async move {
                    let _ = timeout(CONNECTION_MAX, answer(stream, routes)).await;
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

/// Answers the requests of one connection. What fails is the other end's affair.
async fn answer(stream: TcpStream, routes: Router) {
    let answered = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(BUFFER_BYTES)
        .max_headers(HEADERS_MAX)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes))
        .await;
    if let Err(error) = answered {
        tracing::debug!(%error, "A connection to the admin port failed.");
    }
}
