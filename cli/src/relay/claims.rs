//! [`Claims`]: which origin a topic comes from, if several may have it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};
use tensor_relay_client::{Epoch, Topic, Version};
use tensor_relay_device::Lock;
use tokio::sync::watch;

/// The origins that each topic may come from, by their numbers. It comes from the first of those that have it and are not
/// lost; if there is none, from the first that has it, or else from the first that does not, which may have it later.
#[derive(Debug, Default)]
pub(super) struct Claims {
    state: Lock<State>,
    changed: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct State {
    origins: BTreeMap<Topic, BTreeMap<usize, Standing>>,
    lost: BTreeSet<usize>,
}

/// What an origin has of a topic, by its last list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Standing {
    /// A version that may be relayed.
    Has,
    /// Nothing that is listed.
    Absent,
    /// An earlier version of the epoch that is here from another origin: nothing comes from it.
    Behind,
}

/// An origin's claim to a topic, until it is dropped.
#[derive(Debug)]
pub(super) struct Claim {
    claims: Arc<Claims>,
    topic: Topic,
    origin: usize,
}

impl Standing {
    /// The standing of an origin that lists this version of a topic as its newest one, if it lists the topic. `other` is
    /// the version that is here, if it is not from this origin.
    pub(super) fn of(listed: Option<(Epoch, Version)>, other: Option<(Epoch, Version)>) -> Self {
        match (listed, other) {
            (None, _) => Self::Absent,
            (Some((epoch, version)), Some((other_epoch, other)))
                if epoch == other_epoch && version < other =>
            {
                Self::Behind
            }
            _ => Self::Has,
        }
    }
}

impl Claims {
    /// Whether an origin claims `topic`.
    pub(super) fn has(&self, topic: &Topic) -> bool {
        self.state.lock().origins.contains_key(topic)
    }

    /// Claims `topic` for the origin with this number, which does not have it as far as is known.
    pub(super) fn claim(self: &Arc<Self>, topic: &Topic, origin: usize) -> Claim {
        let mut state = self.state.lock();
        let of_topic = state.origins.entry(topic.clone()).or_default();
        of_topic.entry(origin).or_insert(Standing::Absent);
        drop(state);
        self.changed.send_replace(());
        Claim { claims: Arc::clone(self), topic: topic.clone(), origin }
    }

    /// The topics that the origin with this number claims.
    pub(super) fn of(&self, origin: usize) -> Vec<Topic> {
        let state = self.state.lock();
        let claimed = state.origins.iter().filter(|(_, origins)| origins.contains_key(&origin));
        claimed.map(|(topic, _)| topic.clone()).collect()
    }

    /// Whether the origin with this number claims a topic that it does not have.
    pub(super) fn is_waiting(&self, origin: usize) -> bool {
        let state = self.state.lock();
        let mut standings = state.origins.values().filter_map(|origins| origins.get(&origin));
        standings.any(|standing| *standing != Standing::Has)
    }

    /// Records what the origin with this number has of a topic, if it claims it.
    pub(super) fn set_standing(&self, topic: &Topic, origin: usize, standing: Standing) {
        let mut state = self.state.lock();
        let known = state.origins.get_mut(topic).and_then(|origins| origins.get_mut(&origin));
        let has_changed = known.is_some_and(|known| std::mem::replace(known, standing) != standing);
        drop(state);
        if has_changed {
            self.changed.send_replace(());
        }
    }

    /// Whether the origin with this number is lost.
    pub(super) fn is_lost(&self, origin: usize) -> bool {
        self.state.lock().lost.contains(&origin)
    }

    /// Records whether the origin with this number is lost, so that its topics come from others.
    pub(super) fn set_lost(&self, origin: usize, is_lost: bool) {
        let mut state = self.state.lock();
        let has_changed = match is_lost {
            true => state.lost.insert(origin),
            false => state.lost.remove(&origin),
        };
        drop(state);
        if has_changed {
            self.changed.send_replace(());
        }
    }
}

impl State {
    /// The origin that a topic comes from, if any.
    fn first(&self, topic: &Topic) -> Option<usize> {
        let usable = self
            .origins
            .get(topic)?
            .iter()
            .filter(|(_, standing)| **standing != Standing::Behind);
        let rank = |(origin, standing): (&usize, &Standing)| {
            (*standing == Standing::Absent, self.lost.contains(origin), *origin)
        };
        usable.map(rank).min().map(|(.., origin)| origin)
    }
}

impl Claim {
    /// Whether the topic comes from this origin.
    pub(super) fn is_first(&self) -> bool {
        self.claims.state.lock().first(&self.topic) == Some(self.origin)
    }

    /// Records what the origin has of the topic.
    pub(super) fn set_standing(&self, standing: Standing) {
        self.claims.set_standing(&self.topic, self.origin, standing);
    }

    /// Waits until the topic comes from this origin, or until it does not. Cancel safe.
    pub(super) async fn wait(&self, comes_from_it: bool) {
        let mut changes = self.claims.changed.subscribe();
        while self.is_first() != comes_from_it {
            let _ = changes.changed().await; // `claims` has the sender.
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut state = self.claims.state.lock();
        if let Some(of_topic) = state.origins.get_mut(&self.topic) {
            of_topic.remove(&self.origin);
            if of_topic.is_empty() {
                state.origins.remove(&self.topic);
            }
        }
        drop(state);
        self.claims.changed.send_replace(());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// A claim of an origin that has the topic.
    fn claim(claims: &Arc<Claims>, topic: &Topic, origin: usize) -> Claim {
        let claim = claims.claim(topic, origin);
        claim.set_standing(Standing::Has);
        claim
    }

    #[tokio::test(start_paused = true)]
    async fn a_topic_comes_from_the_first_origin_that_has_it_and_is_not_lost() {
        let (claims, topic) = (Arc::<Claims>::default(), Topic::new("t").unwrap());
        let second = claim(&claims, &topic, 1);
        second.wait(true).await;
        let first = claim(&claims, &topic, 0);
        second.wait(false).await;
        first.wait(true).await;
        let waiting = tokio::time::timeout(Duration::from_secs(9), second.wait(true)).await;
        assert!(waiting.is_err());
        claims.set_lost(0, true);
        first.wait(false).await;
        second.wait(true).await;
        claims.set_lost(1, true);
        first.wait(true).await;
        second.wait(false).await;
        claims.set_lost(0, false);
        first.wait(true).await;
        drop(first);
        second.wait(true).await;
        drop(second);
        assert!(claims.state.lock().origins.is_empty());
    }

    #[test]
    fn an_origin_that_does_not_have_a_topic_gives_way_to_one_that_has() {
        let (claims, topic) = (Arc::<Claims>::default(), Topic::new("t").unwrap());
        let first = claims.claim(&topic, 0);
        assert!(first.is_first() && claims.is_waiting(0), "it may have it later");
        let second = claim(&claims, &topic, 1);
        assert!(second.is_first() && !first.is_first());
        claims.set_lost(1, true);
        assert!(second.is_first(), "the other one does not have it");
        claims.set_standing(&topic, 0, Standing::Has);
        assert!(first.is_first() && !claims.is_waiting(0));
        claims.set_lost(1, false);
        claims.set_standing(&topic, 0, Standing::Absent);
        assert!(second.is_first(), "it has lost the topic, as after its restart");
        assert_eq!((claims.of(0), claims.of(2)), (vec![topic], vec![]));
    }

    #[test]
    fn nothing_comes_from_an_origin_that_is_behind_another_one() {
        let (claims, topic) = (Arc::<Claims>::default(), Topic::new("t").unwrap());
        let at = |epoch, version| Some((Epoch(epoch), Version(version)));
        let behind = Standing::of(at(1, 5), at(1, 6));
        assert_eq!(behind, Standing::Behind);
        for listed in [at(1, 6), at(1, 7), at(2, 1)] {
            assert_eq!(Standing::of(listed, at(1, 6)), Standing::Has);
        }
        assert_eq!(
            (Standing::of(at(1, 5), None), Standing::of(None, at(1, 6))),
            (Standing::Has, Standing::Absent)
        );
        let (first, second) = (claim(&claims, &topic, 0), claims.claim(&topic, 1));
        second.set_standing(behind);
        claims.set_lost(0, true);
        assert!(first.is_first() && !second.is_first());
        drop(first);
        assert!(!second.is_first(), "also if there is no other one");
        second.set_standing(Standing::Has);
        assert!(second.is_first());
    }
}
