//! [`Grants`]: who was granted chunks of a topic's holders, and whose grants were revoked.

use super::{Sharer, signals::Signals};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Weak},
    time::Duration,
};
use tensor_relay_device::Lock;
use tensor_relay_protocol::Topic;

/// The interval at which the rights of takers are asked for: half of the time in which those that ended must be known to
/// their holders.
const RIGHTS_INTERVAL: Duration = Duration::from_secs(4);

/// The most takers that are remembered. The grants of the one that was named holders first are revoked; it has them again
/// when it subscribes.
const TAKERS_MAX: usize = 4_096;

/// The most sessions of one taker that are remembered, if it reconnects: one with a right is enough.
const SESSIONS_MAX: usize = 4;

/// The most keys whose owners lost their right. Holders that join are told them.
const REVOKED_MAX: usize = 1_024;

/// The grants of one topic, of all its versions: a holder may offer an older one than that which it receives, and a taker
/// may be gone. Rights are asked for without holding the lock, since a token is verified again each time.
#[derive(Debug)]
pub(crate) struct Grants {
    topic: Topic,
    state: Lock<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Those who were named holders, by key.
    takers: BTreeMap<[u8; 32], Taker>,
    takers_ever: u64,
    /// The keys whose owners lost their right to the topic.
    revoked: BTreeSet<[u8; 32]>,
    /// The members, which may be holders.
    members: Vec<Weak<Signals>>,
    /// Whether a task looks after the rights.
    is_looked_after: bool,
}

#[derive(Debug)]
struct Taker {
    number: u64,
    sessions: Vec<Arc<Sharer>>,
}

impl Grants {
    /// No grants of `topic`.
    pub(crate) fn of(topic: Topic) -> Self {
        Self { topic, state: Lock::default() }
    }

    /// Handles that a client becomes a member, which is told by `signals`: whose grants were revoked. If its own were, and
    /// it has a right again, the others are told that.
    pub(super) fn handle_joined(&self, sharer: &Sharer, signals: &Arc<Signals>) {
        let is_revoked = |key: &[u8; 32]| self.state.lock().revoked.contains(key);
        let restored = sharer.key().filter(is_revoked).filter(|_| sharer.may_take(&self.topic));
        let mut state = self.state.lock();
        if let Some(key) = restored.filter(|key| state.revoked.remove(key)) {
            state.tell(key, true);
        }
        let revoked = state.revoked.iter().map(|key| (*key, false)).collect();
        signals.with(|raised| raised.revocations = revoked);
        state.members.retain(|member| member.strong_count() > 0);
        state.members.push(Arc::downgrade(signals));
    }

    /// Handles that holders were named to the taker with this key, with grants.
    pub(super) fn handle_named(self: &Arc<Self>, key: [u8; 32], sharer: &Arc<Sharer>) {
        let mut state = self.state.lock();
        let number = state.takers_ever;
        let taker = state.takers.entry(key).or_insert(Taker { number, sessions: vec![] });
        if taker.sessions.iter().any(|known| Arc::ptr_eq(known, sharer)) {
            return;
        }
        if taker.sessions.len() >= SESSIONS_MAX {
            taker.sessions.remove(0);
        }
        taker.sessions.push(Arc::clone(sharer));
        state.takers_ever += 1;
        if state.takers.len() > TAKERS_MAX
            && let Some(first) = state.first()
        {
            state.revoke(first);
        }
        if !std::mem::replace(&mut state.is_looked_after, true) {
            tokio::spawn(look_after(Arc::downgrade(self)));
        }
    }

    /// Revokes the grants of takers that may not have the topic any more. Returns whether any are left.
    fn check(&self) -> bool {
        let takers = self.state.lock().takers();
        for (key, sessions) in takers {
            if sessions.iter().any(|session| session.may_take(&self.topic)) {
                continue;
            }
            let mut state = self.state.lock();
            let known = state.takers.get(&key).map_or(0, |taker| taker.sessions.len());
            let is_same = state.takers.get(&key).is_some_and(|taker| {
                taker.sessions.iter().zip(&sessions).all(|(one, other)| Arc::ptr_eq(one, other))
            });
            if known == sessions.len() && is_same {
                let taker = sessions.last().map(|session| session.peer().to_string());
                tracing::info!(
                    topic = %self.topic, taker,
                    "A client lost its right to a topic: its peers are told to send it nothing more of it."
                );
                state.revoke(key);
            }
        }
        let mut state = self.state.lock();
        state.is_looked_after = !state.takers.is_empty();
        state.is_looked_after
    }
}

impl State {
    fn takers(&self) -> Vec<([u8; 32], Vec<Arc<Sharer>>)> {
        let takers = self.takers.iter();
        takers.map(|(key, taker)| (*key, taker.sessions.clone())).collect()
    }

    /// The taker that was named holders first.
    fn first(&self) -> Option<[u8; 32]> {
        let first = self.takers.iter().min_by_key(|(_, taker)| taker.number);
        first.map(|(key, _)| *key)
    }

    /// Ends the grants of a taker, and tells all members, of each version, and those that join later.
    fn revoke(&mut self, key: [u8; 32]) {
        self.takers.remove(&key);
        if self.revoked.len() < REVOKED_MAX {
            self.revoked.insert(key);
        }
        self.tell(key, false);
    }

    fn tell(&mut self, key: [u8; 32], is_restored: bool) {
        for member in self.members.iter().filter_map(Weak::upgrade) {
            member.raise(|raised| {
                raised.revocations.insert(key, is_restored);
            });
        }
    }
}

/// Looks after the rights of a topic's takers while there are any.
async fn look_after(grants: Weak<Grants>) {
    loop {
        tokio::time::sleep(RIGHTS_INTERVAL).await;
        let Some(grants) = grants.upgrade() else { return };
        if !grants.check() {
            return;
        }
    }
}
