//! Every kind of credential, with its expected rights. The rights are written by hand from docs/access.md,
//! independently of the server's code.

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::{cell::Cell, time::Duration};
use tensor_relay_protocol::{Claims, CloseCode, Glob, Grant, Secret, SecretId, TicketId, Token, Verb, Verbs};
use tensor_relay_server::{Fingerprint, Rules};
use tensor_relay_tests::pair::key_pair;
use tensor_relay_transport::{ClientAuthorities, ClientCertificate};

/// The server's time at the start of a scenario.
pub(super) const START_S: u64 = 2_000_000_000;

thread_local! {
    static NOW_S: Cell<u64> = const { Cell::new(START_S) };
}

/// The server's clock.
pub(super) fn clock() -> u64 {
    NOW_S.get()
}

pub(super) fn set_clock(now_s: u64) {
    NOW_S.set(now_s);
}

/// A client's TLS certificate and key.
pub(super) struct ClientIdentity {
    pub(super) chain: Vec<CertificateDer<'static>>,
    pub(super) key: PrivateKeyDer<'static>,
}

/// A client's credential: a token, a certificate, both or neither.
pub(super) struct Credential {
    pub(super) name: &'static str,
    pub(super) token: Option<Token>,
    pub(super) certificate: Option<ClientIdentity>,
    pub(super) rights: Rights,
}

/// The rights that a credential grants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rights {
    /// TLS fails.
    NoHandshake,
    /// Its `Hello` is answered with this close code and nothing else.
    Nothing(CloseCode),
    /// A session that lists topics with one of the prefixes `lists`, and receives topics with one of the prefixes
    /// `receives`.
    Session { lists: &'static [&'static str], receives: &'static [&'static str] },
}

const REFUSED: Rights = Rights::Nothing(CloseCode::Unauthorised);
const NO_RIGHTS: Rights = Rights::Session { lists: &[], receives: &[] };
const MINE: Rights = Rights::Session { lists: &["mine/"], receives: &["mine/"] };
const ALL: Rights = Rights::Session { lists: &[""], receives: &[""] };

/// The seeds of keys: of clients, and of the trusted and another certificate authority.
pub(super) const TRUSTED: u64 = 101;
pub(super) const UNLISTED: u64 = 102;
const REVOKED: u64 = 103;
const UNKNOWN: u64 = 104;
const CERTIFIED: u64 = 105;
const OURS: u64 = 106;
pub(super) const THEIRS: u64 = 107;

/// The rules of the server. `uid:` lines apply to its publish socket only.
pub(super) fn rules() -> Rules {
    let acl =
        "key:trusted list,subscribe mine/*\ndns:reader.example list,subscribe mine/*\nuid:0 publish **\n";
    Rules {
        secrets: vec![secret(1, 7), secret(2, 6)],
        revoked: [TicketId([5; 8])].into(),
        keys: [(fingerprint(TRUSTED), "trusted".into()), (fingerprint(UNLISTED), "unlisted".into())].into(),
        revoked_keys: [fingerprint(REVOKED)].into(),
        authorities: authorities(OURS),
        acl: acl.parse().unwrap(),
        ..Rules::default()
    }
}

pub(super) fn authorities(seed: u64) -> ClientAuthorities {
    ClientAuthorities::from_pem(&authority(seed).pem()).unwrap()
}

pub(super) fn secret(id: u32, byte: u8) -> Secret {
    Secret::new(SecretId(id), [byte; 32])
}

pub(super) fn fingerprint(seed: u64) -> Fingerprint {
    ClientCertificate::new(&key(seed).chain).unwrap().key()
}

pub(super) fn all() -> Vec<Credential> {
    let mut all = tokens();
    all.extend(changed_tokens());
    all.extend(keys());
    all.extend(certificates());
    all
}

fn tokens() -> Vec<Credential> {
    let good = claims(9, vec![grant("**", Verbs::CONSUME)]);
    let expiring_at = |expires_s| Claims { expires_s: Some(expires_s), ..good.clone() };
    let token_for =
        |topics: &str, verbs: &[Verb]| sealed(claims(4, vec![grant(topics, Verbs::of(verbs.to_vec()))]));
    let both = [Verb::List, Verb::Subscribe];
    let lists_mine = Rights::Session { lists: &["mine/"], receives: &[] };
    let receives_mine = Rights::Session { lists: &[], receives: &["mine/"] };
    let two = vec![grant("mine/*", Verbs::of([Verb::List])), grant("other/*", Verbs::of([Verb::Subscribe]))];
    let lists_mine_receives_other = Rights::Session { lists: &["mine/"], receives: &["other/"] };
    let case = |name, token, rights| Credential { name, token: Some(token), certificate: None, rights };
    vec![
        Credential { name: "nothing", token: None, certificate: None, rights: REFUSED },
        case("the right token", sealed(good.clone()), ALL),
        case("a token of the previous secret", secret(2, 6).seal(&good), ALL),
        case("a token of an older secret", secret(3, 5).seal(&good), REFUSED),
        case("a token of another server", secret(1, 8).seal(&good), REFUSED),
        case("a token sealed with the right key under another secret id", secret(3, 7).seal(&good), REFUSED),
        case("a token that expired long ago", sealed(expiring_at(1)), REFUSED),
        case("a token that expires now", sealed(expiring_at(START_S)), REFUSED),
        case("a token that expires in an hour", sealed(expiring_at(START_S + 3600)), ALL),
        case("a revoked token", sealed(claims(5, good.grants.clone())), REFUSED),
        case(
            "a revoked token that expired",
            sealed(Claims { id: TicketId([5; 8]), ..expiring_at(1) }),
            REFUSED,
        ),
        case("a narrow token", token_for("mine/*", &both), MINE),
        case("a token of one verb: list", token_for("mine/*", &[Verb::List]), lists_mine),
        case("a token of one verb: subscribe", token_for("mine/*", &[Verb::Subscribe]), receives_mine),
        case("a token of two grants", sealed(claims(4, two)), lists_mine_receives_other),
        case("a token to publish", token_for("**", &[Verb::Publish]), NO_RIGHTS),
        case("a token of no grants", sealed(claims(4, vec![])), NO_RIGHTS),
        case("a token of another topic", token_for("wrong/*", &both), NO_RIGHTS),
        case("a token of a prefix of a topic", token_for("min", &both), NO_RIGHTS),
    ]
}

/// Tokens with one character changed, one for each part; truncated tokens, and longer ones.
fn changed_tokens() -> Vec<Credential> {
    let good = sealed(claims(9, vec![grant("**", Verbs::CONSUME)]));
    let text = good.as_str();
    // The text is base64: 4 characters are 3 bytes. A format byte, 4 bytes of secret id, 32 bytes of seal, then the
    // claims.
    let parts = [
        ("a token with its format changed", 0),
        ("a token with its secret id changed", 4),
        ("a token with the seal's beginning changed", 8),
        ("a token with the seal's middle changed", 28),
        ("a token with the seal's end changed", 47),
        ("a token with its claims' beginning changed", 52),
        ("a token with its claims' end changed", text.len() - 3),
    ];
    let changed = parts.map(|(name, at)| {
        let mut changed = text.to_owned();
        let other = if &text[at..=at] == "E" { "I" } else { "E" };
        changed.replace_range(at..=at, other);
        (name, changed)
    });
    let truncated = [
        ("a token truncated after its seal", text[..50].to_owned()),
        ("a token truncated in its claims", text[..60].to_owned()),
        ("a token of one character", "A".to_owned()),
        ("a token with trailing bytes", format!("{text}AAAA")),
        ("a token of the maximum length", "A".repeat(Token::BYTES_MAX)),
    ];
    let refused = |(name, text): (_, String)| {
        let token = Some(Token::new(&text).unwrap());
        Credential { name, token, certificate: None, rights: REFUSED }
    };
    changed.into_iter().chain(truncated).map(refused).collect()
}

fn keys() -> Vec<Credential> {
    let good = || Some(sealed(claims(9, vec![grant("**", Verbs::CONSUME)])));
    let bad = || Some(secret(1, 8).seal(&claims(9, vec![grant("**", Verbs::CONSUME)])));
    let case = |name, seed, token, rights| Credential { name, token, certificate: Some(key(seed)), rights };
    let without_its_key = ClientIdentity { chain: key(TRUSTED).chain, key: key(UNKNOWN).key };
    vec![
        case("a trusted key", TRUSTED, None, MINE),
        case("a trusted key with a wider token", TRUSTED, good(), MINE),
        case("a trusted key with a bad token", TRUSTED, bad(), MINE),
        case("a trusted key that the list does not name", UNLISTED, None, NO_RIGHTS),
        case("a revoked key", REVOKED, None, REFUSED),
        case("a revoked key with a good token", REVOKED, good(), REFUSED),
        case("an unknown key", UNKNOWN, None, REFUSED),
        case("an unknown key with a good token", UNKNOWN, good(), ALL),
        case("an unknown key with a bad token", UNKNOWN, bad(), REFUSED),
        Credential {
            name: "the certificate of a trusted key without that key",
            token: good(),
            certificate: Some(without_its_key),
            rights: Rights::NoHandshake,
        },
    ]
}

fn certificates() -> Vec<Credential> {
    let reader = || certificate(OURS, CERTIFIED, |_| {});
    let day = Duration::from_secs(86_400);
    let now = rcgen::date_time_ymd(1970, 1, 1) + Duration::from_secs(START_S);
    let without_its_key = ClientIdentity { key: key(UNKNOWN).key, ..reader() };
    let self_signed = ClientIdentity {
        chain: vec![self_signed_certificate(CERTIFIED, "reader.example")],
        ..key(CERTIFIED)
    };
    let case = |name, identity, rights| Credential { name, token: None, certificate: Some(identity), rights };
    vec![
        case("the right certificate", reader(), MINE),
        case("a certificate of another authority", certificate(THEIRS, CERTIFIED, |_| {}), REFUSED),
        case("a self-signed certificate", self_signed, REFUSED),
        case("a certificate with a revoked key", certificate(OURS, REVOKED, |_| {}), REFUSED),
        case(
            "a certificate that expired",
            certificate(OURS, CERTIFIED, |params| params.not_after = now - day),
            REFUSED,
        ),
        case(
            "a certificate that is not yet valid",
            certificate(OURS, CERTIFIED, |params| params.not_before = now + day),
            REFUSED,
        ),
        case(
            "a certificate of a server",
            certificate(OURS, CERTIFIED, |params| {
                params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
            }),
            REFUSED,
        ),
        case(
            "a certificate with another name",
            certificate(OURS, CERTIFIED, |params| params.subject_alt_names = dns("other.example")),
            NO_RIGHTS,
        ),
        case(
            "a certificate with a longer name",
            certificate(OURS, CERTIFIED, |params| params.subject_alt_names = dns("reader.example.org")),
            NO_RIGHTS,
        ),
        case("a certificate without its key", without_its_key, Rights::NoHandshake),
    ]
}

/// A reader's certificate issued by the authority `issuer`, valid from one day ago for eleven days in all.
pub(super) fn certificate(
    issuer: u64,
    seed: u64,
    change: impl FnOnce(&mut CertificateParams),
) -> ClientIdentity {
    let now = rcgen::date_time_ymd(1970, 1, 1) + Duration::from_secs(START_S);
    let mut params = CertificateParams::new(vec!["reader.example".into()]).unwrap();
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    params.not_before = now - Duration::from_secs(86_400);
    params.not_after = now + Duration::from_secs(864_000);
    change(&mut params);
    let certificate = params.signed_by(&key_pair(seed), &authority(issuer)).unwrap();
    ClientIdentity { chain: vec![certificate.der().clone()], ..key(seed) }
}

/// The certificate of a reader that the access control list names.
pub(super) fn reader() -> ClientIdentity {
    certificate(OURS, CERTIFIED, |_| {})
}

fn authority(seed: u64) -> CertifiedIssuer<'static, KeyPair> {
    let mut params = CertificateParams::new(vec![]).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    // Both authorities have the same name, which must not identify them.
    params.distinguished_name.push(rcgen::DnType::CommonName, "an authority");
    CertifiedIssuer::self_signed(params, key_pair(seed)).unwrap()
}

fn dns(name: &str) -> Vec<rcgen::SanType> {
    vec![rcgen::SanType::DnsName(name.try_into().unwrap())]
}

/// A key in a self-signed certificate.
pub(super) fn key(seed: u64) -> ClientIdentity {
    let key = PrivateKeyDer::Pkcs8(key_pair(seed).serialize_der().into());
    ClientIdentity { chain: vec![self_signed_certificate(seed, "client")], key }
}

fn self_signed_certificate(seed: u64, name: &str) -> CertificateDer<'static> {
    let params = CertificateParams::new(vec![name.into()]).unwrap();
    params.self_signed(&key_pair(seed)).unwrap().der().clone()
}

pub(super) fn grant(topics: &str, verbs: Verbs) -> Grant {
    Grant { topics: Glob::new(topics).unwrap(), verbs }
}

pub(super) fn claims(id: u8, grants: Vec<Grant>) -> Claims {
    Claims { id: TicketId([id; 8]), holder: "a test".into(), expires_s: None, grants }
}

pub(super) fn sealed(claims: Claims) -> Token {
    secret(1, 7).seal(&claims)
}
