//! [`Rules`] of admission. Pure: the time is an argument.

use super::{Acl, IssuedTicket, Principal};
use std::collections::{HashMap, HashSet};
use tensor_relay_protocol::{
    Claims, Grant, Secret, SecretId, Ticket, TicketId, Token, TokenError, Topic, Verb, Verbs,
};
use tensor_relay_transport::{ClientAuthorities, ClientCertificate, Fingerprint};

/// The rules of admission. The default admits nobody.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rules {
    /// Whether everybody is admitted with all rights, whatever the other fields contain.
    pub open: bool,
    /// The secrets whose tickets are valid. The first seals new ones.
    pub secrets: Vec<Secret>,
    /// The revoked tickets.
    pub revoked: HashSet<TicketId>,
    /// The trusted keys of clients, with their names in the access control list.
    pub keys: HashMap<Fingerprint, String>,
    /// The revoked keys of clients, which are refused even with a valid token.
    pub revoked_keys: HashSet<Fingerprint>,
    /// The authorities whose certificates name clients.
    pub authorities: ClientAuthorities,
    /// The rights of clients with a key or certificate, and of users of the publish socket.
    pub acl: Acl,
}

/// A client's credentials.
#[derive(Debug, Clone, Default)]
pub struct Credentials {
    /// The token of its ticket.
    pub token: Option<Token>,
    /// Its certificate, whose private key it holds: TLS proved that.
    pub certificate: Option<ClientCertificate>,
}

/// Why a client is not admitted. For the server's log: the client learns only that access was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Denied {
    /// It has no credentials.
    #[error(
        "it has neither a token nor a key: its ticket is from a server with --open, or from an older one"
    )]
    NoCredentials,
    /// Its token is invalid.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// Its ticket was revoked.
    #[error("its ticket {0} was revoked")]
    Revoked(TicketId),
    /// Its key was revoked.
    #[error("its key {0} was revoked")]
    RevokedKey(Fingerprint),
    /// It would now be admitted as another principal.
    #[error("it was admitted as {before} and would now be {now}: it may reconnect as that")]
    Another {
        /// The principal under which it was admitted.
        before: String,
        /// The principal under which it would be admitted now.
        now: String,
    },
    /// Its ticket has expired.
    #[error("its ticket has expired")]
    Expired,
    /// Its key is unknown, and its certificate is not valid under a trusted authority.
    #[error("its key {0} is not trusted, and its certificate is not valid now under a trusted authority")]
    UnknownKey(Fingerprint),
}

impl Rules {
    /// Rules that admit everybody.
    pub fn open() -> Self {
        Self { open: true, ..Self::default() }
    }

    /// Rules with a new secret that is stored nowhere: its tickets end with the process.
    pub fn ephemeral() -> Self {
        Self { secrets: vec![Secret::new(SecretId(1), rand::random())], ..Self::default() }
    }

    /// The server's own ticket: `ticket` with a token to list and subscribe to its topic, or to all topics if it names
    /// none. It is the same each time, until it is revoked or the secret is rotated. An open server's ticket has no
    /// token.
    pub fn own_ticket(&self, ticket: Ticket) -> Ticket {
        let Some(secret) = self.secrets.first().filter(|_| !self.open) else { return ticket };
        let grant = match ticket.topic() {
            Some(topic) => Grant::for_topic(topic, Verbs::CONSUME),
            None => Grant::everywhere(Verbs::CONSUME),
        };
        let id = own_id(ticket.topic(), &self.revoked);
        let claims = Claims { id, holder: "serve".into(), expires_s: None, grants: vec![grant] };
        ticket.with_token(secret.seal(&claims))
    }

    /// Authenticates `credentials` at `now_s`, in seconds since 1970. A trusted key takes precedence over the names in
    /// a certificate, and those over a token.
    ///
    /// # Errors
    /// [`Denied`], with the reason.
    pub fn admit(&self, credentials: &Credentials, now_s: u64) -> Result<Principal, Denied> {
        if self.open {
            return Ok(Principal::anybody(vec![Grant::everywhere(Verbs::of(Verb::ALL))]));
        }
        let certificate = credentials.certificate.as_ref();
        let key = certificate.map(ClientCertificate::key);
        if let Some(key) = key.filter(|key| self.revoked_keys.contains(key)) {
            return Err(Denied::RevokedKey(key));
        }
        if let Some(principal) = certificate.and_then(|shown| self.admit_certificate(shown, now_s)) {
            return Ok(principal);
        }
        match (&credentials.token, certificate) {
            (Some(token), _) => self.admit_token(token, now_s),
            (None, Some(shown)) => Err(Denied::UnknownKey(shown.key())),
            (None, None) => Err(Denied::NoCredentials),
        }
    }

    fn admit_certificate(&self, shown: &ClientCertificate, now_s: u64) -> Option<Principal> {
        if let Some(name) = self.keys.get(&shown.key()) {
            return Some(Principal::with_key(name, self.acl.grants_of(&format!("key:{name}"))));
        }
        let names = self.authorities.names_of(shown, now_s)?;
        let grants = names.iter().flat_map(|name| self.acl.grants_of(name)).collect();
        Some(Principal::with_names(names, grants))
    }

    fn admit_token(&self, token: &Token, now_s: u64) -> Result<Principal, Denied> {
        let claims = token.open(&self.secrets)?;
        self.check(&claims, now_s)?;
        Ok(Principal::with_ticket(claims.id, claims.holder, claims.grants, claims.expires_s))
    }

    fn check(&self, claims: &Claims, now_s: u64) -> Result<(), Denied> {
        match () {
            () if self.revoked.contains(&claims.id) => Err(Denied::Revoked(claims.id)),
            () if claims.is_expired(now_s) => Err(Denied::Expired),
            () => Ok(()),
        }
    }

    /// Checks whether a recorded ticket is valid at `now_s`.
    ///
    /// # Errors
    /// [`Denied`], with the reason.
    pub fn check_issued(&self, ticket: &IssuedTicket, now_s: u64) -> Result<(), Denied> {
        let is_known = |id| self.secrets.iter().any(|secret| secret.id() == id);
        match ticket.secret {
            Some(secret) if !is_known(secret) => Err(TokenError::UnknownSecret.into()),
            None if self.secrets.is_empty() => Err(TokenError::UnknownSecret.into()),
            _ => self.check(&ticket.claims, now_s),
        }
    }

    /// Keeps the revocations of `before`. A restart undoes those that the files no longer have. Trusting a key again
    /// undoes its revocation.
    pub(super) fn keep_revoked(&mut self, before: &Self) {
        self.revoked.extend(&before.revoked);
        let removed = before.keys.keys().chain(&before.revoked_keys);
        let removed: Vec<_> = removed.filter(|key| !self.keys.contains_key(key)).copied().collect();
        self.revoked_keys.extend(removed);
        self.acl.keep_restriction_of_users(&before.acl);
    }
}

/// The first id of the server's own ticket for `topic` that was not revoked.
fn own_id(topic: Option<&Topic>, revoked: &HashSet<TicketId>) -> TicketId {
    let name = topic.map_or("", Topic::as_str);
    let mut ids = (0_u64..).map(|number| TicketId::derived(&format!("serve {number} {name}")));
    ids.find(|id| !revoked.contains(id))
        .expect("fewer are revoked than there are numbers")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::LazyLock;
    use tensor_relay_protocol::Glob;

    fn secret(id: u32, key: u8) -> Secret {
        Secret::new(SecretId(id), [key; 32])
    }

    fn token(secret: &Secret, expires_s: Option<u64>) -> Option<Token> {
        let grants = vec![Grant { topics: Glob::new("policy/*").unwrap(), verbs: Verbs::CONSUME }];
        Some(secret.seal(&Claims { id: TicketId([9; 8]), holder: "h".into(), expires_s, grants }))
    }

    /// The certificates of two clients.
    static SHOWN: LazyLock<[ClientCertificate; 2]> = LazyLock::new(|| {
        ["a", "b"].map(|name| {
            let certified = rcgen::generate_simple_self_signed([name.to_owned()]).unwrap();
            ClientCertificate::new(&[certified.cert.der().clone()]).unwrap()
        })
    });

    /// The certificate of the trusted client (5) or of the other client (6).
    fn shown(which: usize) -> ClientCertificate {
        SHOWN[which - 5].clone()
    }

    fn new_rules() -> Rules {
        Rules {
            secrets: vec![secret(2, 2), secret(1, 1)],
            keys: [(shown(5).key(), "trainer".to_owned())].into(),
            acl: "key:trainer list,subscribe kv/**".parse().unwrap(),
            ..Rules::default()
        }
    }

    /// Valid and invalid credentials of every kind, with the result of each.
    #[test]
    fn only_valid_credentials_are_admitted() {
        let good = || token(&secret(1, 1), Some(100));
        let with = |token| Credentials { token, certificate: None };
        let revoked = Rules { revoked: [TicketId([9; 8])].into(), ..new_rules() };
        let distrusted = Rules { keys: HashMap::new(), revoked_keys: [shown(5).key()].into(), ..new_rules() };
        let cases = [
            (
                distrusted,
                Credentials { token: good(), certificate: Some(shown(5)) },
                Err(Denied::RevokedKey(shown(5).key())),
            ),
            (new_rules(), with(good()), Ok("ticket:0909090909090909")),
            (new_rules(), with(token(&secret(2, 2), None)), Ok("ticket:0909090909090909")),
            (new_rules(), Credentials::default(), Err(Denied::NoCredentials)),
            (new_rules(), with(token(&secret(1, 1), Some(50))), Err(Denied::Expired)),
            (new_rules(), with(token(&secret(1, 3), None)), Err(TokenError::Forged.into())),
            (new_rules(), with(token(&secret(3, 1), None)), Err(TokenError::UnknownSecret.into())),
            (new_rules(), with(Some(Token::new("AQAA").unwrap())), Err(TokenError::Malformed.into())),
            (revoked, with(good()), Err(Denied::Revoked(TicketId([9; 8])))),
            (Rules::default(), with(good()), Err(TokenError::UnknownSecret.into())),
            (new_rules(), Credentials { token: None, certificate: Some(shown(5)) }, Ok("key:trainer")),
            (new_rules(), Credentials { token: good(), certificate: Some(shown(5)) }, Ok("key:trainer")),
            (
                new_rules(),
                Credentials { token: good(), certificate: Some(shown(6)) },
                Ok("ticket:0909090909090909"),
            ),
            (
                new_rules(),
                Credentials { token: None, certificate: Some(shown(6)) },
                Err(Denied::UnknownKey(shown(6).key())),
            ),
            (Rules::open(), Credentials::default(), Ok("anybody")),
        ];
        for (index, (rules, credentials, expected)) in cases.into_iter().enumerate() {
            let admitted = rules.admit(&credentials, 50).map(|principal| principal.to_string());
            assert_eq!(admitted, expected.map(str::to_owned), "case {index}");
        }
    }

    /// A key removed from the rules of a running server counts as revoked until it is trusted again.
    #[test]
    fn a_removed_key_stays_revoked() {
        let mut later = Rules { keys: HashMap::new(), ..new_rules() };
        later.keep_revoked(&new_rules());
        let credentials = Credentials { token: token(&secret(1, 1), None), certificate: Some(shown(5)) };
        assert!(matches!(later.admit(&credentials, 0), Err(Denied::RevokedKey(_))));
        let mut again = new_rules();
        again.keep_revoked(&later);
        assert!(again.admit(&credentials, 0).is_ok());
    }

    #[test]
    fn the_servers_own_ticket_stays_the_same_until_it_is_revoked() {
        let mut rules = Rules::ephemeral();
        let bare = |topic: &str| {
            format!("relay://a:1{topic}?key=sha256:{}", "00".repeat(32))
                .parse::<Ticket>()
                .unwrap()
        };
        let admit = |rules: &Rules, ticket: &Ticket| {
            rules.admit(&Credentials { token: ticket.token().cloned(), certificate: None }, 0)
        };
        let first = rules.own_ticket(bare("/policy"));
        assert_eq!(first, rules.own_ticket(bare("/policy")));
        let (policy, other) = (Topic::new("policy").unwrap(), Topic::new("other").unwrap());
        let narrow = admit(&rules, &first).unwrap();
        let wide = admit(&rules, &rules.own_ticket(bare(""))).unwrap();
        assert!(narrow.may(Verb::Subscribe, &policy) && !narrow.may(Verb::List, &other));
        assert!(wide.may(Verb::Subscribe, &other) && !wide.may(Verb::Publish, &other));
        rules.revoked.insert(narrow.ticket().unwrap());
        assert!(admit(&rules, &first).is_err() && admit(&rules, &rules.own_ticket(bare("/policy"))).is_ok());
        assert_eq!(Rules::open().own_ticket(bare("/policy")), bare("/policy"));
    }

    #[test]
    fn principals_have_only_their_grants() {
        let topic = |name: &str| Topic::new(name).unwrap();
        let by_ticket = new_rules()
            .admit(&Credentials { token: token(&secret(1, 1), None), certificate: None }, 0)
            .unwrap();
        assert!(by_ticket.may(Verb::Subscribe, &topic("policy/a")));
        assert!(
            !by_ticket.may(Verb::Publish, &topic("policy/a")) && !by_ticket.may(Verb::List, &topic("kv/a"))
        );
        let certificate = Some(shown(5));
        let by_key = new_rules().admit(&Credentials { token: None, certificate }, 0).unwrap();
        assert!(by_key.may(Verb::List, &topic("kv/a")) && !by_key.may(Verb::List, &topic("policy/a")));
    }
}
