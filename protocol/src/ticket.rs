//! The ticket: the text with which a client connects (PROTOCOL.md §2).

mod socket;

use crate::{NameError, Token, TokenError, Topic};
use std::{fmt, path::Path, str::FromStr};

/// The addresses, public keys, topic and token with which a client connects to a server.
///
/// In text: `relay://10.0.0.5:4747/policy?key=sha256:9f86…`. Several addresses are separated by commas and tried
/// concurrently. During a rotation of the server's key, a ticket has several keys, each of which the client accepts. A
/// ticket's key is the SHA-256 of the server's public key (its SubjectPublicKeyInfo), by which a client authenticates
/// the server without a certificate authority.
///
/// A server of the same host may be named by its Unix socket: `unix:/run/tensor-relay/host.sock?topic=policy`. Such a
/// ticket has no key: whose process may listen there is known to the kernel. Its only address is `unix:PATH`.
///
/// A ticket with a `token` gives access and is confidential: `Debug` and [`redacted`](Self::redacted) hide the token;
/// `Display` writes the complete ticket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ticket {
    addresses: Vec<String>,
    keys: Vec<[u8; 32]>,
    topic: Option<Topic>,
    token: Option<Token>,
    server_uid: Option<u32>,
}

impl Ticket {
    /// A ticket without a token.
    ///
    /// # Errors
    /// [`TicketError`] when there is no address or no key, or an address is not `host:port`; or when the address is
    /// `unix:PATH` and there is another one, a key, or a path that no socket can have.
    pub fn new(
        addresses: Vec<String>,
        keys: Vec<[u8; 32]>,
        topic: Option<Topic>,
    ) -> Result<Self, TicketError> {
        if addresses.iter().any(|address| address.starts_with(socket::SCHEME)) {
            socket::check(&addresses, &keys)?;
            return Ok(Self { addresses, keys, topic, token: None, server_uid: None });
        }
        if addresses.is_empty() {
            return Err(TicketError::NoAddress);
        }
        if keys.is_empty() {
            return Err(TicketError::NoKey);
        }
        for address in &addresses {
            check_address(address)?;
        }
        Ok(Self { addresses, keys, topic, token: None, server_uid: None })
    }

    /// The server's addresses as `host:port`, where a numeric IPv6 host is in brackets; or `unix:PATH` alone.
    pub fn addresses(&self) -> &[String] {
        &self.addresses
    }

    /// The path of the server's Unix socket, if the ticket names one instead of network addresses.
    pub fn socket(&self) -> Option<&Path> {
        self.addresses.first()?.strip_prefix(socket::SCHEME).map(Path::new)
    }

    /// The SHA-256 of each public key that the client accepts; none for a socket.
    pub fn keys(&self) -> &[[u8; 32]] {
        &self.keys
    }

    /// The topic, if the ticket names one.
    pub fn topic(&self) -> Option<&Topic> {
        self.topic.as_ref()
    }

    /// The token that gives access, if the ticket has one.
    pub fn token(&self) -> Option<&Token> {
        self.token.as_ref()
    }

    /// The only user whose process may listen at the Unix socket, if the ticket names one.
    pub fn server_uid(&self) -> Option<u32> {
        self.server_uid
    }

    /// This ticket with another token.
    #[must_use]
    pub fn with_token(self, token: Token) -> Self {
        Self { token: Some(token), ..self }
    }

    /// This ticket without its topic.
    #[must_use]
    pub fn without_topic(self) -> Self {
        Self { topic: None, ..self }
    }

    /// The ticket as text with its token hidden, for logs.
    pub fn redacted(&self) -> String {
        self.to_text(self.token.as_ref().map(|_| "(hidden)"))
    }

    fn to_text(&self, token: Option<&str>) -> String {
        let (mut text, topic) = (self.addresses.join(","), self.topic.as_ref().map(Topic::as_str));
        let mut query = Vec::new();
        match self.socket() {
            Some(_) => {
                text = socket::encode(&text);
                query.extend(topic.map(|topic| format!("topic={topic}")));
                query.extend(self.server_uid.map(|uid| format!("server_uid={uid}")));
            }
            None => {
                text = format!("{SCHEME}{text}") + &topic.map(|topic| format!("/{topic}")).unwrap_or_default()
            }
        }
        for key in &self.keys {
            let hex: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
            query.push(format!("key={KEY_PREFIX}{hex}"));
        }
        query.extend(token.map(|token| format!("token={token}")));
        text + if query.is_empty() { "" } else { "?" } + &query.join("&")
    }

    /// This ticket for another topic of the server.
    #[must_use]
    pub fn with_topic(mut self, topic: Topic) -> Self {
        self.topic = Some(topic);
        self
    }
}

/// Why a text is not a ticket. Usually the ticket was not copied completely.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TicketError {
    /// A text that begins with neither `relay://` nor `unix:`.
    #[error(
        "a ticket begins with `relay://`, or with `unix:` for a socket of this host; copy the whole line that \
         `tensor-relay serve` printed"
    )]
    NotATicket,
    /// No address.
    #[error("the ticket names no address: it should read `relay://host:port/topic?key=sha256:…`")]
    NoAddress,
    /// No key.
    #[error("the ticket has no key: it should end in `?key=sha256:` and 64 hexadecimal digits")]
    NoKey,
    /// An invalid address.
    #[error("the ticket's address {0:?} is not `host:port`")]
    BadAddress(String),
    /// An invalid key.
    #[error("the ticket's key {0:?} is not `sha256:` and 64 hexadecimal digits: was the ticket cut off?")]
    BadKey(String),
    /// An invalid topic.
    #[error("the ticket's topic {name:?} is not valid: {why}")]
    BadTopic {
        /// The topic's text.
        name: String,
        /// The reason.
        why: &'static str,
    },
    /// An invalid token.
    #[error("the ticket's token cannot be read: {0}")]
    BadToken(#[from] TokenError),
    /// More than one token.
    #[error("the ticket has two tokens: were two tickets joined?")]
    TwoTokens,
    /// More than one topic.
    #[error("the ticket has two topics: were two tickets joined?")]
    TwoTopics,
    /// More than one user of the server.
    #[error("the ticket has two server_uid: were two tickets joined?")]
    TwoServerUids,
    /// A server's user that is not a number.
    #[error("the ticket's server_uid {0:?} is not the number of a user")]
    BadServerUid(String),
    /// A Unix socket without a path, or with one that no socket can have.
    #[error(
        "the ticket's socket {path:?} cannot be one: {why}; it should read `unix:/run/tensor-relay/host.sock`"
    )]
    BadSocket {
        /// The path's text.
        path: String,
        /// The reason.
        why: &'static str,
    },
    /// A Unix socket with a key.
    #[error("the ticket has a key and names a Unix socket, whose server proves none: remove `key=…`")]
    SocketWithKey,
    /// A Unix socket beside other addresses.
    #[error(
        "the ticket names a Unix socket and other addresses: it should read `unix:PATH`, without `relay://`, or have \
         network addresses alone"
    )]
    SocketAmongAddresses,
    /// An unknown part, which must not be ignored.
    #[error(
        "the ticket has a part called {0:?} that this version does not know: update tensor-relay on this side"
    )]
    UnknownPart(String),
}

const SCHEME: &str = "relay://";
const KEY_PREFIX: &str = "sha256:";

impl fmt::Display for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_text(self.token.as_ref().map(Token::as_str)))
    }
}

impl FromStr for Ticket {
    type Err = TicketError;

    fn from_str(text: &str) -> Result<Self, TicketError> {
        let text = text.trim();
        let (front, query) = text.split_once('?').unwrap_or((text, ""));
        let is_socket = front.starts_with(socket::SCHEME);
        let (addresses, topic) = match front.strip_prefix(SCHEME) {
            Some(rest) => {
                let (hosts, topic) = rest.split_once('/').unwrap_or((rest, ""));
                let hosts: Vec<String> = hosts.split(',').filter(|a| !a.is_empty()).map(Into::into).collect();
                if hosts.iter().any(|host| host.starts_with(socket::SCHEME)) {
                    return Err(TicketError::SocketAmongAddresses);
                }
                (hosts, topic)
            }
            None if is_socket => (vec![socket::decode(front)?], ""),
            None => return Err(TicketError::NotATicket),
        };
        let mut topic = if topic.is_empty() { None } else { Some(parse_topic(topic)?) };
        let (mut keys, mut token, mut server_uid) = (vec![], None, None);
        for part in query.split('&').filter(|part| !part.is_empty()) {
            match part.split_once('=') {
                Some(("key", key)) => keys.push(parse_key(key)?),
                Some(("topic", name)) if is_socket && topic.is_none() => topic = Some(parse_topic(name)?),
                Some(("topic", _)) if is_socket => return Err(TicketError::TwoTopics),
                Some(("server_uid", uid)) if is_socket && server_uid.is_none() => {
                    server_uid = Some(parse_uid(uid)?);
                }
                Some(("server_uid", _)) if is_socket => return Err(TicketError::TwoServerUids),
                Some(("token", text)) if token.is_none() => token = Some(Token::new(text)?),
                Some(("token", _)) => return Err(TicketError::TwoTokens),
                // The error contains the name alone, since the value may be a secret.
                _ => {
                    let name = part.split('=').next().unwrap_or(part);
                    return Err(TicketError::UnknownPart(Token::hide(name)));
                }
            }
        }
        Ok(Self { token, server_uid, ..Self::new(addresses, keys, topic)? })
    }
}

fn parse_topic(name: &str) -> Result<Topic, TicketError> {
    Topic::new(name).map_err(|error| {
        let why = match error {
            NameError::Empty => "it is empty",
            NameError::TooLong(_) => "it is too long",
            NameError::EmptySegment(_) => "it has an empty segment",
            NameError::DotSegment(_) => "it has a segment `.` or `..`",
            NameError::ForbiddenChar { .. } => "topics use letters, digits, `.`, `_`, `-` and `/`",
        };
        TicketError::BadTopic { name: Token::hide(name), why }
    })
}

/// A user's number, in the one form that it is written in.
fn parse_uid(text: &str) -> Result<u32, TicketError> {
    let uid = text.parse().ok().filter(|uid: &u32| uid.to_string() == text);
    uid.ok_or_else(|| TicketError::BadServerUid(Token::hide(text)))
}

fn parse_key(key: &str) -> Result<[u8; 32], TicketError> {
    let bad = || TicketError::BadKey(Token::hide(key));
    let hex = key
        .strip_prefix(KEY_PREFIX)
        .filter(|h| h.len() == 64 && h.bytes().all(|b| b.is_ascii_hexdigit()))
        .ok_or_else(bad)?;
    let mut bytes = [0; 32];
    for (index, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&hex[index * 2..index * 2 + 2], 16).map_err(|_| bad())?;
    }
    Ok(bytes)
}

/// Checks that `address` is `host:port`, where host is a name, an IPv4 address or an IPv6 address in brackets.
pub(crate) fn check_address(address: &str) -> Result<(), TicketError> {
    let bad = || TicketError::BadAddress(Token::hide(address));
    let (host, port) = address.rsplit_once(':').ok_or_else(bad)?;
    let is_bracketed = host.starts_with('[') && host.ends_with(']');
    let is_host_char = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    let is_valid_host = match is_bracketed {
        true => host[1..host.len() - 1].parse::<std::net::Ipv6Addr>().is_ok(),
        false => !host.is_empty() && host.chars().all(is_host_char),
    };
    let is_numeric = port.bytes().all(|b| b.is_ascii_digit());
    let is_valid_port = is_numeric && port.parse::<u16>().is_ok_and(|p| p != 0);
    if is_valid_host && is_valid_port { Ok(()) } else { Err(bad()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_ticket_is_parsed_and_displayed() {
        let text = format!("relay://10.0.0.5:4747,[fe80::1]:4747/kv/req-17?key=sha256:{}", "9f".repeat(32));
        let ticket: Ticket = text.parse().unwrap();
        assert_eq!(ticket.addresses(), ["10.0.0.5:4747", "[fe80::1]:4747"]);
        assert_eq!(ticket.keys(), [[0x9f; 32]]);
        assert_eq!(ticket.topic().unwrap().as_str(), "kv/req-17");
        assert_eq!(ticket.to_string(), text);
    }

    /// Each text of a socket, with its path, its topic, its token, and how it is written.
    #[test]
    fn a_ticket_for_a_socket_is_parsed_and_displayed() {
        for (text, path, topic, token, written) in [
            ("unix:/run/tensor-relay/host.sock", "/run/tensor-relay/host.sock", None, None, None),
            ("unix:host.sock?topic=kv/req-17", "host.sock", Some("kv/req-17"), None, None),
            ("unix:/a?topic=t&token=c2VjcmV0", "/a", Some("t"), Some("c2VjcmV0"), None),
            (
                "unix:/a?token=c2VjcmV0&topic=t",
                "/a",
                Some("t"),
                Some("c2VjcmV0"),
                Some("unix:/a?topic=t&token=c2VjcmV0"),
            ),
            ("unix:/a?token=c2VjcmV0", "/a", None, Some("c2VjcmV0"), None),
            ("unix:/a?topic=t&server_uid=10001&token=c2VjcmV0", "/a", Some("t"), Some("c2VjcmV0"), None),
            (
                "unix:/with%20space%3f%25,b&c=d",
                "/with space?%,b&c=d",
                None,
                None,
                Some("unix:/with%20space%3F%25,b&c=d"),
            ),
            (" unix:/s/é#?\n", "/s/é#", None, None, Some("unix:/s/%C3%A9#")),
        ] {
            let ticket: Ticket = text.parse().unwrap();
            assert_eq!(ticket.socket(), Some(Path::new(path)), "{text}");
            assert_eq!(ticket.addresses(), [format!("unix:{path}")]);
            assert_eq!(ticket.topic().map(Topic::as_str), topic);
            assert_eq!(ticket.token().map(Token::as_str), token);
            assert!(ticket.keys().is_empty());
            assert_eq!(ticket.server_uid(), text.contains("server_uid").then_some(10_001));
            let server = ticket.clone().without_topic();
            assert_eq!((server.topic(), server.server_uid()), (None, ticket.server_uid()));
            assert_eq!(server.token(), ticket.token());
            let written = written.unwrap_or(text);
            assert_eq!(ticket.to_string(), written);
            assert_eq!(ticket.redacted(), written.replace("c2VjcmV0", "(hidden)"));
        }
    }

    #[test]
    fn only_display_shows_the_token() {
        let text = format!("relay://a:1/t?key=sha256:{}&token=c2VjcmV0", "00".repeat(32));
        let ticket: Ticket = text.parse().unwrap();
        assert_eq!(ticket.token(), Some(&Token::new("c2VjcmV0").unwrap()));
        assert_eq!(ticket.to_string(), text);
        assert_eq!(ticket.redacted(), text.replace("c2VjcmV0", "(hidden)"));
        assert!(!format!("{ticket:?}").contains("c2VjcmV0"));
        let bare = Ticket::new(vec!["a:1".into()], vec![[0; 32]], None).unwrap();
        assert_eq!(bare.redacted(), bare.to_string());
        assert_eq!(
            bare.with_topic(Topic::new("t").unwrap())
                .with_token(Token::new("c2VjcmV0").unwrap()),
            ticket
        );
    }

    #[test]
    fn invalid_tickets_are_refused() {
        let key = format!("key=sha256:{}", "00".repeat(32));
        for (text, error) in [
            ("http://a:1".into(), TicketError::NotATicket),
            (format!("relay:///t?{key}"), TicketError::NoAddress),
            ("relay://a:1/t".into(), TicketError::NoKey),
            (format!("relay://a/t?{key}"), TicketError::BadAddress("a".into())),
            (format!("relay://a:0/t?{key}"), TicketError::BadAddress("a:0".into())),
            (format!("relay://a:+1/t?{key}"), TicketError::BadAddress("a:+1".into())),
            (format!("relay://a b:1/t?{key}"), TicketError::BadAddress("a b:1".into())),
            ("relay://a:1/t?key=sha256:00".into(), TicketError::BadKey("sha256:00".into())),
            (format!("relay://a:1/t?{key}&expires=9"), TicketError::UnknownPart("expires".into())),
            (format!("relay://a:1/t?{key}&token=a.b"), TicketError::BadToken(TokenError::Malformed)),
            (format!("relay://a:1/t?{key}&token=a&token=b"), TicketError::TwoTokens),
            (format!("relay://a:1?{key}&topic=t"), TicketError::UnknownPart("topic".into())),
            (format!("unix:/a?{key}"), TicketError::SocketWithKey),
            (format!("relay://unix:/a?{key}"), TicketError::SocketAmongAddresses),
            (format!("relay://a:1,unix:b?{key}"), TicketError::SocketAmongAddresses),
            (format!("unix:relay://a:1/t?{key}"), TicketError::SocketAmongAddresses),
            ("unix:/a?topic=t&topic=u".into(), TicketError::TwoTopics),
            ("unix:/a?server_uid=1&server_uid=1".into(), TicketError::TwoServerUids),
            ("unix:/a?server_uid=root".into(), TicketError::BadServerUid("root".into())),
            ("unix:/a?server_uid=+1".into(), TicketError::BadServerUid("+1".into())),
            ("unix:/a?server_uid=4294967296".into(), TicketError::BadServerUid("4294967296".into())),
            (format!("relay://a:1?{key}&server_uid=1"), TicketError::UnknownPart("server_uid".into())),
            ("unix:/a?topics=t".into(), TicketError::UnknownPart("topics".into())),
        ] {
            assert_eq!(text.parse::<Ticket>(), Err(error), "{text}");
        }
        assert!(matches!(
            format!("relay://a:1/../x?{key}").parse::<Ticket>(),
            Err(TicketError::BadTopic { .. })
        ));
        for path in ["", "/a%", "/a%4", "/a%zz", "/a%ff", "/a%00", &format!("/{}", "a".repeat(107))] {
            let error = format!("unix:{path}?topic=t").parse::<Ticket>();
            assert!(matches!(error, Err(TicketError::BadSocket { .. })), "{path}: {error:?}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_text_does_not_panic(text in "(relay://|unix:)?[ -~äé]{0,80}") {
            if let Ok(ticket) = text.parse::<Ticket>() {
                prop_assert_eq!(ticket.to_string().parse::<Ticket>(), Ok(ticket));
            }
        }

        /// Goal: no error about a damaged ticket contains a part of its token.
        /// Method: cut, repeat and replace parts of a valid ticket, mainly separators and the scheme.
        #[test]
        fn no_error_shows_a_token(
            from in 0_usize..200, to in 0_usize..200, repeated in any::<bool>(),
            replacements in proptest::collection::vec(("[/?&=:,]", "[/?&=:,. é]"), 0..4),
            scheme in "relay://|relay:/|http://|unix:|", is_socket in any::<bool>(),
        ) {
            let token = "AQAAAAFvT3Bk9xqYw-LrZ0c8bN2mH_sJd7uVeXiPg5tKaWfQyR1C4";
            let ticket = match is_socket {
                true => format!("unix:/run/host.sock?topic=policy&server_uid=7&token={token}"),
                false => format!("relay://10.0.0.5:4747/policy?key=sha256:{}&token={token}", "9f".repeat(32)),
            };
            let (from, to) = (from.min(to).min(ticket.len()), to.max(from).min(ticket.len()));
            let mut text = match repeated {
                true => format!("{}{}", &ticket[..to], &ticket[from..]),
                false => format!("{}{}", &ticket[..from], &ticket[to..]),
            };
            for (old, new) in &replacements {
                text = text.replace(old.as_str(), new);
            }
            let schemeless = text.split_once("//").map_or(&*text, |(_, rest)| rest).to_owned();
            for text in [text, format!("{scheme}{schemeless}")] {
                if let Err(error) = text.parse::<Ticket>() {
                    let message = format!("{error} {error:?}");
                    for at in 0..=token.len() - 12 {
                        prop_assert!(!message.contains(&token[at..at + 12]), "{text}: {message}");
                    }
                }
            }
        }

        #[test]
        fn any_path_of_a_socket_returns(path in "[^\\x00]{1,26}") {
            let ticket = Ticket::new(vec![format!("unix:{path}")], vec![], None).unwrap();
            prop_assert_eq!(ticket.socket(), Some(Path::new(&path)));
            prop_assert!(ticket.to_string().bytes().all(|byte| byte.is_ascii_graphic()));
            prop_assert_eq!(ticket.to_string().parse::<Ticket>(), Ok(ticket));
        }

        #[test]
        fn keys_of_any_characters_are_survived(key in ".{64}") {
            let _ = format!("relay://a:1/t?key=sha256:{key}").parse::<Ticket>();
        }
    }
}
