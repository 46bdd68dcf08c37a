//! The address `unix:PATH` of a ticket: a Unix socket of the client's host (PROTOCOL.md §2).

use super::{SCHEME as NETWORK, TicketError};
use crate::Token;

/// What the address begins with.
pub(super) const SCHEME: &str = "unix:";

/// The maximum length of a path: a `sockaddr_un` of Linux has 108 bytes, of which one ends the path.
const PATH_MAX_BYTES: usize = 107;

/// Checks a ticket that names a socket: it is the only address, and has no key.
pub(super) fn check(addresses: &[String], keys: &[[u8; 32]]) -> Result<(), TicketError> {
    let [address] = addresses else { return Err(TicketError::SocketAmongAddresses) };
    let path = address.strip_prefix(SCHEME).ok_or(TicketError::SocketAmongAddresses)?;
    let why = match path.len() {
        0 => "it has no path",
        _ if path.starts_with(NETWORK) => return Err(TicketError::SocketAmongAddresses),
        _ if path.contains('\0') => "its path contains a zero byte",
        length if length > PATH_MAX_BYTES => "its path is longer than 107 bytes, which a socket's cannot be",
        _ if !keys.is_empty() => return Err(TicketError::SocketWithKey),
        _ => return Ok(()),
    };
    Err(bad(path, why))
}

/// `text` without its percent-encoding.
pub(super) fn decode(text: &str) -> Result<String, TicketError> {
    let mut parts = text.split('%');
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        let code = part.get(..2).filter(|hex| hex.bytes().all(|byte| byte.is_ascii_hexdigit()));
        let code = code.and_then(|hex| u8::from_str_radix(hex, 16).ok());
        bytes.push(code.ok_or_else(|| bad(text, "`%` is not followed by two hexadecimal digits"))?);
        bytes.extend_from_slice(&part.as_bytes()[2..]);
    }
    String::from_utf8(bytes).map_err(|_| bad(text, "its path is not UTF-8"))
}

/// `text` with percent-encoding of `%`, `?`, and all that is not a visible character of ASCII, so that it is one line
/// without white space.
pub(super) fn encode(text: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_graphic() && !matches!(byte, b'%' | b'?');
    let encode = |byte: u8| if is_plain(byte) { char::from(byte).into() } else { format!("%{byte:02X}") };
    text.bytes().map(encode).collect()
}

/// The error about a `path`, which may be a mistyped ticket with a token.
fn bad(path: &str, why: &'static str) -> TicketError {
    TicketError::BadSocket { path: Token::hide(path), why }
}
