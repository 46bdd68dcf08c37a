//! [`ClientBase`]: the version that a client holds, against which deltas may be sent.

use crate::{
    bases::{DeltaTrial, Hold, VersionKey, WeakBase},
    retained::Retained,
    topic::TopicState,
};
use std::sync::{Arc, Mutex, PoisonError};
use tensor_relay_protocol::Version;

/// The base of one subscription (PROTOCOL.md §6.9).
#[derive(Debug, Default)]
pub(crate) struct ClientBase {
    /// The version that the client holds completely, or the base of the version that it continues.
    base: Option<Hold>,
    /// The version in transfer, which may become the next base.
    next: Option<Hold>,
}

/// A version that chunks may be encoded against. It may be released at any time.
#[derive(Debug, Clone)]
pub(crate) struct DeltaBase {
    pub(crate) version: Version,
    base: WeakBase,
    delta_trial: Arc<Mutex<DeltaTrial>>,
}

impl DeltaBase {
    /// Records that a chunk of `bytes` was compared with it, and whether it is sent as a delta.
    pub(crate) fn note(&self, bytes: u64, is_delta: bool) {
        self.delta_trial
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .note(bytes, is_delta);
    }

    /// The version, while it may be read ([`WeakBase::upgrade`]).
    pub(crate) fn upgrade(&self) -> Option<Arc<Retained>> {
        self.base.upgrade()
    }
}

impl ClientBase {
    /// The base of a client from an earlier connection, if it is still in memory.
    pub(crate) fn new(topic: &TopicState, base: Option<VersionKey>) -> Self {
        Self { base: base.and_then(|key| topic.hold_base(key)).map(Hold::linger), next: None }
    }

    /// The version that the client holds, if it is still in memory.
    pub(crate) fn retained(&self) -> Option<Arc<Retained>> {
        self.base.as_ref()?.retained()
    }

    /// Starts a version; returns the base for its chunks.
    pub(crate) fn begin(&mut self, topic: &TopicState, retained: &Arc<Retained>) -> Option<DeltaBase> {
        self.next = retained.base.may_be.then(|| topic.hold(retained));
        let base = self.base.as_ref()?;
        let (epoch, version) = base.version_key();
        let digest = |retained: &Retained| retained.payload.manifest().digest();
        let is_usable = epoch == retained.id.epoch
            && version < retained.id.version
            && base.retained().is_some_and(|base| digest(&base) == digest(retained));
        is_usable.then(|| DeltaBase {
            version,
            base: base.weak(),
            delta_trial: Arc::clone(topic.delta_trial()),
        })
    }

    /// Handles the client's `Committed` of the current version; `kept` is whether the client keeps a copy.
    pub(crate) fn handle_committed(&mut self, kept: bool) {
        let next = self.next.take();
        self.release();
        match kept {
            true => self.base = next.map(Hold::linger),
            false => drop(next),
        }
    }

    /// Releases both versions: the client holds nothing, or no longer needs it.
    pub(crate) fn release(&mut self) {
        self.next = None;
        self.base.take().into_iter().for_each(Hold::release);
    }
}
