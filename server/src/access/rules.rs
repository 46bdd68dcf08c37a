//! [`Rules`] of admission. Pure: the time is an argument.

use super::{Acl, IssuedTicket, Principal};
use std::collections::{HashMap, HashSet};
use tensor_relay_protocol::{
    Claims, Grant, Secret, SecretId, Ticket, TicketId, Token, TokenError, Topic, Verb, Verbs,
};
use tensor_relay_transport::{ClientAuthorities, ClientCertificate, Fingerprint, unix::overflow_uid};

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
    /// The rights of clients with a key or certificate, and of users of the server's socket and of the publish socket.
    pub acl: Acl,
}

/// A client's credentials.
#[derive(Debug, Clone, Default)]
pub struct Credentials {
    /// The token of its ticket.
    pub token: Option<Token>,
    /// Its certificate, whose private key it holds: TLS proved that.
    pub certificate: Option<ClientCertificate>,
    /// Its user, if it connected through the server's socket.
    pub user: Option<LocalUser>,
}

/// The user of a client at the server's socket, as the system reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalUser {
    /// The user's number in the server's user namespace.
    pub uid: u32,
    /// What that number means to this server.
    pub standing: Standing,
}

/// What a user is to the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Standing {
    /// The server's own user, or root of its user namespace: both may read the server's memory anyway.
    Own,
    /// Another user.
    Other,
    /// The overflow uid, which stands for every user without a number in the server's user namespace: such users cannot
    /// be told apart, and root of another namespace is one of them.
    Unnumbered,
}

impl LocalUser {
    /// The user `uid` as this process sees it.
    pub fn seen(uid: u32) -> Self {
        let standing = match uid {
            _ if uid == overflow_uid() => Standing::Unnumbered,
            0 => Standing::Own,
            _ if uid == rustix::process::geteuid().as_raw() => Standing::Own,
            _ => Standing::Other,
        };
        Self { uid, standing }
    }
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
    /// Its user has no rights at the server's socket.
    #[error("{}", why_user_is_denied(.0))]
    User(LocalUser),
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

    /// Rules for a socket of this host: they admit this process' user, root and `uids`, and no token.
    pub fn for_users(uids: &[u32]) -> Self {
        let own = [0, rustix::process::geteuid().as_raw()];
        let own = own.into_iter().filter(|uid| LocalUser::seen(*uid).standing == Standing::Own);
        let line = |uid| format!("uid:{uid} {} **\n", Verbs::CONSUME);
        let lines: String = match uids {
            [] => String::new(), // Then the list restricts nobody, and the own users may take.
            further => own.chain(further.iter().copied()).map(line).collect(),
        };
        Self { acl: lines.parse().expect("each line is a user, verbs and a glob"), ..Self::default() }
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
    /// a certificate, those over a token, and a token over the user.
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
        match (&credentials.token, certificate, credentials.user) {
            (Some(token), ..) => self.admit_token(token, now_s),
            (None, Some(shown), _) => Err(Denied::UnknownKey(shown.key())),
            (None, None, Some(user)) => self.admit_user(user),
            (None, None, None) => Err(Denied::NoCredentials),
        }
    }

    /// A user has the rights that the list grants it. While the list names no user who may take, the server's own users
    /// have those of its own ticket for all topics.
    fn admit_user(&self, user: LocalUser) -> Result<Principal, Denied> {
        let mut grants = self.acl.grants_of(&format!("uid:{}", user.uid));
        grants.retain(|grant| [Verb::List, Verb::Subscribe].iter().any(|verb| grant.verbs.contains(*verb)));
        if user.standing == Standing::Own && !self.acl.restricts_takers() {
            grants.push(Grant::everywhere(Verbs::CONSUME));
        }
        match grants.is_empty() {
            true => Err(Denied::User(user)),
            false => Ok(Principal::with_user(user.uid, grants)),
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

/// What the client and its operator can do. The client reads it, so it names nothing but the client's user.
fn why_user_is_denied(LocalUser { uid, standing }: &LocalUser) -> String {
    match standing {
        Standing::Own | Standing::Other => format!(
            "user {uid} has no rights at this socket: add the line `uid:{uid} list,subscribe TOPICS` to access/acl in \
             the state directory of the server, or use a ticket with a token (`unix:PATH?token=…`); a receiver of the host \
             (`subscribe --share-host`) takes `--share-uid {uid}` instead"
        ),
        Standing::Unnumbered => format!(
            "the user has no number in the user namespace of the server and appears as {uid}, as every such user does: \
             use a ticket with a token (`unix:PATH?token=…`), or, if all who reach the socket may take, add the line \
             `uid:{uid} list,subscribe TOPICS` to access/acl in the state directory of the server"
        ),
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
        let with = |token| Credentials { token, ..Credentials::default() };
        let revoked = Rules { revoked: [TicketId([9; 8])].into(), ..new_rules() };
        let distrusted = Rules { keys: HashMap::new(), revoked_keys: [shown(5).key()].into(), ..new_rules() };
        let cases = [
            (
                distrusted,
                Credentials { token: good(), certificate: Some(shown(5)), user: None },
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
            (
                new_rules(),
                Credentials { token: None, certificate: Some(shown(5)), user: None },
                Ok("key:trainer"),
            ),
            (
                new_rules(),
                Credentials { token: good(), certificate: Some(shown(5)), user: None },
                Ok("key:trainer"),
            ),
            (
                new_rules(),
                Credentials { token: good(), certificate: Some(shown(6)), user: None },
                Ok("ticket:0909090909090909"),
            ),
            (
                new_rules(),
                Credentials { token: None, certificate: Some(shown(6)), user: None },
                Err(Denied::UnknownKey(shown(6).key())),
            ),
            (Rules::open(), Credentials::default(), Ok("anybody")),
        ];
        for (index, (rules, credentials, expected)) in cases.into_iter().enumerate() {
            let admitted = rules.admit(&credentials, 50).map(|principal| principal.to_string());
            assert_eq!(admitted, expected.map(str::to_owned), "case {index}");
        }
    }

    /// Goal: who may take from the server's socket is what the list says, else the server's own users; a token decides
    /// where one is given. Method: users of each standing, lists with and without lines about takers.
    #[test]
    fn users_have_the_rights_of_the_list() {
        let [own, other, unnumbered] =
            [(1000, Standing::Own), (1001, Standing::Other), (65_534, Standing::Unnumbered)]
                .map(|(uid, standing)| LocalUser { uid, standing });
        let with_list = |acl: &str| Rules { acl: acl.parse().unwrap(), ..new_rules() };
        let topic = |name: &str| Topic::new(name).unwrap();
        let admit = |rules: &Rules, user, token| {
            rules.admit(&Credentials { user: Some(user), token, certificate: None }, 0)
        };
        for rules in [new_rules(), with_list("uid:7 publish kv/*")] {
            let principal = admit(&rules, own, None).unwrap();
            assert_eq!(principal.to_string(), "uid:1000");
            assert!(principal.may(Verb::List, &topic("x/y")) && principal.may(Verb::Subscribe, &topic("x")));
            assert!(!principal.may(Verb::Publish, &topic("x")));
            for user in [other, unnumbered] {
                assert_eq!(admit(&rules, user, None), Err(Denied::User(user)));
            }
        }
        let listed = with_list("uid:1001 list,subscribe policy/*\nuid:1000 publish **\n");
        let principal = admit(&listed, other, None).unwrap();
        assert!(
            principal.may(Verb::Subscribe, &topic("policy/a")) && !principal.may(Verb::List, &topic("kv/a"))
        );
        assert_eq!(admit(&listed, own, None), Err(Denied::User(own)), "it is not listed as a taker");
        assert!(admit(&with_list("uid:65534 subscribe **"), unnumbered, None).is_ok());
        let everybody = with_list("uid:* subscribe **");
        assert!(admit(&everybody, other, None).is_ok());
        assert_eq!(admit(&everybody, unnumbered, None), Err(Denied::User(unnumbered)), "it is no one user");
        let by_token = admit(&listed, unnumbered, token(&secret(1, 1), None)).unwrap();
        assert_eq!(by_token.to_string(), "ticket:0909090909090909");
        assert!(
            admit(&listed, own, token(&secret(1, 3), None)).is_err(),
            "a token that is wrong is not passed over"
        );
        let mut later = new_rules();
        later.keep_revoked(&listed);
        assert_eq!(
            admit(&later, own, None),
            Err(Denied::User(own)),
            "removed lines must not let others take"
        );
        for (user, advice) in [(other, "uid:1001 list,subscribe"), (unnumbered, "?token=")] {
            let why = Denied::User(user).to_string();
            assert!(why.contains(advice) && why.contains(&user.uid.to_string()), "{why}");
        }
    }

    #[test]
    fn a_socket_has_its_own_user_and_further_ones() {
        let own = LocalUser::seen(rustix::process::geteuid().as_raw());
        let [other, stranger] = [71_001, 71_002].map(|uid| LocalUser { uid, standing: Standing::Other });
        let admits = |rules: &Rules, user| {
            let credentials = Credentials { user: Some(user), ..Credentials::default() };
            rules
                .admit(&credentials, 0)
                .is_ok_and(|principal| principal.may(Verb::Subscribe, &Topic::new("a/b").unwrap()))
        };
        let (alone, several) = (Rules::for_users(&[]), Rules::for_users(&[other.uid]));
        assert_eq!([own, other, stranger].map(|user| admits(&alone, user)), [true, false, false]);
        assert_eq!([own, other, stranger].map(|user| admits(&several, user)), [true, true, false]);
    }

    /// A key removed from the rules of a running server counts as revoked until it is trusted again.
    #[test]
    fn a_removed_key_stays_revoked() {
        let mut later = Rules { keys: HashMap::new(), ..new_rules() };
        later.keep_revoked(&new_rules());
        let credentials =
            Credentials { token: token(&secret(1, 1), None), certificate: Some(shown(5)), user: None };
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
            rules.admit(&Credentials { token: ticket.token().cloned(), ..Credentials::default() }, 0)
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
            .admit(&Credentials { token: token(&secret(1, 1), None), ..Credentials::default() }, 0)
            .unwrap();
        assert!(by_ticket.may(Verb::Subscribe, &topic("policy/a")));
        assert!(
            !by_ticket.may(Verb::Publish, &topic("policy/a")) && !by_ticket.may(Verb::List, &topic("kv/a"))
        );
        let certificate = Some(shown(5));
        let by_key = new_rules()
            .admit(&Credentials { certificate, ..Credentials::default() }, 0)
            .unwrap();
        assert!(by_key.may(Verb::List, &topic("kv/a")) && !by_key.may(Verb::List, &topic("policy/a")));
    }
}
