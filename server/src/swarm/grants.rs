//! [`Grants`]: who was granted chunks of a topic's holders, and whose grants were revoked.

use super::{Sharer, signals::Signals};
use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
    time::Duration,
};
use tensor_relay_device::Lock;
use tensor_relay_protocol::Topic;

/// The interval at which the rights of takers are asked for: half of the time in which those that ended must be known to
/// their holders.
const RIGHTS_INTERVAL: Duration = Duration::from_secs(4);

/// The most takers that are remembered. The grants of the one that was named holders first are revoked; it has them again
/// when it is named holders again.
const TAKERS_MAX: usize = 4_096;

/// The most sessions of one taker that are remembered, if it reconnects: one with a right is enough.
const SESSIONS_MAX: usize = 4;

/// The most changes of rights that are remembered. Holders that subscribe later are told them. Afterwards, whoever is not
/// known as a taker may be one whose right is lost at holders: they are told that it is restored.
const CHANGES_MAX: usize = 1_024;

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
    /// The last change of each right that was lost, by the key of its owner.
    changes: BTreeMap<[u8; 32], Change>,
    /// Whether a change was forgotten.
    has_forgotten: bool,
    /// The number of takers and changes so far.
    numbers: u64,
    /// The subscriptions of members, which may be holders.
    members: Vec<Weak<Signals>>,
    /// Whether a task looks after the rights.
    is_looked_after: bool,
}

#[derive(Debug)]
struct Taker {
    number: u64,
    sessions: Vec<Arc<Sharer>>,
}

/// A right to the topic that was lost, or is restored since.
#[derive(Debug)]
struct Change {
    number: u64,
    is_restored: bool,
}

impl Grants {
    /// No grants of `topic`.
    pub(crate) fn of(topic: Topic) -> Self {
        Self { topic, state: Lock::default() }
    }

    /// Follows the rights of takers for a subscription of `sharer` that becomes a member, for as long as it keeps this: between
    /// two versions, too, so that it misses nothing.
    pub(super) fn follow(&self, sharer: &Sharer) -> Arc<Signals> {
        let is_first = sharer.begin_following();
        let (signals, mut state) = (Arc::<Signals>::default(), self.state.lock());
        signals.with(|raised| raised.revocations = state.known(is_first));
        state.members.retain(|member| member.strong_count() > 0);
        state.members.push(Arc::downgrade(&signals));
        signals
    }

    /// Handles that a client becomes a member: if its grants are known to be revoked, and it has a right again, the others are
    /// told that. Whether they may have been revoked is asked when it is named holders.
    pub(super) fn handle_joined(self: &Arc<Self>, sharer: &Arc<Sharer>) {
        let Some(key) = sharer.key() else { return };
        let is_lost = self.state.lock().is_lost(&key);
        if is_lost == Some(true) {
            self.handle_named(key, sharer);
        }
    }

    /// Handles that the taker with this key is to be named holders, with grants. If earlier ones were revoked, and it has a
    /// right again, holders are told that. Returns whether it has one, as far as is known: else the grants are of no use.
    pub(super) fn handle_named(self: &Arc<Self>, key: [u8; 32], sharer: &Arc<Sharer>) -> bool {
        let mut state = self.state.lock();
        if state.may_be_lost(&key) {
            drop(state); // Not under the lock: a token is verified again.
            if !sharer.may_take(&self.topic) {
                return false;
            }
            state = self.state.lock();
            state.tell(key, true);
        }
        state.enter(key, sharer);
        if !std::mem::replace(&mut state.is_looked_after, true) {
            tokio::spawn(look_after(Arc::downgrade(self)));
        }
        true
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

    fn next_number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    /// Records a session of a taker.
    fn enter(&mut self, key: [u8; 32], sharer: &Arc<Sharer>) {
        let number = self.next_number();
        let taker = self.takers.entry(key).or_insert(Taker { number, sessions: vec![] });
        if taker.sessions.iter().any(|known| Arc::ptr_eq(known, sharer)) {
            return;
        }
        if taker.sessions.len() >= SESSIONS_MAX {
            taker.sessions.remove(0);
        }
        taker.sessions.push(Arc::clone(sharer));
        if self.takers.len() > TAKERS_MAX
            && let Some(first) = self.first()
        {
            self.revoke(first);
        }
    }

    /// Whether members were told that the owner of a key lost its right, and not that it has it again; `None` if no change of it
    /// is remembered.
    fn is_lost(&self, key: &[u8; 32]) -> Option<bool> {
        self.changes.get(key).map(|change| !change.is_restored)
    }

    /// The same, if it is not known.
    fn may_be_lost(&self, key: &[u8; 32]) -> bool {
        self.is_lost(key)
            .unwrap_or_else(|| self.has_forgotten && !self.takers.contains_key(key))
    }

    /// What a subscription has to be told of rights that were lost: which are restored. One that is not the first of its session
    /// may have missed each; to the first one, which are lost is enough: revocations end no grants of a later session.
    fn known(&self, is_first: bool) -> BTreeMap<[u8; 32], bool> {
        let takers = self.takers.keys().filter(|_| self.has_forgotten).map(|key| (*key, true));
        let changes = self.changes.iter().map(|(key, change)| (*key, change.is_restored));
        let all = takers.chain(changes).collect::<BTreeMap<_, _>>().into_iter();
        all.filter(|(_, is_restored)| !(is_first && *is_restored)).collect()
    }

    /// Ends the grants of a taker, and tells all members, of each version, and those that join later.
    fn revoke(&mut self, key: [u8; 32]) {
        self.takers.remove(&key);
        self.tell(key, false);
    }

    fn tell(&mut self, key: [u8; 32], is_restored: bool) {
        let number = self.next_number();
        self.changes.insert(key, Change { number, is_restored });
        if self.changes.len() > CHANGES_MAX {
            let oldest = self.changes.iter().min_by_key(|(_, change)| change.number);
            if let Some(oldest) = oldest.map(|(key, _)| *key) {
                self.changes.remove(&oldest);
                self.has_forgotten = true;
            }
        }
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

#[cfg(test)]
mod tests;
