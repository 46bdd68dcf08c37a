//! The ticket: one string that lets a consumer connect (PROTOCOL.md §2).

use crate::{NameError, Token, TokenError, Topic};
use std::{fmt, str::FromStr};

/// The addresses, public keys, topic and token with which a consumer connects to a server.
///
/// `relay://10.0.0.5:4747/policy?key=sha256:9f86…` in text. Several addresses are separated by commas and tried side by
/// side; several keys are accepted while a server's key rotates. The key is the SHA-256 of the server's public key
/// (its SubjectPublicKeyInfo), so that a ticket needs no certificate authority and cannot be answered by anyone else.
///
/// With a `token`, the ticket gives access, so it is a secret: `Debug` hides the token, as [`redacted`](Self::redacted)
/// does; `Display` is the whole ticket, to be handed on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ticket {
    addresses: Vec<String>,
    keys: Vec<[u8; 32]>,
    topic: Option<Topic>,
    token: Option<Token>,
}

impl Ticket {
    /// Makes a ticket.
    ///
    /// # Errors
    /// [`TicketError`] when there is no address or no key, or an address is not `host:port`.
    pub fn new(
        addresses: Vec<String>,
        keys: Vec<[u8; 32]>,
        topic: Option<Topic>,
    ) -> Result<Self, TicketError> {
        if addresses.is_empty() {
            return Err(TicketError::NoAddress);
        }
        if keys.is_empty() {
            return Err(TicketError::NoKey);
        }
        for address in &addresses {
            check_address(address)?;
        }
        Ok(Self { addresses, keys, topic, token: None })
    }

    /// The server's addresses as `host:port`; a numeric IPv6 host is in brackets.
    pub fn addresses(&self) -> &[String] {
        &self.addresses
    }

    /// The SHA-256 of each public key that the server may have.
    pub fn keys(&self) -> &[[u8; 32]] {
        &self.keys
    }

    /// The topic, if the ticket names one.
    pub fn topic(&self) -> Option<&Topic> {
        self.topic.as_ref()
    }

    /// The token that gives access; `None` for a server without access control.
    pub fn token(&self) -> Option<&Token> {
        self.token.as_ref()
    }

    /// The same ticket with this token.
    #[must_use]
    pub fn with_token(self, token: Token) -> Self {
        Self { token: Some(token), ..self }
    }

    /// The ticket as text without its token: for logs, and for readers who must not get access.
    pub fn redacted(&self) -> String {
        Self { token: None, ..self.clone() }.to_string()
            + self.token.as_ref().map_or("", |_| "&token=(hidden)")
    }

    /// The same ticket for another topic of the same server.
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
    /// Not a ticket at all.
    #[error("a ticket begins with `relay://`; copy the whole line that `tensor-relay serve` printed")]
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
    /// A topic that is none.
    #[error("the ticket's topic {name:?} is none: {why}")]
    BadTopic {
        /// The found text.
        name: String,
        /// The reason.
        why: &'static str,
    },
    /// A token that is none.
    #[error("the ticket's token is none: {0}")]
    BadToken(#[from] TokenError),
    /// More than one token.
    #[error("the ticket has two tokens: were two tickets run together?")]
    TwoTokens,
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
        write!(f, "{SCHEME}{}", self.addresses.join(","))?;
        if let Some(topic) = &self.topic {
            write!(f, "/{topic}")?;
        }
        for (index, key) in self.keys.iter().enumerate() {
            write!(f, "{}key={KEY_PREFIX}", if index == 0 { '?' } else { '&' })?;
            key.iter().try_for_each(|b| write!(f, "{b:02x}"))?;
        }
        match &self.token {
            Some(token) => write!(f, "&token={}", token.as_str()),
            None => Ok(()),
        }
    }
}

impl FromStr for Ticket {
    type Err = TicketError;

    fn from_str(text: &str) -> Result<Self, TicketError> {
        let rest = text.trim().strip_prefix(SCHEME).ok_or(TicketError::NotATicket)?;
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (hosts, topic) = place.split_once('/').unwrap_or((place, ""));
        let addresses = hosts.split(',').filter(|a| !a.is_empty()).map(Into::into).collect();
        let (mut keys, mut token) = (vec![], None);
        for part in query.split('&').filter(|part| !part.is_empty()) {
            match part.split_once('=') {
                Some(("key", key)) => keys.push(parse_key(key)?),
                Some(("token", text)) if token.is_none() => token = Some(Token::new(text)?),
                Some(("token", _)) => return Err(TicketError::TwoTokens),
                // The name alone: what follows may be a secret.
                _ => {
                    let name = part.split('=').next().unwrap_or(part);
                    return Err(TicketError::UnknownPart(Token::hide(name)));
                }
            }
        }
        let topic = if topic.is_empty() { None } else { Some(parse_topic(topic)?) };
        Ok(Self { token, ..Self::new(addresses, keys, topic)? })
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

/// `host:port`, where host is a name, an IPv4 address or an IPv6 address in brackets.
pub(crate) fn check_address(address: &str) -> Result<(), TicketError> {
    let bad = || TicketError::BadAddress(Token::hide(address));
    let (host, port) = address.rsplit_once(':').ok_or_else(bad)?;
    let bracketed = host.starts_with('[') && host.ends_with(']');
    let host_chars = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    let good_host = match bracketed {
        true => host[1..host.len() - 1].parse::<std::net::Ipv6Addr>().is_ok(),
        false => !host.is_empty() && host.chars().all(host_chars),
    };
    let digits = port.bytes().all(|b| b.is_ascii_digit());
    let good_port = digits && port.parse::<u16>().is_ok_and(|p| p != 0);
    if good_host && good_port { Ok(()) } else { Err(bad()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_ticket_reads_as_documented() {
        let text = format!("relay://10.0.0.5:4747,[fe80::1]:4747/kv/req-17?key=sha256:{}", "9f".repeat(32));
        let ticket: Ticket = text.parse().unwrap();
        assert_eq!(ticket.addresses(), ["10.0.0.5:4747", "[fe80::1]:4747"]);
        assert_eq!(ticket.keys(), [[0x9f; 32]]);
        assert_eq!(ticket.topic().unwrap().as_str(), "kv/req-17");
        assert_eq!(ticket.to_string(), text);
    }

    #[test]
    fn a_token_is_shown_only_where_the_ticket_is_handed_on() {
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
    fn what_is_no_ticket() {
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
        ] {
            assert_eq!(text.parse::<Ticket>(), Err(error), "{text}");
        }
        assert!(matches!(
            format!("relay://a:1/../x?{key}").parse::<Ticket>(),
            Err(TicketError::BadTopic { .. })
        ));
    }

    proptest! {
        #[test]
        fn any_text_is_survived(text in "(relay://)?[ -~äé]{0,80}") {
            if let Ok(ticket) = text.parse::<Ticket>() {
                prop_assert_eq!(ticket.to_string().parse::<Ticket>(), Ok(ticket));
            }
        }

        /// Goal: whatever becomes of a ticket while it is copied, the error that says so does not show its token.
        /// Method: cut, repeat and replace parts of a whole ticket, separators and scheme above all.
        #[test]
        fn no_error_shows_a_token(
            from in 0_usize..200, to in 0_usize..200, repeated in any::<bool>(),
            swapped in proptest::collection::vec(("[/?&=:,]", "[/?&=:,. é]"), 0..4),
            scheme in "relay://|relay:/|http://|",
        ) {
            let token = "AQAAAAFvT3Bk9xqYw-LrZ0c8bN2mH_sJd7uVeXiPg5tKaWfQyR1C4";
            let whole = format!("relay://10.0.0.5:4747/policy?key=sha256:{}&token={token}", "9f".repeat(32));
            let (from, to) = (from.min(to).min(whole.len()), to.max(from).min(whole.len()));
            let mut text = match repeated {
                true => format!("{}{}", &whole[..to], &whole[from..]),
                false => format!("{}{}", &whole[..from], &whole[to..]),
            };
            for (found, other) in &swapped {
                text = text.replace(found.as_str(), other);
            }
            let bare = text.split_once("//").map_or(&*text, |(_, bare)| bare).to_owned();
            for text in [text, format!("{scheme}{bare}")] {
                if let Err(error) = text.parse::<Ticket>() {
                    let told = format!("{error} {error:?}");
                    for at in 0..=token.len() - 12 {
                        prop_assert!(!told.contains(&token[at..at + 12]), "{text}: {told}");
                    }
                }
            }
        }

        #[test]
        fn keys_of_odd_characters_are_survived(key in ".{64}") {
            let _ = format!("relay://a:1/t?key=sha256:{key}").parse::<Ticket>();
        }
    }
}
