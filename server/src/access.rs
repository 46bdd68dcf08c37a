//! Access control: which clients may connect, and what each may do. Anything not granted is denied.
//!
//! A client authenticates with the token of its ticket, with a listed key or certificate, or at a Unix socket as its
//! user. [`Rules`], which are pure, map credentials to one [`Principal`] with its grants. Rules may be replaced while
//! sessions run: each session awaits [`Permit::changed`], and ends subscriptions or itself when it loses rights.

mod acl;
mod folder;
mod issued;
mod principal;
mod reload;
mod rules;
mod store;
mod texts;

pub use acl::{Acl, AclError, Decision};
pub use folder::AccessStoreError;
pub use issued::IssuedTicket;
pub use principal::Principal;
pub use rules::{Credentials, Denied, LocalUser, Rules, Standing};
pub use store::AccessStore;

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, SystemTime},
};
use tensor_relay_device::Lock;
use tensor_relay_protocol::{TicketId, Topic, Verb};
use tensor_relay_transport::Fingerprint;
use tokio::{sync::watch, time::Instant};

/// The interval at which a session with temporary rights reads the clock. The session ends at most this long after its
/// rights expire, even if the clock is set meanwhile.
const CLOCK_INTERVAL: Duration = Duration::from_secs(2);

/// The access control of a server. Cheap to clone; all clones follow the same rules.
#[derive(Debug, Clone)]
pub struct Access {
    rules: watch::Receiver<Arc<Rules>>,
    uses: Arc<reload::Uses>,
    problem: Arc<Lock<Option<String>>>,
    clock: Clock,
}

/// A clock: returns the seconds since 1970.
type Clock = fn() -> u64;

impl Access {
    /// Admits every client that can reach the server and knows its key, and allows everything. For tests, and for
    /// networks on which every host is trusted with every tensor.
    pub fn open() -> Self {
        Self::new(Rules::open())
    }

    /// Access by fixed `rules`.
    pub fn new(rules: Rules) -> Self {
        Self::following(watch::Sender::new(Arc::new(rules)).subscribe())
    }

    /// Access by the current value of `rules`.
    pub fn following(rules: watch::Receiver<Arc<Rules>>) -> Self {
        Self { rules, uses: Arc::default(), problem: Arc::default(), clock: seconds_now }
    }

    /// Replaces the system's clock by `clock`, in seconds since 1970: for simulations.
    #[must_use]
    pub fn with_clock(self, clock: fn() -> u64) -> Self {
        Self { clock, ..self }
    }

    /// The current rules.
    pub fn rules(&self) -> Arc<Rules> {
        Arc::clone(&self.rules.borrow())
    }

    /// Follows replacements of the rules.
    pub(crate) fn changes(&self) -> watch::Receiver<Arc<Rules>> {
        self.rules.clone()
    }

    /// Why the current rules are older than their files; `None` if they are current.
    pub fn problem(&self) -> Option<String> {
        self.problem.lock().clone()
    }

    /// When each ticket was last used in this process, in seconds since 1970.
    pub fn uses(&self) -> HashMap<TicketId, u64> {
        self.uses.lock().clone()
    }

    /// Admits a client, if its credentials suffice.
    pub(crate) fn admit(&self, credentials: Credentials) -> Result<Permit, Denied> {
        let mut rules = self.rules.clone();
        let now = (self.clock)();
        let principal = rules.borrow_and_update().admit(&credentials, now)?;
        if let Some(ticket) = principal.ticket() {
            self.note_use(ticket, now);
        }
        let holder = Holder(Arc::new(Lock::new(Arc::new(principal))));
        let clock_check_at = Instant::now() + CLOCK_INTERVAL;
        Ok(Permit { rules, credentials, holder, clock_check_at, clock: self.clock })
    }

    /// Admits a client with this key and without any rights, who may show grants for single versions. What it may do does not
    /// change with the rules.
    pub(crate) fn admit_peer(&self, key: Fingerprint) -> Permit {
        let holder = Holder(Arc::new(Lock::new(Arc::new(Principal::peer(key)))));
        let rules = watch::Sender::new(Arc::new(Rules::default())).subscribe();
        let (credentials, clock_check_at) = (Credentials::default(), Instant::now());
        Permit { rules, credentials, holder, clock_check_at, clock: self.clock }
    }

    fn note_use(&self, ticket: TicketId, now: u64) {
        let mut uses = self.uses.lock();
        uses.insert(ticket, now);
        if uses.len() > store::USES_MAX
            && let Some(oldest) = uses.iter().min_by_key(|(_, used)| **used).map(|(ticket, _)| *ticket)
        {
            uses.remove(&oldest);
        }
    }
}

/// A session's permission to run.
#[derive(Debug)]
pub(crate) struct Permit {
    rules: watch::Receiver<Arc<Rules>>,
    credentials: Credentials,
    holder: Holder,
    /// When to read the clock next. Cancelling `changed` does not postpone it.
    clock_check_at: Instant,
    clock: Clock,
}

impl Permit {
    /// The holder of the permit, with its current rights.
    pub(crate) fn holder(&self) -> &Holder {
        &self.holder
    }

    /// The client's right to be admitted, which can be asked for also after its session.
    pub(crate) fn right(&self) -> Right {
        Right { rules: self.rules.clone(), credentials: self.credentials.clone(), clock: self.clock }
    }

    /// Waits until the holder's rights change. Cancel safe.
    ///
    /// # Errors
    /// [`Denied`] when the holder would no longer be admitted, or only as another principal.
    pub(crate) async fn changed(&mut self) -> Result<(), Denied> {
        loop {
            let before = self.holder.principal();
            self.rules_or_clock_changed(before.is_temporary()).await;
            let now = self.rules.borrow_and_update().admit(&self.credentials, (self.clock)())?;
            if !now.is_same(&before) {
                return Err(Denied::Another { before: before.to_string(), now: now.to_string() });
            }
            if now != *before {
                self.holder.replace(now);
                return Ok(());
            }
        }
    }

    async fn rules_or_clock_changed(&mut self, is_temporary: bool) {
        let changed = async {
            if self.rules.changed().await.is_err() {
                std::future::pending::<()>().await; // The rules can no longer change.
            }
        };
        if !is_temporary {
            return changed.await;
        }
        tokio::select! {
            () = changed => {}
            () = tokio::time::sleep_until(self.clock_check_at) => self.clock_check_at = Instant::now() + CLOCK_INTERVAL,
        }
    }
}

/// What a client would be permitted if it connected now. It outlives the client's session.
#[derive(Debug)]
pub(crate) struct Right {
    rules: watch::Receiver<Arc<Rules>>,
    credentials: Credentials,
    clock: Clock,
}

impl Right {
    /// Whether the client would be admitted now, and might do `verb` with `topic`. Verifies its token again.
    pub(crate) fn may(&self, verb: Verb, topic: &Topic) -> bool {
        let rules = Arc::clone(&self.rules.borrow());
        rules
            .admit(&self.credentials, (self.clock)())
            .is_ok_and(|principal| principal.may(verb, topic))
    }
}

/// The current principal of a session. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Holder(Arc<Lock<Arc<Principal>>>);

impl Holder {
    pub(crate) fn principal(&self) -> Arc<Principal> {
        Arc::clone(&self.0.lock())
    }

    pub(crate) fn may(&self, verb: Verb, topic: &Topic) -> bool {
        self.principal().may(verb, topic)
    }

    fn replace(&self, principal: Principal) {
        *self.0.lock() = Arc::new(principal);
    }
}

/// The current time in seconds since 1970, the unit of [`Rules::admit`]; 0 if the clock is set before that.
pub fn seconds_now() -> u64 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::{store::USES_MAX, *};
    use tensor_relay_protocol::{Claims, Grant, Secret, SecretId, Verbs};

    fn secret() -> Secret {
        Secret::new(SecretId(1), [7; 32])
    }

    fn claims(expires_s: Option<u64>) -> Claims {
        let grants = vec![Grant::everywhere(Verbs::CONSUME)];
        Claims { id: TicketId(*b"12345678"), holder: "a".into(), expires_s, grants }
    }

    fn credentials(claims: &Claims) -> Credentials {
        Credentials { token: Some(secret().seal(claims)), ..Credentials::default() }
    }

    #[tokio::test(start_paused = true)]
    async fn a_session_notices_that_its_ticket_was_revoked() {
        let rules = Rules { secrets: vec![secret()], ..Rules::default() };
        let sender = watch::Sender::new(Arc::new(rules.clone()));
        let access = Access::following(sender.subscribe());
        let mut permit = access.admit(credentials(&claims(None))).unwrap();
        assert!(access.uses().contains_key(&claims(None).id));
        sender.send_replace(Arc::new(rules.clone())); // Equal rules.
        let waited = tokio::time::timeout(Duration::from_secs(60), permit.changed()).await;
        assert!(waited.is_err(), "nothing changed for it");
        let (right, topic) = (permit.right(), Topic::new("a").unwrap());
        assert!(right.may(Verb::Subscribe, &topic) && !right.may(Verb::Publish, &topic));
        let revoked = [claims(None).id].into();
        sender.send_replace(Arc::new(Rules { revoked, ..rules }));
        assert!(!right.may(Verb::Subscribe, &topic));
        assert_eq!(permit.changed().await, Err(Denied::Revoked(claims(None).id)));
        assert!(access.admit(credentials(&claims(None))).is_err());
    }

    /// Even a busy session, which cancels `changed` repeatedly.
    #[tokio::test]
    async fn a_session_ends_when_its_ticket_expires() {
        let access = Access::new(Rules { secrets: vec![secret()], ..Rules::default() });
        let mut permit = access.admit(credentials(&claims(Some(seconds_now() + 1)))).unwrap();
        let began = Instant::now();
        let ended = loop {
            if let Ok(ended) = tokio::time::timeout(Duration::from_millis(50), permit.changed()).await {
                break ended;
            }
            assert!(began.elapsed() < Duration::from_secs(10), "it ends within two readings of the clock");
        };
        assert_eq!(ended, Err(Denied::Expired));
    }

    /// A client whose key is removed does not continue with its token, nor the reverse.
    #[tokio::test]
    async fn a_session_ends_when_its_principal_changes() {
        let certified = rcgen::generate_simple_self_signed(["a".to_owned()]).unwrap();
        let certificate = tensor_relay_transport::ClientCertificate::new(&[certified.cert.der().clone()]);
        let key = certificate.as_ref().unwrap().key();
        let shown = Credentials { certificate, ..credentials(&claims(None)) };
        let rules = Rules { secrets: vec![secret()], ..Rules::default() };
        let with_key = Rules { keys: [(key, "a".to_owned())].into(), ..rules.clone() };
        for (before, after) in [(&with_key, &rules), (&rules, &with_key)] {
            let sender = watch::Sender::new(Arc::new(before.clone()));
            let mut permit = Access::following(sender.subscribe()).admit(shown.clone()).unwrap();
            sender.send_replace(Arc::new(after.clone()));
            let ended = tokio::time::timeout(CLOCK_INTERVAL, permit.changed()).await;
            assert!(matches!(ended, Ok(Err(Denied::Another { .. }))), "{ended:?}");
        }
    }

    #[tokio::test]
    async fn a_session_ends_when_its_certificate_expires() {
        let mut params = rcgen::CertificateParams::new(vec![]).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let key = || rcgen::KeyPair::generate().unwrap();
        let ours = rcgen::CertifiedIssuer::self_signed(params, key()).unwrap();
        let mut params = rcgen::CertificateParams::new(vec!["b.example".into(), "a.example".into()]).unwrap();
        params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ClientAuth];
        params.not_after = rcgen::date_time_ymd(1970, 1, 1) + Duration::from_secs(seconds_now() + 2);
        let certificate = params.signed_by(&key(), &ours).unwrap();
        let certificate = tensor_relay_transport::ClientCertificate::new(&[certificate.der().clone()]);
        let authorities = tensor_relay_transport::ClientAuthorities::from_pem(&ours.pem()).unwrap();
        let rules = Rules { authorities, secrets: vec![secret()], ..Rules::default() };
        // It also has a valid token, but was admitted by its certificate.
        let shown = Credentials { certificate, ..credentials(&claims(None)) };
        let mut permit = Access::new(rules).admit(shown).unwrap();
        assert_eq!(permit.holder().principal().to_string(), "dns:a.example,dns:b.example");
        let ended = tokio::time::timeout(Duration::from_secs(10), permit.changed()).await;
        assert!(matches!(ended, Ok(Err(_))), "{ended:?}");
    }

    #[test]
    fn noted_uses_are_bounded() {
        let access = Access::open();
        for number in 0..USES_MAX as u64 + 10 {
            access.note_use(TicketId(number.to_be_bytes()), number);
        }
        let uses = access.uses();
        assert_eq!(uses.len(), USES_MAX);
        assert_eq!(uses.values().min(), Some(&10), "the oldest went");
    }
}
