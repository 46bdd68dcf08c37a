//! The routes of the admin port.

use super::{Subject, access::Access, events, heartbeat::Heartbeat, metrics};
use hyper::{
    HeaderMap, Method, Request, Response, StatusCode,
    header::{self, HeaderName, HeaderValue},
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

const TEXT: &str = "text/plain; charset=utf-8";
const METRICS: &str = "text/plain; version=0.0.4; charset=utf-8";
const HTML: &str = "text/html; charset=utf-8";

/// What answers requests, with access control.
pub(super) struct Routes {
    subject: Arc<dyn Subject>,
    heartbeat: Heartbeat,
    access: Access,
}

impl Routes {
    /// The routes for `subject`.
    pub(super) fn new(subject: Arc<dyn Subject>, heartbeat: Heartbeat, access: Access) -> Self {
        Self { subject, heartbeat, access }
    }

    /// The answer to `request`, whose body is ignored. Requests for another host are rejected, and the answers to all
    /// others have headers about caching and security.
    pub(super) fn answer<Body>(&self, request: &Request<Body>) -> Response<String> {
        let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok());
        if !self.access.is_meant_for(host) {
            let reason = "this port accepts only localhost or an IP address as its host name\n";
            return response(StatusCode::MISDIRECTED_REQUEST, TEXT, reason);
        }
        let response = self.authorised(request);
        let response = with_header(response, header::CACHE_CONTROL, "no-store");
        let response = with_header(response, header::X_CONTENT_TYPE_OPTIONS, "nosniff");
        with_header(response, header::CONTENT_SECURITY_POLICY, POLICY)
    }

    /// Rejects requests without the token, for any path except those in [`WITHOUT_TOKEN`]: new routes are protected by
    /// default.
    fn authorised<Body>(&self, request: &Request<Body>) -> Response<String> {
        let path = request.uri().path();
        if !WITHOUT_TOKEN.contains(&path) && !self.is_allowed(request.headers()) {
            let reason =
                "send the header `Authorization: Bearer TOKEN`, with the token of --admin-token-file\n";
            // `Basic` makes a browser ask for a user (`admin`) and a password (the token).
            let challenge = "Bearer, Basic realm=\"tensor-relay admin\"";
            let refused = response(StatusCode::UNAUTHORIZED, TEXT, reason);
            return with_header(refused, header::WWW_AUTHENTICATE, challenge);
        }
        // hyper leaves out the body of an answer to `HEAD`.
        let answer = match path {
            "/" => response(StatusCode::OK, HTML, PAGE),
            "/livez" => self.livez(),
            "/readyz" => self.readyz(request.headers()),
            "/metrics" => self.metrics(),
            "/status" => self.status(),
            _ => return response(StatusCode::NOT_FOUND, TEXT, ""),
        };
        match *request.method() {
            Method::GET | Method::HEAD => answer,
            _ => with_header(response(StatusCode::METHOD_NOT_ALLOWED, TEXT, ""), header::ALLOW, "GET,HEAD"),
        }
    }

    fn is_allowed(&self, headers: &HeaderMap) -> bool {
        self.access
            .is_allowed(headers.get(header::AUTHORIZATION).map(|value| value.as_bytes()))
    }

    fn livez(&self) -> Response<String> {
        match self.heartbeat.silence(Instant::now()) {
            None => response(StatusCode::OK, TEXT, "ok\n"),
            Some(silence) => {
                let reason = format!("the network thread has not run for {} s\n", silence.as_secs());
                response(StatusCode::SERVICE_UNAVAILABLE, TEXT, reason)
            }
        }
    }

    /// Answers `/readyz`. The reason may contain names of topics, so only authorised requests receive it.
    fn readyz(&self, headers: &HeaderMap) -> Response<String> {
        match self.subject.readiness() {
            Ok(()) => response(StatusCode::OK, TEXT, "ready\n"),
            Err(reason) if self.is_allowed(headers) => {
                response(StatusCode::SERVICE_UNAVAILABLE, TEXT, format!("not ready: {reason}\n"))
            }
            Err(_) => response(StatusCode::SERVICE_UNAVAILABLE, TEXT, "not ready\n"),
        }
    }

    fn metrics(&self) -> Response<String> {
        let text = metrics::encode(&status_of(&*self.subject), self.subject.metrics());
        response(StatusCode::OK, METRICS, text)
    }

    fn status(&self) -> Response<String> {
        let mut status = status_of(&*self.subject);
        status["events"] = events::recent().into();
        response(StatusCode::OK, "application/json", format!("{status}\n"))
    }
}

fn response(status: StatusCode, content_type: &'static str, body: impl Into<String>) -> Response<String> {
    let mut response = Response::new(body.into());
    *response.status_mut() = status;
    with_header(response, header::CONTENT_TYPE, content_type)
}

fn with_header(mut response: Response<String>, name: HeaderName, value: &'static str) -> Response<String> {
    response.headers_mut().insert(name, HeaderValue::from_static(value));
    response
}

/// The status, with what both ends have in common.
fn status_of(subject: &dyn Subject) -> Value {
    let (mut status, readiness) = (subject.status(), subject.readiness());
    status["version"] = env!("CARGO_PKG_VERSION").into();
    status["ready"] = readiness.is_ok().into();
    status["not_ready"] = readiness.err().into();
    status
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
    /// Method: request each path, and an unknown one, without a token, with a wrong one and with the right one.
    #[tokio::test]
    async fn every_route_except_the_probes_requires_the_token() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), TOKEN).unwrap();
        let access = Access::new(Ipv4Addr::LOCALHOST.into(), Some(file.path())).unwrap();
        let routes = Routes::new(Arc::new(NotReady), Heartbeat::start(), access);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(connections::accept(listener, routes));
        let wrong = format!("Authorization: Bearer {}\r\n", TOKEN.replace('0', "1"));
        let right = format!("Authorization: Bearer {TOKEN}\r\n");
        for path in ["/", "/livez", "/metrics", "/readyz", "/status", "/new"] {
            for header in ["", &wrong] {
                let answer = get(address, path, header).await;
                let is_probe = ["/livez", "/readyz"].contains(&path);
                assert_eq!(answer.starts_with("HTTP/1.1 401 "), !is_probe, "{path}: {answer}");
                assert!(!answer.contains("secret/name"), "{path}: {answer}");
            }
            let answer = get(address, path, &right).await;
            assert!(!answer.starts_with("HTTP/1.1 401 "), "{path}: {answer}");
        }
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
