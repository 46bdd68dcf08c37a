//! Who may use the hub: those who have its token, at a host that is meant.

use super::failure::Failure;
use crate::{args::HubOptions, exit::UsageError, secret_file};
use anyhow::{Context, bail};
use hyper::{HeaderMap, StatusCode, header};
use std::{
    fs::OpenOptions,
    io::{ErrorKind, Write},
    net::IpAddr,
    os::unix::fs::OpenOptionsExt,
    path::Path,
};
use subtle::ConstantTimeEq;

/// The minimum length of a token, in characters: shorter ones can be guessed.
const TOKEN_MIN_CHARS: usize = 16;

/// The maximum size of a file with a token.
const TOKEN_FILE_MAX_BYTES: u64 = 64 << 10;

/// The beginning of tokens, by which tools recognise secrets of this kind.
const TOKEN_PREFIX: &str = "hf_";

/// The credentials that requests need.
#[derive(Debug)]
pub(super) struct Access {
    token: Option<String>,
    hosts: Vec<String>,
}

impl Access {
    /// The access rules of a hub at `ip`.
    ///
    /// # Errors
    /// When a token file cannot be read or written or has no usable token, or others could reach the hub without one.
    pub(super) fn new(ip: IpAddr, options: &HubOptions) -> anyhow::Result<Self> {
        let token = match &options.hub_token_file {
            _ if options.hub_anonymous && !ip.is_loopback() => bail!(UsageError(format!(
                "other machines can reach {ip}, so the hub needs a token: leave out --hub-anonymous, or listen on 127.0.0.1"
            ))),
            _ if options.hub_anonymous => None,
            Some(path) => Some(token_of(path)?),
            None => Some(new_token()),
        };
        Ok(Self { token, hosts: options.hub_host.clone() })
    }

    /// The token, if one is needed.
    pub(super) fn token(&self) -> Option<&str> {
        self.token.as_deref()
    }

    /// Refuses requests for other hosts, by which a web page could read the hub through a browser of this machine (DNS
    /// rebinding), and those without the token. The comparison takes constant time for a given length.
    ///
    /// # Errors
    /// [`Failure`] for the client.
    pub(super) fn check(&self, headers: &HeaderMap) -> Result<(), Failure> {
        let text = |name| headers.get(name).map(|value| value.to_str().unwrap_or(""));
        if !text(header::HOST).is_none_or(|host| self.is_meant(host)) {
            let message =
                "this hub answers for localhost and IP addresses: name its host name with --hub-host";
            return Err(Failure::new(StatusCode::MISDIRECTED_REQUEST, message));
        }
        let Some(token) = &self.token else { return Ok(()) };
        let sent = text(header::AUTHORIZATION).and_then(|value| value.strip_prefix("Bearer "));
        match sent.is_some_and(|sent| sent.as_bytes().ct_eq(token.as_bytes()).into()) {
            true => Ok(()),
            false => Err(Failure::no_token()),
        }
    }

    fn is_meant(&self, host: &str) -> bool {
        let name = match host.rsplit_once(':') {
            Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
            _ => host,
        };
        name.eq_ignore_ascii_case("localhost")
            || name.trim_matches(['[', ']']).parse::<IpAddr>().is_ok()
            || self.hosts.iter().any(|meant| meant.eq_ignore_ascii_case(name))
    }
}

fn new_token() -> String {
    format!("{TOKEN_PREFIX}{:032x}", rand::random::<u128>())
}

/// The token in the file, which is written if it does not exist.
fn token_of(path: &Path) -> anyhow::Result<String> {
    let text = match secret_file::read(path, TOKEN_FILE_MAX_BYTES) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let token = new_token();
            let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
            let written = file.and_then(|mut file| writeln!(file, "{token}"));
            written.with_context(|| format!("cannot write --hub-token-file {}", path.display()))?;
            token
        }
        read => read.with_context(|| format!("cannot read --hub-token-file {}", path.display()))?,
    };
    let token = text.trim();
    let is_valid = token.len() >= TOKEN_MIN_CHARS && token.bytes().all(|byte| byte.is_ascii_graphic());
    if !is_valid {
        bail!(UsageError(format!(
            "--hub-token-file {}: a token must have at least {TOKEN_MIN_CHARS} characters and no spaces; delete the file, and \
             the hub writes a new one",
            path.display()
        )));
    }
    Ok(token.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use hyper::header::HeaderValue;
    use std::net::Ipv4Addr;

    const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    fn options() -> HubOptions {
        let (hub_token_file, hub_anonymous, hub_mem) = (None, false, 0);
        HubOptions {
            hub_token_file,
            hub_anonymous,
            hub_host: vec!["hub.svc".into()],
            hub_repo: vec![],
            hub_mem,
        }
    }

    fn headers(host: Option<&'static str>, authorization: Option<String>) -> HeaderMap {
        let mut headers = HeaderMap::new();
        if let Some(host) = host {
            headers.insert(header::HOST, HeaderValue::from_static(host));
        }
        if let Some(authorization) = authorization {
            headers.insert(header::AUTHORIZATION, authorization.parse().unwrap());
        }
        headers
    }

    #[test]
    fn a_request_needs_the_token() {
        let access = Access::new(LOOPBACK, &options()).unwrap();
        let token = access.token().unwrap().to_owned();
        let check = |authorization: Option<String>| access.check(&headers(None, authorization));
        assert_eq!(check(Some(format!("Bearer {token}"))), Ok(()));
        for wrong in [None, Some(token.clone()), Some(format!("Bearer {token}x")), Some("Bearer ".into())] {
            assert_eq!(check(wrong), Err(Failure::no_token()));
        }
        let other = Access::new(LOOPBACK, &options()).unwrap();
        assert_ne!(other.token(), Some(&*token), "each start has its own");
    }

    #[test]
    fn only_a_loopback_address_may_be_anonymous() {
        let anonymous = HubOptions { hub_anonymous: true, ..options() };
        let access = Access::new(LOOPBACK, &anonymous).unwrap();
        assert_eq!(access.check(&headers(Some("localhost:8470"), None)), Ok(()));
        assert!(Access::new(Ipv4Addr::UNSPECIFIED.into(), &anonymous).is_err());
    }

    #[test]
    fn foreign_host_names_are_refused() {
        let access = Access::new(LOOPBACK, &HubOptions { hub_anonymous: true, ..options() }).unwrap();
        for host in [None, Some("LOCALHOST"), Some("127.0.0.1:8470"), Some("[::1]:1"), Some("Hub.svc:80")] {
            assert_eq!(access.check(&headers(host, None)), Ok(()), "{host:?}");
        }
        for host in ["evil.example", "evil.example:8470", "hub.svc.evil", ""] {
            assert!(access.check(&headers(Some(host), None)).is_err(), "{host}");
        }
    }

    #[test]
    fn a_token_file_is_written_once_and_private() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let with_file = HubOptions { hub_token_file: Some(path.clone()), ..options() };
        let token = || Access::new(LOOPBACK, &with_file).unwrap().token().unwrap().to_owned();
        let first = token();
        assert_eq!((token(), first.starts_with(TOKEN_PREFIX)), (first, true));
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        std::fs::write(&path, "short").unwrap();
        assert!(Access::new(LOOPBACK, &with_file).is_err());
    }
}
