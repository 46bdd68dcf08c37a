//! Who may come in, and what each may do. What is not granted is denied.
//!
//! A client proves who it is with the token of its ticket, or with the key of its own that this server knows. Out of
//! either comes one [`Principal`] with its grants, by [`Rules`] that are pure. They may be replaced while sessions run:
//! each session asks [`Permit::changed`], and ends, or ends subscriptions, when it has lost a right.

mod acl;
mod issued;
mod principal;
mod reload;
mod rules;
mod store;

pub use acl::{Acl, AclError, Decision};
pub use issued::IssuedTicket;
pub use principal::Principal;
pub use rules::{Credentials, Denied, Rules};
pub use store::{AccessStore, AccessStoreError};

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, SystemTime},
};
use tensor_relay_protocol::{TicketId, Topic, Verb};
use tokio::{sync::watch, time::Instant};

/// How often a session whose right is limited in time looks at the clock. A clock that is set jumps no further.
const CLOCK_LOOK: Duration = Duration::from_secs(2);

/// How many tickets' last uses are remembered; of more, those that were used longest ago are forgotten.
const USES_MAX: usize = 10_000;

/// Who may come into a server. Cheap to clone; all clones follow the same rules.
#[derive(Debug, Clone)]
pub struct Access {
    rules: watch::Receiver<Arc<Rules>>,
    uses: Arc<Mutex<HashMap<TicketId, u64>>>,
}

impl Access {
    /// Lets everybody in who can reach the server and knows its key, and allows everything. For tests, and for networks on which everybody
    /// is trusted with every tensor.
    pub fn open() -> Self {
        Self::new(Rules::open())
    }

    /// Follows `rules`, which do not change.
    pub fn new(rules: Rules) -> Self {
        Self::following(watch::Sender::new(Arc::new(rules)).subscribe())
    }

    /// Follows the rules that `rules` holds, whatever they become.
    pub fn following(rules: watch::Receiver<Arc<Rules>>) -> Self {
        Self { rules, uses: Arc::default() }
    }

    /// The rules of now.
    pub fn rules(&self) -> Arc<Rules> {
        Arc::clone(&self.rules.borrow())
    }

    /// When each ticket was used last, in seconds since 1970, as far as it was used in this process.
    pub fn uses(&self) -> HashMap<TicketId, u64> {
        self.uses.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Lets a client in, if what it shows is enough.
    pub(crate) fn admit(&self, credentials: Credentials) -> Result<Permit, Denied> {
        let mut rules = self.rules.clone();
        let now = seconds_now();
        let principal = rules.borrow_and_update().admit(&credentials, now)?;
        if let Some(ticket) = principal.ticket() {
            self.note_use(ticket, now);
        }
        let holder = Holder(Arc::new(Mutex::new(Arc::new(principal))));
        Ok(Permit { rules, credentials, holder, look: Instant::now() + CLOCK_LOOK })
    }

    fn note_use(&self, ticket: TicketId, now: u64) {
        let mut uses = self.uses.lock().unwrap_or_else(PoisonError::into_inner);
        uses.insert(ticket, now);
        if uses.len() > USES_MAX
            && let Some(oldest) = uses.iter().min_by_key(|(_, used)| **used).map(|(ticket, _)| *ticket)
        {
            uses.remove(&oldest);
        }
    }
}

/// A session's right to be here.
#[derive(Debug)]
pub(crate) struct Permit {
    rules: watch::Receiver<Arc<Rules>>,
    credentials: Credentials,
    holder: Holder,
    /// When the clock is looked at next, however often the session is busy with other things before.
    look: Instant,
}

impl Permit {
    /// Whose it is, for whoever must ask what they may do.
    pub(crate) fn holder(&self) -> &Holder {
        &self.holder
    }

    /// Waits until the holder's rights are others than before. Cancel safe.
    ///
    /// # Errors
    /// [`Denied`] when there are none left.
    pub(crate) async fn changed(&mut self) -> Result<(), Denied> {
        loop {
            let before = self.holder.principal();
            self.rules_or_clock_changed(before.is_temporary()).await;
            let now = self.rules.borrow_and_update().admit(&self.credentials, seconds_now())?;
            if now != *before {
                self.holder.become_(now);
                return Ok(());
            }
        }
    }

    async fn rules_or_clock_changed(&mut self, is_temporary: bool) {
        let changed = async {
            if self.rules.changed().await.is_err() {
                std::future::pending::<()>().await; // Nobody is left who could change them.
            }
        };
        if !is_temporary {
            return changed.await;
        }
        tokio::select! {
            () = changed => {}
            () = tokio::time::sleep_until(self.look) => self.look = Instant::now() + CLOCK_LOOK,
        }
    }
}

/// Who a session belongs to, as of now. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Holder(Arc<Mutex<Arc<Principal>>>);

impl Holder {
    pub(crate) fn principal(&self) -> Arc<Principal> {
        Arc::clone(&self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn may(&self, verb: Verb, topic: &Topic) -> bool {
        self.principal().may(verb, topic)
    }

    fn become_(&self, principal: Principal) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(principal);
    }
}

/// Now, in seconds since 1970. A clock before that is at its beginning: what expires then is valid, and nobody's clock is.
pub(crate) fn seconds_now() -> u64 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensor_relay_protocol::{Claims, Grant, Secret, SecretId, Verbs};

    fn secret() -> Secret {
        Secret::new(SecretId(1), [7; 32])
    }

    fn claims(expires_s: Option<u64>) -> Claims {
        let grants = vec![Grant::everywhere(Verbs::CONSUME)];
        Claims { id: TicketId(*b"12345678"), holder: "a".into(), expires_s, grants }
    }

    fn shown(claims: &Claims) -> Credentials {
        Credentials { token: Some(secret().seal(claims)), ..Credentials::default() }
    }

    #[tokio::test(start_paused = true)]
    async fn a_session_hears_that_its_ticket_was_revoked() {
        let rules = Rules { secrets: vec![secret()], ..Rules::default() };
        let sender = watch::Sender::new(Arc::new(rules.clone()));
        let access = Access::following(sender.subscribe());
        let mut permit = access.admit(shown(&claims(None))).unwrap();
        assert!(access.uses().contains_key(&claims(None).id));
        sender.send_replace(Arc::new(rules.clone())); // Others that say the same.
        let waited = tokio::time::timeout(Duration::from_secs(60), permit.changed()).await;
        assert!(waited.is_err(), "nothing changed for it");
        let revoked = [claims(None).id].into();
        sender.send_replace(Arc::new(Rules { revoked, ..rules }));
        assert_eq!(permit.changed().await, Err(Denied::Revoked(claims(None).id)));
        assert!(access.admit(shown(&claims(None))).is_err());
    }

    /// Also one that is never idle, so that nobody waits for long at a time.
    #[tokio::test]
    async fn a_session_ends_when_its_ticket_expires() {
        let access = Access::new(Rules { secrets: vec![secret()], ..Rules::default() });
        let mut permit = access.admit(shown(&claims(Some(seconds_now() + 1)))).unwrap();
        let began = Instant::now();
        let ended = loop {
            if let Ok(ended) = tokio::time::timeout(Duration::from_millis(50), permit.changed()).await {
                break ended;
            }
            assert!(began.elapsed() < Duration::from_secs(10), "it is within two looks at the clock");
        };
        assert_eq!(ended, Err(Denied::Expired));
    }

    #[test]
    fn uses_are_remembered_within_a_bound() {
        let access = Access::open();
        for number in 0..USES_MAX as u64 + 10 {
            access.note_use(TicketId(number.to_be_bytes()), number);
        }
        let uses = access.uses();
        assert_eq!(uses.len(), USES_MAX);
        assert_eq!(uses.values().min(), Some(&10), "the oldest went");
    }
}
