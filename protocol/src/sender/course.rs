//! [`Course`]: the versions that a subscription receives, in its mode.

mod every;
mod latest;

use super::{Published, Seq, Versions};
use crate::{EndReason, Epoch, Mode, Start, Subscribe, Version};
use every::Every;
use latest::Latest;

/// The next step of a subscription without a version under way.
#[derive(Debug)]
pub(super) enum Step<V> {
    /// Send this version.
    Send(Next<V>),
    /// Record the reader's acknowledgement of a version that it has, then ask again.
    Acknowledge(Epoch, Version),
    /// Wait until the topic changes or the client sends a message.
    Wait,
    /// The subscription has ended.
    End(EndReason),
}

/// The next version.
#[derive(Debug)]
pub(super) struct Next<V> {
    pub(super) version: V,
    /// The number of versions that the client missed before it.
    pub(super) skipped: u64,
}

/// A subscription's position in its topic.
#[derive(Debug)]
pub(super) enum Course<V> {
    /// Mode `latest`: always the newest version.
    Latest(Latest<V>),
    /// Mode `every`: all versions, in order.
    Every(Every),
}

impl<V: Published + Clone> Course<V> {
    /// The course that `subscribe` requests; in mode `every` from `begin` on.
    pub(super) fn new(topic: &impl Versions<Version = V>, subscribe: &Subscribe, begin: Seq) -> Self {
        match subscribe.mode {
            Mode::Every => Self::Every(Every::new(topic, subscribe, begin)),
            Mode::Latest => Self::Latest(Latest::new(topic, subscribe)),
        }
    }

    /// The next step.
    pub(super) fn next(&mut self, topic: &impl Versions<Version = V>) -> Step<V> {
        // Read before the versions, so that those published before the end are seen.
        let ended = topic.ended();
        let step = match self {
            Self::Latest(latest) => latest.next(topic),
            Self::Every(every) => every.next(topic),
        };
        match (step, ended) {
            (Step::Wait, Some(reason)) if !self.waits_for_client(topic) => Step::End(reason),
            (step, _) => step,
        }
    }

    /// Whether it is that of a reader in mode `every`.
    pub(super) fn is_every(&self) -> bool {
        matches!(self, Self::Every(_))
    }

    /// Why a reader in mode `every` lost its place; `None` if it has not.
    pub(super) fn lost_place(&self, topic: &impl Versions) -> Option<EndReason> {
        self.is_every().then(|| topic.lost_place()).flatten()
    }

    /// Whether another version waits until the transfer of `current` ends.
    pub(super) fn has_later(&self, topic: &impl Versions<Version = V>, current: &V) -> bool {
        match self {
            Self::Latest(_) => topic.newest().is_some_and(|(_, newest)| newest.id() != current.id()),
            Self::Every(every) => topic.first_from(every.next).is_some(),
        }
    }

    /// Records that the client committed this version.
    pub(super) fn handle_committed(&mut self, key: (Epoch, Version)) {
        if let Self::Latest(latest) = self {
            latest.handle_committed(key);
        }
    }

    /// Records that the transfer of this version was aborted.
    pub(super) fn handle_given_up(&mut self, key: (Epoch, Version)) {
        match self {
            Self::Latest(latest) => latest.handle_given_up(key),
            Self::Every(every) => every.handle_given_up(),
        }
    }

    /// Records whether the client's version equals the one of the same number here. If its content differs, the client
    /// counts as having the previous one.
    pub(super) fn handle_compared(&mut self, topic: &impl Versions, is_same: bool) {
        match self {
            Self::Latest(latest) => latest.handle_compared(is_same),
            Self::Every(every) => every.handle_compared(topic, is_same),
        }
    }

    /// Records that the part of a version that the client holds has other content.
    pub(super) fn forget_partial(&mut self) {
        if let Self::Latest(latest) = self {
            latest.forget_partial();
        }
    }

    /// Records that the client acknowledged this version and all before it.
    pub(super) fn handle_acknowledged(&mut self, key: (Epoch, Version)) {
        if let Self::Every(every) = self {
            every.handle_acknowledged(key);
        }
    }

    /// Whether versions remain to be sent in mode `every`: after [`Step::Wait`], they wait for the client's
    /// acknowledgements or for the comparison of its version.
    pub(super) fn waits_for_client(&self, topic: &impl Versions) -> bool {
        matches!(self, Self::Every(every) if topic.first_from(every.next).is_some())
    }
}

/// The version before this one.
fn previous((epoch, version): (Epoch, Version)) -> (Epoch, Version) {
    (epoch, Version(version.0.saturating_sub(1)))
}

/// The first version of a subscription, perhaps not published yet: of the epoch in `start`, or of the topic's current
/// one.
fn awaited_version(topic: &impl Versions, subscribe: &Subscribe) -> Option<(Epoch, Version)> {
    let Start::At(epoch, version) = subscribe.start else { return None };
    let epoch = epoch.or_else(|| Some(topic.newest()?.1.id().epoch))?;
    subscribe.have.is_none().then_some((epoch, version))
}

/// The version that `subscribe` requests by its number and no other in its place, of the epoch in `start` or of the
/// topic's current one: `Some(None)` if it is not retained.
fn exact_version<T: Versions>(topic: &T, subscribe: &Subscribe) -> Option<Option<T::Version>> {
    let Start::Exactly(epoch, version) = subscribe.start else { return None };
    let epoch = epoch.or_else(|| Some(topic.newest()?.1.id().epoch));
    let found = epoch.and_then(|epoch| topic.find_exactly((epoch, version)));
    subscribe.have.is_none().then_some(found)
}

/// Whether `key` precedes the first version to send.
fn is_before(key: (Epoch, Version), awaited: Option<(Epoch, Version)>) -> bool {
    awaited.is_some_and(|(epoch, version)| epoch == key.0 && key.1 < version)
}

/// Whether `key` is this version or an earlier one of its epoch.
fn is_up_to(key: (Epoch, Version), version: Option<(Epoch, Version)>) -> bool {
    version.is_some_and(|(epoch, version)| key.0 == epoch && key.1 <= version)
}
