//! Mode `latest`: always the newest version.

use super::{Next, Published, Seq, Step, Versions, awaited_version, exact_version, is_before, previous};
use crate::{EndReason, Epoch, Start, Subscribe, Version};

/// A subscription in mode `latest`.
#[derive(Debug)]
pub(in crate::sender) struct Latest<V> {
    /// The first wanted version.
    from: Seq,
    /// The version that the client holds partly: it is completed first, while it is retained.
    partial: Option<(Epoch, Version)>,
    /// The version at which the client asked to start; `None` without one, or once a version was sent.
    awaited: Option<(Epoch, Version)>,
    /// The version that the client requests by its number, until it is sent; `Some(None)` if it was not retained.
    exactly: Option<Option<V>>,
    /// The newest version that the client has, or whose transfer was aborted.
    last: Option<(Epoch, Version)>,
    /// The number of versions up to `last`, skipped or aborted, that the client missed since its last commit.
    missed: u64,
}

impl<V: Published + Clone> Latest<V> {
    pub(super) fn new(topic: &impl Versions<Version = V>, subscribe: &Subscribe) -> Self {
        let is_resumed = subscribe.have.is_some() || subscribe.partial.is_some();
        Self {
            // If the subscription is resumed, `last` and `partial` select the version, not `start`.
            from: topic.start(if is_resumed { Start::Oldest } else { subscribe.start }),
            // With `preempt`, an older version is not completed.
            partial: subscribe
                .partial
                .as_ref()
                .filter(|_| !subscribe.preempt)
                .map(|partial| (partial.epoch, partial.version)),
            awaited: awaited_version(topic, subscribe),
            exactly: exact_version(topic, subscribe),
            last: subscribe.have.map(|have| have.key()),
            missed: 0,
        }
    }

    pub(super) fn next(&mut self, topic: &impl Versions<Version = V>) -> Step<V> {
        if let Some(found) = self.exactly.take() {
            self.partial = None; // A part of it is completed with it.
            return found
                .map_or(Step::End(EndReason::NotFound), |version| Step::Send(Next { version, skipped: 0 }));
        }
        self.last = self.last.filter(|held| !topic.is_behind(*held));
        let partial = self.partial.take().and_then(|key| topic.find(key));
        let partial = partial.filter(|(_, version)| self.is_new(version.key()));
        let wanted = partial.or_else(|| topic.newest()).filter(|(seq, version)| {
            *seq >= self.from && self.is_new(version.key()) && !is_before(version.key(), self.awaited)
        });
        match wanted {
            Some((_, version)) => {
                self.awaited = None;
                Step::Send(Next { skipped: self.skipped_before(version.key()), version })
            }
            None => Step::Wait,
        }
    }

    /// Whether this version is newer than `last`, or of another epoch.
    fn is_new(&self, (epoch, version): (Epoch, Version)) -> bool {
        self.last.is_none_or(|(last_epoch, last)| last_epoch != epoch || last < version)
    }

    /// The number of versions that the client misses if it commits this one next.
    fn skipped_before(&self, (epoch, version): (Epoch, Version)) -> u64 {
        let between = match self.last {
            Some((last_epoch, last)) if last_epoch == epoch => version.0.saturating_sub(last.0 + 1),
            _ => 0,
        };
        self.missed + between
    }

    pub(super) fn handle_committed(&mut self, key: (Epoch, Version)) {
        self.last = Some(key);
        self.missed = 0;
    }

    pub(super) fn handle_given_up(&mut self, key: (Epoch, Version)) {
        self.missed = self.skipped_before(key) + 1;
        self.last = Some(key);
    }

    pub(super) fn handle_compared(&mut self, is_same: bool) {
        if !is_same {
            self.last = self.last.map(previous);
        }
    }

    pub(super) fn forget_partial(&mut self) {
        self.partial = None;
    }
}
