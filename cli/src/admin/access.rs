//! Access control of the admin port.

use crate::{exit::UsageError, secret_file};
use anyhow::Context;
use base64::prelude::{BASE64_STANDARD, Engine};
use std::{net::IpAddr, path::Path};
use subtle::ConstantTimeEq;

/// The minimum length of a token, in characters: shorter ones can be guessed.
const TOKEN_MIN_CHARS: usize = 16;

/// The maximum size of a file with a token.
const TOKEN_FILE_MAX_BYTES: u64 = 64 << 10;

/// The user name for basic authentication, which browsers use. The token is the password.
const USER: &str = "admin";

/// The credentials required of requests.
#[derive(Clone)]
pub(super) struct Access {
    /// The two accepted values of `Authorization`; `None` if no token is required.
    headers: Option<[String; 2]>,
    is_loopback: bool,
}

impl Access {
    /// The access rules of a port on `ip`, with the token of `token_file` if one is given.
    ///
    /// # Errors
    /// When other machines could reach the port without a token, or the file contains no valid token.
    pub(super) fn new(ip: IpAddr, token_file: Option<&Path>) -> anyhow::Result<Self> {
        let is_loopback = ip.is_loopback();
        let headers = match token_file {
            Some(path) => {
                let token = secret_file::read(path, TOKEN_FILE_MAX_BYTES)
                    .with_context(|| format!("cannot read --admin-token-file {}", path.display()))?;
                Some(accepted_headers(check_token(token.trim(), path)?))
            }
            None if is_loopback => None,
            None => {
                return Err(UsageError(format!(
                    "other machines can reach --admin {ip}, so it needs a token: write one into a file, e.g. with \
                     `openssl rand -hex 32 > token`, and name that file with --admin-token-file; or listen on 127.0.0.1"
                ))
                .into());
            }
        };
        Ok(Self { headers, is_loopback })
    }

    /// Whether a request with this `Authorization` has full access. The comparison takes constant time for a given
    /// length.
    pub(super) fn is_allowed(&self, authorization: Option<&[u8]>) -> bool {
        match (&self.headers, authorization) {
            (None, _) => true,
            (Some(_), None) => false,
            (Some([bearer, basic]), Some(header)) => {
                let is_equal = header.ct_eq(bearer.as_bytes()) | header.ct_eq(basic.as_bytes());
                is_equal.into()
            }
        }
    }

    /// Whether a request with this `Host` is accepted. On loopback without a token, this prevents DNS rebinding, by
    /// which a web page could read the port through a local browser.
    pub(super) fn is_meant_for(&self, host: Option<&str>) -> bool {
        let Some(host) = host.filter(|_| self.is_loopback && self.headers.is_none()) else { return true };
        let name = match host.rsplit_once(':') {
            Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
            _ => host,
        };
        name == "localhost" || name.trim_matches(['[', ']']).parse::<IpAddr>().is_ok()
    }
}

fn check_token<'t>(token: &'t str, path: &Path) -> Result<&'t str, UsageError> {
    let is_valid = token.len() >= TOKEN_MIN_CHARS && token.bytes().all(|byte| byte.is_ascii_graphic());
    is_valid.then_some(token).ok_or_else(|| {
        UsageError(format!(
            "--admin-token-file {}: a token must have at least {TOKEN_MIN_CHARS} characters and no spaces; make one \
             with `openssl rand -hex 32`",
            path.display()
        ))
    })
}

/// The accepted values of `Authorization`: the token as a bearer token, and as a password.
fn accepted_headers(token: &str) -> [String; 2] {
    [format!("Bearer {token}"), format!("Basic {}", BASE64_STANDARD.encode(format!("{USER}:{token}")))]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    const LOOPBACK: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);
    const UNSPECIFIED: IpAddr = IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED);

    fn with_token(ip: IpAddr, token: &str) -> anyhow::Result<Access> {
        let mut file = tempfile::NamedTempFile::new()?;
        writeln!(file, "{token}")?;
        Access::new(ip, Some(file.path()))
    }

    #[test]
    fn a_port_open_to_other_machines_requires_a_token() {
        assert!(Access::new(UNSPECIFIED, None).is_err());
        assert!(with_token(UNSPECIFIED, "short").is_err());
        assert!(with_token(UNSPECIFIED, "with a space in the middle").is_err());
        let access = with_token(UNSPECIFIED, "0123456789abcdef").unwrap();
        assert!(access.is_allowed(Some(b"Bearer 0123456789abcdef")));
        assert!(access.is_allowed(Some(b"Basic YWRtaW46MDEyMzQ1Njc4OWFiY2RlZg==")));
        let wrong: [Option<&[u8]>; 4] =
            [None, Some(b""), Some(b"Bearer 0123456789abcdeg"), Some(b"0123456789abcdef")];
        assert!(wrong.iter().all(|wrong| !access.is_allowed(*wrong)));
    }

    #[test]
    fn loopback_requires_a_token_only_if_one_is_given() {
        assert!(Access::new(LOOPBACK, None).unwrap().is_allowed(None));
        assert!(!with_token(LOOPBACK, "0123456789abcdef").unwrap().is_allowed(None));
    }

    #[test]
    fn loopback_rejects_foreign_host_names() {
        let access = Access::new(LOOPBACK, None).unwrap();
        for host in [None, Some("localhost"), Some("localhost:1"), Some("127.0.0.1:9470"), Some("[::1]:80")] {
            assert!(access.is_meant_for(host), "{host:?}");
        }
        assert!(!access.is_meant_for(Some("evil.example:9470")));
        assert!(
            with_token(UNSPECIFIED, "0123456789abcdef")
                .unwrap()
                .is_meant_for(Some("pod-0.relay"))
        );
    }
}
