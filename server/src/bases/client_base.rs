//! What the client of one subscription holds, and so what it may be sent deltas against.

use super::{Bases, DeltaTrial, Hold, Key};
use crate::topic::{Retained, TopicState};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use tensor_relay_protocol::{Epoch, Version};

/// Names a version of a topic.
pub(crate) type VersionKey = (Epoch, Version);

/// The base of one subscription (PROTOCOL.md §6.9).
#[derive(Debug, Default)]
pub(crate) struct ClientBase {
    /// The version that the client holds whole, or what it lacks of the version that it continues.
    base: Option<Hold>,
    /// The version under way: its client will hold it next.
    coming: Option<Hold>,
}

/// The version that chunks may be coded against. It may be gone at any time.
#[derive(Debug, Clone)]
pub(crate) struct DeltaBase {
    pub(crate) version: Version,
    key: Key,
    retained: Weak<Retained>,
    bases: Arc<Bases>,
    worth: Arc<Mutex<DeltaTrial>>,
}

impl DeltaBase {
    fn new(hold: &Hold, worth: &Arc<Mutex<DeltaTrial>>) -> Self {
        let Hold { key, retained, bases, .. } = hold;
        Self {
            version: key.version,
            key: *key,
            retained: Weak::clone(retained),
            bases: Arc::clone(bases),
            worth: Arc::clone(worth),
        }
    }

    /// Takes the news that a chunk of `bytes` was compared with it, and whether it travels as a delta.
    pub(crate) fn note(&self, bytes: u64, is_delta: bool) {
        self.worth.lock().unwrap_or_else(PoisonError::into_inner).note(bytes, is_delta);
    }

    /// The version, as long as it may be read for this: while it is retained, or kept. Who is still at one that left, for
    /// itself, must not be joined: its producer may wait for the memory. What this gives is held for one comparison.
    pub(crate) fn upgrade(&self) -> Option<Arc<Retained>> {
        let retained = self.retained.upgrade()?;
        let may_be_read = !retained.has_left() || self.bases.is_kept(self.key);
        may_be_read.then_some(retained)
    }
}

impl ClientBase {
    /// The base that a client brings from an earlier connection, if that is still here.
    pub(crate) fn new(topic: &TopicState, base: Option<VersionKey>) -> Self {
        Self { base: base.and_then(|of| topic.hold_base(of)).map(Hold::linger), coming: None }
    }

    /// The version that the client holds, if it is still here.
    pub(crate) fn retained(&self) -> Option<Arc<Retained>> {
        self.base.as_ref()?.retained.upgrade()
    }

    /// Takes the beginning of a version, and says what its chunks may be coded against.
    pub(crate) fn begin(&mut self, topic: &TopicState, retained: &Arc<Retained>) -> Option<DeltaBase> {
        self.coming = retained.base.may_be.then(|| topic.hold(retained));
        let base = self.base.as_ref()?;
        let (epoch, version) = base.of();
        let digest = |retained: &Retained| retained.payload.manifest().digest();
        let is_like_it = epoch == retained.id.epoch
            && version < retained.id.version
            && base.retained.upgrade().is_some_and(|base| digest(&base) == digest(retained));
        is_like_it.then(|| DeltaBase::new(base, topic.worth()))
    }

    /// Takes the client's word that it has the version under way, and whether it keeps a copy.
    pub(crate) fn handle_committed(&mut self, kept: bool) {
        let coming = self.coming.take();
        self.let_go();
        match kept {
            true => self.base = coming.map(Hold::linger),
            false => drop(coming),
        }
    }

    /// Lets everything go: the client holds nothing, or needs it no more.
    pub(crate) fn let_go(&mut self) {
        self.coming = None;
        self.base.take().into_iter().for_each(Hold::let_go);
    }
}
