//! [`ClientBase`]: the version that a client holds, against which deltas may be sent.

use crate::{
    bases::{DeltaTrial, Hold, VersionKey, WeakBase},
    retained::Retained,
    topic::TopicState,
};
use std::sync::Arc;
use tensor_relay_device::Lock;
use tensor_relay_protocol::Version;
use tensor_relay_transport::sending::{DeltaBase, Offered};

/// The base of one subscription (PROTOCOL.md §6.9).
#[derive(Debug, Default)]
pub(crate) struct ClientBase {
    /// The version that the client holds completely, or the base of the version that it continues.
    base: Option<Hold>,
    /// The version in transfer, which may become the next base.
    next: Option<Hold>,
}

/// The base of a version's chunks.
#[derive(Debug)]
struct BaseOfVersion {
    version: Version,
    base: WeakBase,
    delta_trial: Arc<Lock<DeltaTrial>>,
}

impl DeltaBase for BaseOfVersion {
    fn version(&self) -> Version {
        self.version
    }

    fn note(&self, bytes: u64, is_delta: bool) {
        self.delta_trial.lock().note(bytes, is_delta);
    }

    fn upgrade(&self) -> Option<Arc<dyn Offered>> {
        Some(self.base.upgrade()?)
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
    pub(crate) fn begin(
        &mut self,
        topic: &TopicState,
        retained: &Arc<Retained>,
    ) -> Option<Box<dyn DeltaBase>> {
        self.next = retained.base.may_be.then(|| topic.hold(retained));
        let base = self.base.as_ref()?;
        let (epoch, version) = base.version_key();
        let digest = |retained: &Retained| retained.payload.manifest().digest();
        let is_usable = epoch == retained.id.epoch
            && version < retained.id.version
            && base.retained().is_some_and(|base| digest(&base) == digest(retained));
        if !is_usable {
            return None;
        }
        let delta_trial = Arc::clone(topic.delta_trial());
        Some(Box::new(BaseOfVersion { version, base: base.weak(), delta_trial }))
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
