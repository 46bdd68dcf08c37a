//! A minimal HTTP client, written by hand so that no library hides protocol errors.

use serde_json::Value;
use std::{
    io::{Read, Write},
    net::TcpStream,
    time::Duration,
};

/// The timeout of each read.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The response to a request.
#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) code: u16,
    head: String,
    pub(crate) body: String,
    /// The body, as far as it arrived: `body` is its text.
    pub(crate) bytes: Vec<u8>,
}

impl Response {
    /// Requests `path` from the server at `address`, with additional `headers`. A `Host` header among them replaces the
    /// correct one.
    #[track_caller]
    pub(crate) fn get(address: &str, path: &str, headers: &[&str]) -> Self {
        Self::to("GET", (address, path), headers)
    }

    /// Requests a path of an address by this method, as [`get`](Self::get) does.
    #[track_caller]
    pub(crate) fn to(method: &str, to: (&str, &str), headers: &[&str]) -> Self {
        Self::with_body(method, to, headers, "")
    }

    /// Sends `body` to a path of an address by this method, as [`get`](Self::get) does.
    #[track_caller]
    pub(crate) fn with_body(
        method: &str,
        (address, path): (&str, &str),
        headers: &[&str],
        body: &str,
    ) -> Self {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        let host = match headers.iter().any(|header| header.starts_with("Host:")) {
            true => String::new(),
            false => format!("Host: {address}\r\n"),
        };
        let headers: String = headers.iter().map(|header| format!("{header}\r\n")).collect();
        let request = format!("{method} {path} HTTP/1.1\r\n{host}{headers}Connection: close\r\n\r\n{body}");
        let _ = stream.write_all(request.as_bytes()); // The server may respond before it has read everything.
        let mut response = vec![];
        let mut part = [0; 4096];
        while let Ok(bytes @ 1..) = stream.read(&mut part) {
            response.extend_from_slice(&part[..bytes]);
        }
        let end = response.windows(4).position(|bytes| bytes == b"\r\n\r\n");
        let end = end.unwrap_or_else(|| panic!("{path}: {:?}", String::from_utf8_lossy(&response)));
        let bytes = response.split_off(end + 4);
        let head = String::from_utf8(response).unwrap();
        let code = head.split(' ').nth(1).unwrap().parse().unwrap();
        Self { code, head, body: String::from_utf8_lossy(&bytes).into_owned(), bytes }
    }

    /// Checks the code.
    #[track_caller]
    pub(crate) fn expect_code(self, code: u16) -> Self {
        assert_eq!(self.code, code, "{self:?}");
        self
    }

    /// A header, by its case-insensitive name.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let mut headers = self.head.lines().filter_map(|line| line.split_once(": "));
        headers.find_map(|(other, value)| other.eq_ignore_ascii_case(name).then_some(value))
    }

    /// The body as JSON.
    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }
}
