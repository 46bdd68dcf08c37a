//! [`PublishTimes`]: the times of a topic's last publishes, for the lag of subscribers.

use super::TopicState;
use crate::retained::Retained;
use crate::{status::TopicStatus, swarm::SwarmStatus};
use std::collections::VecDeque;
use tensor_relay_protocol::{Epoch, Version};
use tokio::time::Instant;

/// The maximum number of stored publishes. If a subscriber is further behind, its lag is measured from the oldest one.
const PUBLISHES_MAX: usize = 64;

/// The maximum number of members that a topic's status has.
const MEMBERS_MAX: usize = 64;

/// The times of a topic's last publishes, oldest first.
#[derive(Debug, Default)]
pub(crate) struct PublishTimes {
    last: VecDeque<(Epoch, Version, Instant)>,
    /// The number of all publishes.
    count: u64,
}

/// The lag of a subscriber.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Lag {
    pub(crate) versions: u64,
    /// When the first version that it lacks was published.
    pub(crate) since: Option<Instant>,
}

impl PublishTimes {
    /// Notes that a version was published.
    pub(crate) fn note(&mut self, epoch: Epoch, version: Version, now: Instant) {
        if self.last.len() == PUBLISHES_MAX {
            self.last.pop_front();
        }
        self.last.push_back((epoch, version, now));
        self.count += 1;
    }

    /// When a version was published, if it was one of the last.
    pub(crate) fn of(&self, version: (Epoch, Version)) -> Option<Instant> {
        let found = self.last.iter().rev().find(|(epoch, number, _)| (*epoch, *number) == version);
        found.map(|(_, _, at)| *at)
    }

    /// The number of versions ever published.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// The lag of a subscriber whose newest version is `held`. Without a version of the newest epoch, or with one that
    /// was never published here, it lacks at least one.
    pub(crate) fn lag(&self, held: Option<(Epoch, Version)>) -> Lag {
        let Some(&(epoch, newest, published)) = self.last.back() else { return Lag::default() };
        match held {
            Some(held) if held == (epoch, newest) => Lag::default(),
            Some((held_epoch, version)) if held_epoch == epoch && version < newest => {
                let missing = self.last.iter().find(|(e, v, _)| *e == epoch && *v > version);
                Lag { versions: newest.0 - version.0, since: missing.map(|(_, _, at)| *at) }
            }
            _ => Lag { versions: 1, since: Some(published) },
        }
    }
}

/// The status for operators.
impl TopicState {
    /// The number of versions ever published.
    pub(crate) fn published_count(&self) -> u64 {
        self.state.lock().times.count()
    }

    /// When a version was published, if it was one of the last.
    pub(crate) fn published_at_of(&self, version: (Epoch, Version)) -> Option<Instant> {
        self.state.lock().times.of(version)
    }

    /// The lag of a subscriber whose newest version is `held`.
    pub(crate) fn lag(&self, held: Option<(Epoch, Version)>) -> Lag {
        self.state.lock().times.lag(held)
    }

    /// The topic's current status, with `newest` as its newest version.
    pub(crate) fn status(&self, newest: &Retained) -> TopicStatus {
        let manifest = newest.payload.manifest();
        let members = newest.shared.get().map(|shared| shared.members(MEMBERS_MAX));
        let swarm = SwarmStatus { members: members.unwrap_or_default(), ..self.swarm.status() };
        let state = self.state.lock();
        let published_at = state.times.of((newest.id.epoch, newest.id.version)).or(state.published_at);
        TopicStatus {
            newest: newest.id.clone(),
            tensors: manifest.tensors().len() as u64,
            payload_bytes: manifest.payload_bytes(),
            age: published_at.map(|at| at.elapsed()).unwrap_or_default(),
            retained: state.retention.iter().count() as u64,
            published: state.times.count(),
            subscribers: state.followers,
            publish_problem: state.problem.clone(),
            sent: self.tally.stats(),
            swarm,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[tokio::test(start_paused = true)]
    async fn lag_counts_from_the_first_missing_version() {
        let (mut times, began, epoch) = (PublishTimes::default(), Instant::now(), Epoch(7));
        assert_eq!(times.lag(None), Lag::default(), "nothing was published");
        let at = |version: u64| began + Duration::from_secs(version);
        for version in 1..=100 {
            times.note(epoch, Version(version), at(version));
        }
        assert_eq!(times.count(), 100);
        let lag = |epoch, version| times.lag(Some((epoch, Version(version))));
        assert_eq!(lag(epoch, 100), Lag::default());
        assert_eq!(lag(epoch, 98), Lag { versions: 2, since: Some(at(99)) });
        assert_eq!(
            lag(epoch, 1),
            Lag { versions: 99, since: Some(at(37)) },
            "since the oldest that is stored"
        );
        let one = Lag { versions: 1, since: Some(at(100)) };
        assert_eq!((lag(Epoch(1), 1), times.lag(None), lag(epoch, 101)), (one, one, one));
    }
}
