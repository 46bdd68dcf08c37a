//! [`Topics`]: which topics of an origin are followed, and which may return.

use std::collections::BTreeMap;
use tensor_relay_client::{Epoch, Topic, Version, VersionId};

/// The topics of an origin. Pure: it decides which ones a follower is started for.
#[derive(Debug, Default)]
pub(super) struct Topics {
    /// Those that have a follower, and whether the origin has named them again since: such a topic may have ended and
    /// returned before its follower is done.
    followed: BTreeMap<Topic, bool>,
    /// Those that have ended at their origin and keep their versions, which no watch names again, with the listed
    /// version for which they were followed again, if they were.
    ended: BTreeMap<Topic, Option<(Epoch, Version)>>,
}

/// How a topic is over for its follower.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Over {
    /// It was withdrawn, or has expired: if it returns, a watch names it.
    Gone,
    /// Its publisher ended it: if it returns, a list has another version.
    Ended,
}

impl Topics {
    /// Handles that the origin named a topic. Returns whether to follow it.
    pub(super) fn handle_named(&mut self, topic: &Topic) -> bool {
        if let Some(is_named_again) = self.followed.get_mut(topic) {
            *is_named_again = true;
            return false;
        }
        self.followed.insert(topic.clone(), false);
        true
    }

    /// Handles that a topic's follower is done. Returns whether to follow it again.
    pub(super) fn handle_over(&mut self, topic: &Topic, over: Over) -> bool {
        match over {
            Over::Gone => {
                self.ended.remove(topic);
            }
            Over::Ended => {
                self.ended.entry(topic.clone()).or_default();
            }
        }
        self.followed.remove(topic) == Some(true) && self.handle_named(topic)
    }

    /// Whether a list may show that a topic has returned.
    pub(super) fn may_return(&self) -> bool {
        self.ended.keys().any(|topic| !self.followed.contains_key(topic))
    }

    /// Handles that the origin lists this version as a topic's newest; the relay has `kept`. Returns whether to follow
    /// the topic again. A version that does not arrive is tried once.
    pub(super) fn handle_listed(&mut self, listed: &VersionId, kept: Option<(Epoch, Version)>) -> bool {
        let listed_key = Some((listed.epoch, listed.version));
        if self.followed.contains_key(&listed.topic) || listed_key == kept {
            return false;
        }
        match self.ended.get_mut(&listed.topic) {
            Some(tried) if *tried != listed_key => *tried = listed_key,
            _ => return false,
        }
        self.handle_named(&listed.topic)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(version: u64) -> VersionId {
        VersionId { topic: Topic::new("t").unwrap(), epoch: Epoch(1), version: Version(version) }
    }

    #[test]
    fn a_topic_that_is_named_while_it_is_followed_is_followed_again() {
        let (mut topics, topic) = (Topics::default(), id(1).topic);
        assert!(topics.handle_named(&topic));
        assert!(!topics.handle_named(&topic), "it has a follower");
        assert!(topics.handle_over(&topic, Over::Gone), "it has returned meanwhile");
        assert!(!topics.handle_over(&topic, Over::Gone));
        assert!(topics.handle_named(&topic));
    }

    #[test]
    fn a_topic_that_ended_is_followed_again_with_its_next_version() {
        let (mut topics, topic) = (Topics::default(), id(1).topic);
        let kept = |version| Some((Epoch(1), Version(version)));
        topics.handle_named(&topic);
        assert!(!topics.handle_listed(&id(2), kept(1)), "it has a follower");
        assert!(!topics.may_return() && !topics.handle_over(&topic, Over::Ended) && topics.may_return());
        assert!(!topics.handle_listed(&id(1), kept(1)), "nothing is new");
        assert!(topics.handle_listed(&id(2), kept(1)) && !topics.may_return());
        assert!(!topics.handle_over(&topic, Over::Ended));
        assert!(!topics.handle_listed(&id(2), kept(1)), "it was tried");
        assert!(topics.handle_listed(&id(3), kept(1)));
        topics.handle_over(&topic, Over::Gone);
        assert!(!topics.handle_listed(&id(4), kept(1)) && !topics.may_return(), "a watch names it");
    }
}
