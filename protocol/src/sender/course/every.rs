//! Mode `every`: all versions, in order.

use super::{
    Next, Published, Seq, Step, Versions, awaited_version, exact_version, is_before, is_up_to, previous,
};
use crate::{EndReason, Epoch, Start, Subscribe, Version};

/// A subscription in mode `every`.
#[derive(Debug)]
pub(in crate::sender) struct Every {
    /// The position after the last version that was sent or skipped.
    pub(super) next: Seq,
    /// The version at which the client asked to start; `None` without one, or once a version was sent.
    awaited: Option<(Epoch, Version)>,
    /// The version that the client requests by its number, until it is sent; `Some(None)` if it was not retained.
    exactly: Option<Option<(Epoch, Version)>>,
    /// How many versions may be sent beyond the newest acknowledged one.
    window: usize,
    /// The last version sent, and its number.
    sent: Seq,
    sent_key: Option<(Epoch, Version)>,
    /// Aborted versions: they will not be acknowledged, so they do not count against the window.
    given_up: Vec<Seq>,
    /// The newest version that the client had when it subscribed. A restarted server may publish it again.
    have: Option<(Epoch, Version)>,
    /// Whether `have` was compared with the version of the same number here, or is no longer relevant. Until then that
    /// version is not skipped.
    is_compared: bool,
    /// The newest acknowledged version, published here or before a restart.
    acknowledged: Option<(Epoch, Version)>,
}

impl Every {
    pub(super) fn new(topic: &impl Versions, subscribe: &Subscribe, begin: Seq) -> Self {
        Self {
            next: begin,
            awaited: awaited_version(topic, subscribe),
            exactly: exact_version(topic, subscribe).map(|found| found.map(|version| version.key())),
            window: subscribe.window as usize,
            sent: begin,
            sent_key: None,
            given_up: vec![],
            have: subscribe.have.map(|have| have.key()),
            is_compared: false,
            acknowledged: None,
        }
    }

    pub(super) fn next<T: Versions>(&mut self, topic: &T) -> Step<T::Version> {
        if let Some(reason) = topic.lost_place() {
            return Step::End(reason);
        }
        if let Some(wanted) = self.exactly.take() {
            let first = topic.first_from(self.next).map(|(_, version)| version.key());
            if wanted.is_none() || wanted != first {
                return Step::End(EndReason::NotFound);
            }
        }
        if self.have.is_some_and(|held| topic.is_behind(held)) {
            (self.have, self.next) = (None, topic.start(Start::Oldest));
        }
        while let Some((seq, version)) = topic.first_from(self.next) {
            let key = version.key();
            if is_up_to(key, self.sent_key) {
                // It was aborted, and published again. On one subscription, numbers rise.
                self.given_up.push(seq);
                self.next = seq.next();
                continue;
            }
            let is_held = is_up_to(key, self.have) && !self.waits_for_comparison(key);
            if !is_held && !is_before(key, self.awaited) {
                break;
            }
            self.next = seq.next();
            if !is_held || is_up_to(key, self.acknowledged) {
                return Step::Acknowledge(key.0, key.1);
            }
        }
        match topic.first_from(self.next) {
            Some((_, version)) if self.waits_for_comparison(version.key()) => Step::Wait,
            Some((seq, version)) if topic.unacknowledged(seq, &mut self.given_up) < self.window => {
                self.is_compared = true; // `have` is no longer relevant.
                (self.sent, self.next, self.awaited) = (seq, seq.next(), None);
                self.sent_key = Some(version.key());
                Step::Send(Next { version, skipped: 0 })
            }
            _ => Step::Wait,
        }
    }

    fn waits_for_comparison(&self, key: (Epoch, Version)) -> bool {
        !self.is_compared && self.have == Some(key)
    }

    pub(super) fn handle_compared(&mut self, topic: &impl Versions, is_same: bool) {
        self.is_compared = true;
        if let Some(held) = self.have.filter(|_| !is_same) {
            let position = topic.find(held).map_or(self.next, |(seq, _)| seq);
            self.next = self.next.min(position);
            self.have = Some(previous(held));
        }
    }

    pub(super) fn handle_acknowledged(&mut self, key: (Epoch, Version)) {
        self.acknowledged = Some(key);
    }

    pub(super) fn handle_given_up(&mut self) {
        self.given_up.push(self.sent);
    }
}
