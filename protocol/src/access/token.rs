//! The token of a ticket: its holder's rights, authenticated with a MAC by the server.

use super::{Grant, Verbs};
use crate::{Glob, message::Field};
use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD as BASE64};
use prost::Message;
use std::{fmt, str::FromStr};

/// The format byte: the first byte of every token.
const FORMAT: u8 = 1;

/// The MAC's domain separator, so that a MAC made for another purpose is never accepted here.
const CONTEXT: &[u8] = b"tensor-relay ticket 1\0";

const SECRET_ID_BYTES: usize = 4;
const SEAL_BYTES: usize = 32;
const CLAIMS_OFFSET: usize = 1 + SECRET_ID_BYTES + SEAL_BYTES;

/// The most grants in a token.
const GRANTS_MAX: usize = 64;

/// The length of the shortest run of token characters that errors hide. A shorter run reveals at most 66 of a token's
/// 256 MAC bits.
const HIDDEN_MIN_CHARS: usize = 12;

/// How tokens begin: [`FORMAT`], and the first half of the secret's id, which counts from 1.
const TOKEN_START: &str = "AQAA";

/// The length of the shortest run that may be a whole token: the format, the secret's id and the MAC take more.
const TOKEN_MIN_CHARS: usize = 48;

/// The maximum length of a holder's name.
const HOLDER_MAX_BYTES: usize = 255;

/// The id of a ticket in lists, logs and revocations. It reveals nothing about the token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TicketId(pub [u8; 8]);

impl TicketId {
    /// The id that is derived from `text` by a hash, for a ticket that a server makes again at each start.
    pub fn derived(text: &str) -> Self {
        let mut id = [0; 8];
        id.copy_from_slice(&blake3::hash(text.as_bytes()).as_bytes()[..8]);
        Self(id)
    }
}

impl fmt::Display for TicketId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for TicketId {
    type Err = TokenError;

    fn from_str(text: &str) -> Result<Self, TokenError> {
        Ok(Self(from_hex(text).ok_or(TokenError::Malformed)?))
    }
}

/// The id of a server's secret. Several secrets may be valid at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SecretId(pub u32);

/// The key with which a server authenticates tokens. Anyone who has the key can make tickets, so it never leaves the
/// server.
///
/// In text, as in the file that stores it: the id in 8 hexadecimal digits, a space, and the key in 64.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret {
    id: SecretId,
    key: [u8; 32],
}

impl Secret {
    /// A secret of random bytes.
    pub fn new(id: SecretId, key: [u8; 32]) -> Self {
        Self { id, key }
    }

    /// The secret's id.
    pub fn id(&self) -> SecretId {
        self.id
    }

    /// The secret as one line of text, for storage.
    pub fn to_line(&self) -> String {
        let mut line = format!("{:08x} ", self.id.0);
        self.key.iter().for_each(|byte| line.push_str(&format!("{byte:02x}")));
        line
    }

    /// Parses a line written by [`to_line`](Self::to_line).
    ///
    /// # Errors
    /// [`SecretError`] when the line is not a secret.
    pub fn from_line(line: &str) -> Result<Self, SecretError> {
        let (id, key) = line.trim().split_once(' ').ok_or(SecretError)?;
        let id: [u8; 4] = from_hex(id).ok_or(SecretError)?;
        Ok(Self { id: SecretId(u32::from_be_bytes(id)), key: from_hex(key).ok_or(SecretError)? })
    }

    /// Seals `claims` with a MAC. The same secret and claims always result in the same token.
    pub fn seal(&self, claims: &Claims) -> Token {
        let claims = claims.to_wire().encode_to_vec();
        let mut bytes = vec![FORMAT];
        bytes.extend_from_slice(&self.id.0.to_be_bytes());
        bytes.extend_from_slice(self.mac(&claims).as_bytes());
        bytes.extend_from_slice(&claims);
        Token(BASE64.encode(bytes))
    }

    /// The MAC of encoded claims: BLAKE3's keyed mode (its specification, §6.2).
    fn mac(&self, claims: &[u8]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(CONTEXT).update(&self.id.0.to_be_bytes()).update(claims);
        hasher.finalize()
    }
}

impl fmt::Debug for Secret {
    /// Shows the id, never the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Secret({:08x})", self.id.0)
    }
}

/// A line that is not a valid secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("it is not 8 hexadecimal digits, a space, and 64 more")]
pub struct SecretError;

/// The contents of a token: ticket id, holder, expiry and grants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claims {
    /// The ticket's id.
    pub id: TicketId,
    /// The holder's name, as given when the ticket was made. At most 255 bytes.
    pub holder: String,
    /// The expiry time, in seconds since 1970; `None` if the ticket never expires.
    pub expires_s: Option<u64>,
    /// The grants, at most 64.
    pub grants: Vec<Grant>,
}

impl Claims {
    /// Whether the ticket has expired at `now_s`, in seconds since 1970.
    pub fn is_expired(&self, now_s: u64) -> bool {
        self.expires_s.is_some_and(|expires_s| now_s >= expires_s)
    }

    fn to_wire(&self) -> wire::Claims {
        let grant = |grant: &Grant| wire::Grant {
            topics: grant.topics.as_str().to_owned(),
            verbs: grant.verbs.bits(),
        };
        wire::Claims {
            id: u64::from_be_bytes(self.id.0),
            holder: self.holder.clone(),
            expires_s: self.expires_s,
            grants: self.grants.iter().map(grant).collect(),
        }
    }

    fn from_wire(claims: wire::Claims) -> Option<Self> {
        if claims.grants.len() > GRANTS_MAX || claims.holder.len() > HOLDER_MAX_BYTES {
            return None;
        }
        let grant = |grant: wire::Grant| {
            let topics = Glob::new(&grant.topics).ok()?;
            Some(Grant { topics, verbs: Verbs::from_bits(grant.verbs) })
        };
        Some(Self {
            id: TicketId(claims.id.to_be_bytes()),
            holder: claims.holder,
            expires_s: claims.expires_s,
            grants: claims.grants.into_iter().map(grant).collect::<Option<_>>()?,
        })
    }
}

/// A ticket's proof of access: text that only a holder of the server's secret can make.
///
/// A token is confidential: `Debug` hides it, and [`as_str`](Self::as_str) is only for the ticket and the wire.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// The maximum length of a token as text. A usual token has about 120 bytes; one with 64 long globs is too long.
    pub const BYTES_MAX: usize = 4 << 10;

    /// Parses the text of a token, issued by any server.
    ///
    /// # Errors
    /// [`TokenError::Malformed`] when it is empty, too long, or has a character outside the alphabet.
    pub fn new(text: &str) -> Result<Self, TokenError> {
        match (1..=Self::BYTES_MAX).contains(&text.len()) && text.bytes().all(is_token_byte) {
            true => Ok(Self(text.into())),
            false => Err(TokenError::Malformed),
        }
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// `text` for an error or a log: each run of twelve or more token characters, which may be a part of a token,
    /// becomes `(hidden)`. Keys and long names are hidden as well; that harms less than a token in a log.
    pub fn hide(text: &str) -> String {
        hide_runs(text, |_, run| run.len() >= HIDDEN_MIN_CHARS)
    }

    /// `text` of any error, whose input may have been a ticket in the wrong place, also percent-encoded or joined to
    /// other text: what contains a token becomes `(hidden)`. Names, paths and keys stay readable.
    pub fn redact(text: &str) -> String {
        hide_runs(text, |before, run| {
            let name = before.trim_end_matches(|c: char| matches!(c, '=' | '%') || c.is_whitespace());
            let is_parameter = name.ends_with("token") && before[name.len()..].contains(['=', '%']);
            let token_at = run.find(TOKEN_START);
            is_parameter && run.len() >= HIDDEN_MIN_CHARS
                || token_at.is_some_and(|at| run.len() - at >= TOKEN_MIN_CHARS)
        })
    }

    /// The claims, if one of `secrets` sealed them. The MAC is compared in constant time, before the claims are parsed.
    ///
    /// # Errors
    /// [`TokenError`] when the token is malformed or verification fails. The reason is for the log and must not be sent
    /// to the peer.
    pub fn open(&self, secrets: &[Secret]) -> Result<Claims, TokenError> {
        let bytes = BASE64.decode(&self.0).map_err(|_| TokenError::Malformed)?;
        let (head, claims) = bytes.split_at_checked(CLAIMS_OFFSET).ok_or(TokenError::Malformed)?;
        let (&format, rest) = head.split_first().ok_or(TokenError::Malformed)?;
        if format != FORMAT {
            return Err(TokenError::Malformed);
        }
        let (id, seal) = rest.split_first_chunk::<SECRET_ID_BYTES>().ok_or(TokenError::Malformed)?;
        let seal: [u8; SEAL_BYTES] = seal.try_into().map_err(|_| TokenError::Malformed)?;
        let id = SecretId(u32::from_be_bytes(*id));
        let secret = secrets.iter().find(|secret| secret.id == id).ok_or(TokenError::UnknownSecret)?;
        if secret.mac(claims) != blake3::Hash::from_bytes(seal) {
            return Err(TokenError::Forged);
        }
        parse_claims(claims)
    }

    /// The claims without verification, for display to the holder. Never use them for a decision.
    ///
    /// # Errors
    /// [`TokenError::Malformed`] when the token is not of this format.
    pub fn decode_unverified(&self) -> Result<Claims, TokenError> {
        let bytes = BASE64.decode(&self.0).map_err(|_| TokenError::Malformed)?;
        let (head, claims) = bytes.split_at_checked(CLAIMS_OFFSET).ok_or(TokenError::Malformed)?;
        match head.first() {
            Some(&FORMAT) => parse_claims(claims),
            _ => Err(TokenError::Malformed),
        }
    }
}

/// `text` with `(hidden)` for each run of token characters that `is_hidden`, given the text before it.
fn hide_runs(text: &str, is_hidden: impl Fn(&str, &str) -> bool) -> String {
    let (mut shown, mut start) = (String::new(), 0);
    while start < text.len() {
        let (before, rest) = text.split_at(start);
        let run = rest.bytes().take_while(|byte| is_token_byte(*byte)).count();
        shown.push_str(if is_hidden(before, &rest[..run]) { "(hidden)" } else { &rest[..run] });
        let next_run = rest[run..].find(|c: char| u8::try_from(c).is_ok_and(is_token_byte));
        let next = next_run.map_or(rest.len(), |distance| run + distance);
        shown.push_str(&rest[run..next]);
        start += next;
    }
    shown
}

fn is_token_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_')
}

fn parse_claims(claims: &[u8]) -> Result<Claims, TokenError> {
    let claims = wire::Claims::decode(claims).map_err(|_| TokenError::Malformed)?;
    Claims::from_wire(claims).ok_or(TokenError::Malformed)
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(hidden)")
    }
}

impl Field for Token {
    type Wire = String;

    fn into_wire(self) -> String {
        self.0
    }

    fn from_wire(_: &'static str, wire: String) -> Result<Self, crate::MessageError> {
        Self::new(&wire).map_err(|error| crate::MessageError::Malformed(error.to_string()))
    }
}

/// Why a token was rejected. For the server's log; the client learns only that access was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TokenError {
    /// The text does not have the format of a token.
    #[error("the token is malformed: was the ticket cut off?")]
    Malformed,
    /// Sealed with a secret that is not valid here: another server's, or one that was rotated out.
    #[error("the token was made with another secret: by another server, or before the secret was rotated")]
    UnknownSecret,
    /// The MAC is wrong.
    #[error("the token's MAC is wrong: it was changed, or made without the server's secret")]
    Forged,
}

fn from_hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digits = text.as_bytes();
    if digits.len() != 2 * N || !digits.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    let mut bytes = [0; N];
    for (index, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[index * 2..index * 2 + 2], 16).ok()?;
    }
    Some(bytes)
}

/// The claims as protobuf (PROTOCOL.md §2.1). A server accepts only claims that it sealed itself, so other
/// implementations may have another format.
mod wire {
    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Claims {
        #[prost(fixed64, tag = "1")]
        pub(super) id: u64,
        #[prost(string, tag = "2")]
        pub(super) holder: String,
        #[prost(uint64, optional, tag = "3")]
        pub(super) expires_s: Option<u64>,
        #[prost(message, repeated, tag = "4")]
        pub(super) grants: Vec<Grant>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Grant {
        #[prost(string, tag = "1")]
        pub(super) topics: String,
        #[prost(uint32, tag = "2")]
        pub(super) verbs: u32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn secret(id: u32) -> Secret {
        Secret::new(SecretId(id), [id as u8; 32])
    }

    fn claims() -> Claims {
        Claims {
            id: TicketId(*b"12345678"),
            holder: "inference in Paris".into(),
            expires_s: Some(1_800_000_000),
            grants: vec![Grant { topics: Glob::new("policy/**").unwrap(), verbs: Verbs::CONSUME }],
        }
    }

    #[test]
    fn tokens_beyond_the_limits_do_not_open() {
        let with = |grants: usize, holder_bytes: usize| {
            let grants = vec![claims().grants[0].clone(); grants];
            secret(1).seal(&Claims { grants, holder: "h".repeat(holder_bytes), ..claims() })
        };
        let opens = |token: Token| token.open(&[secret(1)]).is_ok();
        assert!(opens(with(GRANTS_MAX, HOLDER_MAX_BYTES)));
        assert!(!opens(with(GRANTS_MAX + 1, 1)) && !opens(with(1, HOLDER_MAX_BYTES + 1)));
    }

    #[test]
    fn a_token_is_opened_only_by_the_secret_that_sealed_it() {
        let token = secret(1).seal(&claims());
        assert_eq!(token, secret(1).seal(&claims()), "sealing is deterministic");
        assert_eq!(token.open(&[secret(2), secret(1)]), Ok(claims()));
        assert_eq!(token.open(&[secret(2)]), Err(TokenError::UnknownSecret));
        let namesake = Secret::new(SecretId(1), [9; 32]);
        assert_eq!(token.open(&[namesake]), Err(TokenError::Forged));
        assert_eq!(token.decode_unverified(), Ok(claims()));
        assert_eq!(Token::new(token.as_str()), Ok(token));
    }

    /// Goal: tickets stay valid after an update of the server.
    /// Method: a stored token, made by other implementations of BLAKE3 and protobuf. Its MAC covers the secret's id.
    #[test]
    fn tokens_of_earlier_builds_are_valid() {
        let earlier = "AQAAAAFTuVkDSSRSZgEHGyANZKB71Qp93W3sU9ifPgZ0ogYgVAk4NzY1NDMyMRISaW5mZXJlbmNlIGluIFBhcmlzGICkp9oG\
                       Ig0KCXBvbGljeS8qKhAD";
        assert_eq!(Token::new(earlier).unwrap().open(&[secret(1)]), Ok(claims()));
        assert_eq!(secret(1).seal(&claims()).as_str(), earlier);
    }

    #[test]
    fn claims_expire_at_their_time() {
        assert!(!claims().is_expired(1_799_999_999) && claims().is_expired(1_800_000_000));
        assert!(!Claims { expires_s: None, ..claims() }.is_expired(u64::MAX));
    }

    #[test]
    fn a_secret_is_parsed_as_stored_and_hidden_by_debug() {
        let line = secret(0xab).to_line();
        assert_eq!(Secret::from_line(&line), Ok(secret(0xab)));
        assert_eq!(format!("{:?}", secret(0xab)), "Secret(000000ab)");
        assert_eq!(format!("{:?}", secret(1).seal(&claims())), "Token(hidden)");
        for broken in ["", "1 2", &line[1..], &line[..72], &line.replace(' ', "  ")] {
            assert_eq!(Secret::from_line(broken), Err(SecretError), "{broken}");
        }
    }

    #[test]
    fn a_ticket_id_is_parsed_as_displayed() {
        let id = TicketId::derived("serve policy");
        assert_eq!(id.to_string().parse(), Ok(id));
        assert_ne!(id, TicketId::derived("serve other"));
    }

    #[test]
    fn long_runs_of_token_characters_are_hidden() {
        for (text, shown) in [
            ("", ""),
            ("/srv/a.ticket: né", "/srv/a.ticket: né"),
            ("abcdefghijk.abcdefghijkl", "abcdefghijk.(hidden)"),
            ("é12345678901-&_", "é(hidden)&_"),
        ] {
            assert_eq!(Token::hide(text), shown);
        }
    }

    #[test]
    fn tokens_in_other_texts_are_redacted() {
        let token = secret(1).seal(&claims());
        let (ticket, key) =
            (format!("relay://a:1/t?key=sha256:{0}&token={1}", "ab".repeat(32), token.as_str()), "ab");
        let encoded = ticket.replace('&', "%26").replace('=', "%3D");
        for text in [
            ticket.clone(),
            token.as_str().to_owned(),
            ticket[..ticket.len() - 20].to_owned(),
            encoded.replace('%', "%25"),
            encoded[..encoded.find("AQAA").unwrap() + 20].to_owned(),
            encoded,
            format!("x{}", token.as_str()),
            ticket.replace("token=", "token=%20"),
            ticket.replace("token=", "token= "),
        ] {
            let redacted = Token::redact(&format!("error: unexpected argument '{text}' found"));
            assert!(
                !redacted.contains(&token.as_str()[5..17]) && redacted.contains("(hidden)"),
                "{redacted}"
            );
            assert!(!text.starts_with("relay") || redacted.contains(&key.repeat(32)), "{redacted}");
        }
        let plain =
            "cannot read /srv/Meta-Llama-3-70B-Instruct-FP8-dynamic-Quantized-w8a8-v1/model-00001-of-00030";
        assert_eq!(Token::redact(plain), plain);
    }

    proptest! {
        /// A token with a flipped bit or a missing end is rejected.
        #[test]
        fn a_changed_token_does_not_open(at in 0_usize..1_000, bit in 0_u8..8, cut in proptest::bool::ANY) {
            let token = secret(1).seal(&claims());
            let mut bytes = BASE64.decode(token.as_str()).unwrap();
            let at = at % bytes.len();
            match cut {
                true => bytes.truncate(at),
                false => bytes[at] ^= 1 << bit,
            }
            let opened = Token(BASE64.encode(bytes)).open(&[secret(1)]);
            prop_assert!(opened.is_err());
        }

        #[test]
        fn arbitrary_text_does_not_panic(text in ".{0,200}") {
            if let Ok(token) = Token::new(&text) {
                prop_assert!(token.open(&[secret(1)]).is_err());
            }
        }

        /// Any bytes under a valid MAC decode without a panic.
        #[test]
        fn sealed_garbage_is_survived(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut sealed = vec![FORMAT];
            sealed.extend_from_slice(&1_u32.to_be_bytes());
            sealed.extend_from_slice(secret(1).mac(&bytes).as_bytes());
            sealed.extend_from_slice(&bytes);
            let _ = Token(BASE64.encode(sealed)).open(&[secret(1)]);
        }
    }
}
