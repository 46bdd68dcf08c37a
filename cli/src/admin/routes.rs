//! The routes of the admin port.

use super::{
    Subject,
    access::Access,
    events,
    heartbeat::Heartbeat,
    metrics::{self, Format},
};
use axum::{
    Router,
    extract::{Request, State},
    http::{HeaderMap, HeaderName, StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::get,
};
use serde_json::Value;
use std::{sync::Arc, time::Instant};

/// The status page. It contains no data, and requests `/status` every two seconds.
const PAGE: &str = include_str!("page.html");

/// The paths that require no token, because probes have none.
const WITHOUT_TOKEN: [&str; 2] = ["/livez", "/readyz"];

/// The content security policy of the page: only its inline code and style run, and no other page may frame it.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; \
                      frame-ancestors 'none'; base-uri 'none'; form-action 'none'";

/// The type of OpenMetrics. Requests that do not accept it get the older format.
const OPEN_METRICS: &str = "application/openmetrics-text";

/// The state of all handlers.
#[derive(Clone)]
struct AdminState {
    subject: Arc<dyn Subject>,
    heartbeat: Heartbeat,
    access: Access,
}

/// The router of the admin port, with access control.
pub(super) fn router(subject: Arc<dyn Subject>, heartbeat: Heartbeat, access: Access) -> Router {
    let state = AdminState { subject, heartbeat, access };
    Router::new()
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .route("/status", get(status))
        .route("/", get(page))
        .layer(middleware::from_fn_with_state(state.clone(), authorise))
        .layer(middleware::from_fn_with_state(state.clone(), check_host))
        .with_state(state)
}

/// Rejects requests for another host, and adds headers about caching and security to the responses to all others.
async fn check_host(State(state): State<AdminState>, request: Request, next: Next) -> Response {
    let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok());
    if !state.access.is_meant_for(host) {
        let reason = "this port accepts only localhost or an IP address as its host name\n";
        return (StatusCode::MISDIRECTED_REQUEST, reason).into_response();
    }
    let headers = [
        (header::CACHE_CONTROL, "no-store"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
    ];
    (headers, next.run(request).await).into_response()
}

/// Rejects requests without the token, for any path except those in [`WITHOUT_TOKEN`]: new routes are protected by
/// default.
async fn authorise(State(state): State<AdminState>, request: Request, next: Next) -> Response {
    match WITHOUT_TOKEN.contains(&request.uri().path()) || is_allowed(&state, request.headers()) {
        true => next.run(request).await,
        false => {
            // `Basic` makes a browser ask for a user (`admin`) and a password (the token).
            let challenge = [(header::WWW_AUTHENTICATE, "Bearer, Basic realm=\"tensor-relay admin\"")];
            let reason =
                "send the header `Authorization: Bearer TOKEN`, with the token of --admin-token-file\n";
            (StatusCode::UNAUTHORIZED, challenge, reason).into_response()
        }
    }
}

fn is_allowed(state: &AdminState, headers: &HeaderMap) -> bool {
    state
        .access
        .is_allowed(headers.get(header::AUTHORIZATION).map(|value| value.as_bytes()))
}

async fn livez(State(state): State<AdminState>) -> Response {
    match state.heartbeat.silence(Instant::now()) {
        None => "ok\n".into_response(),
        Some(silence) => {
            let reason = format!("the network thread has not run for {} s\n", silence.as_secs());
            (StatusCode::SERVICE_UNAVAILABLE, reason).into_response()
        }
    }
}

/// Answers `/readyz`. The reason may contain names of topics, so only authorised requests receive it.
async fn readyz(State(state): State<AdminState>, headers: HeaderMap) -> Response {
    match state.subject.readiness() {
        Ok(()) => "ready\n".into_response(),
        Err(reason) if is_allowed(&state, &headers) => {
            (StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {reason}\n")).into_response()
        }
        Err(_) => (StatusCode::SERVICE_UNAVAILABLE, "not ready\n").into_response(),
    }
}

async fn metrics(State(state): State<AdminState>, headers: HeaderMap) -> Response {
    let accepted = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
    let (content_type, format) = match accepted.is_some_and(|accept| accept.contains(OPEN_METRICS)) {
        true => ("application/openmetrics-text; version=1.0.0; charset=utf-8", Format::Open),
        false => ("text/plain; version=0.0.4; charset=utf-8", Format::Classic),
    };
    let text = metrics::encode(&status_of(&*state.subject), state.subject.metrics(), format);
    with_content_type(content_type, text)
}

async fn status(State(state): State<AdminState>) -> Response {
    let mut status = status_of(&*state.subject);
    status["events"] = events::recent().into();
    with_content_type("application/json", format!("{status}\n"))
}

/// The status, with what both ends have in common.
fn status_of(subject: &dyn Subject) -> Value {
    let (mut status, readiness) = (subject.status(), subject.readiness());
    status["version"] = env!("CARGO_PKG_VERSION").into();
    status["ready"] = readiness.is_ok().into();
    status["not_ready"] = readiness.err().into();
    status
}

async fn page() -> Response {
    with_content_type("text/html; charset=utf-8", PAGE.to_owned())
}

fn with_content_type(content_type: &'static str, text: String) -> Response {
    let headers: [(HeaderName, &str); 1] = [(header::CONTENT_TYPE, content_type)];
    (headers, text).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::{connections, metrics::Part};
    use std::net::{Ipv4Addr, SocketAddr};
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::{TcpListener, TcpStream},
    };

    const TOKEN: &str = "0123456789abcdef";

    struct NotReady;

    impl Subject for NotReady {
        fn readiness(&self) -> Result<(), String> {
            Err("topic secret/name is missing".into())
        }

        fn status(&self) -> Value {
            Value::Null
        }

        fn metrics(&self) -> &'static [Part] {
            &[]
        }
    }

    /// Goal: every route, including ones added later, requires the token, except the two probes.
    /// Method: request each path of the router without a token, with a wrong one and with the right one.
    #[tokio::test]
    async fn every_route_except_the_probes_requires_the_token() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), TOKEN).unwrap();
        let access = Access::new(Ipv4Addr::LOCALHOST.into(), Some(file.path())).unwrap();
        let routes = router(Arc::new(NotReady), Heartbeat::start(), access);
        let paths = paths_of(&routes);
        for path in ["/", "/livez", "/metrics", "/readyz", "/status"] {
            assert!(paths.contains(&path.to_owned()), "{paths:?}");
        }
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(connections::accept(listener, routes));
        let wrong = format!("Authorization: Bearer {}\r\n", TOKEN.replace('0', "1"));
        let right = format!("Authorization: Bearer {TOKEN}\r\n");
        for path in paths {
            for header in ["", &wrong] {
                let answer = get(address, &path, header).await;
                let is_probe = ["/livez", "/readyz"].contains(&path.as_str());
                assert_eq!(answer.starts_with("HTTP/1.1 401 "), !is_probe, "{path}: {answer}");
                assert!(!answer.contains("secret/name"), "{path}: {answer}");
            }
            let answer = get(address, &path, &right).await;
            assert!(!answer.starts_with("HTTP/1.1 401 "), "{path}: {answer}");
        }
    }

    /// The paths of the router, from its debug output.
    fn paths_of(routes: &Router) -> Vec<String> {
        let text = format!("{routes:?}");
        let quoted = text.split('"').filter(|quoted| quoted.starts_with('/'));
        // The fallback is not a route; `processes/admin` tests it with `/new`.
        quoted.filter(|path| !path.contains("__private__")).map(str::to_owned).collect()
    }

    async fn get(address: SocketAddr, path: &str, header: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n{header}\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }
}
