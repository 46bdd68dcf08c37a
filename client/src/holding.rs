//! What a user holds: the snapshots that were taken and not dropped, within a bound.

use bytes::Bytes;
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use tensor_relay_protocol::VersionId;
use tokio::sync::Notify;

/// Counts the snapshots of one subscription that the user holds.
#[derive(Debug, Default)]
pub(crate) struct Holding {
    state: Mutex<State>,
    dropped: Notify,
}

#[derive(Debug, Default)]
struct State {
    versions: BTreeMap<u64, VersionId>,
    ever: u64,
}

impl Holding {
    /// Which versions the user holds, oldest first.
    pub(crate) fn versions(&self) -> Vec<VersionId> {
        self.state().versions.values().cloned().collect()
    }

    pub(crate) fn count(&self) -> usize {
        self.state().versions.len()
    }

    /// Waits until the user dropped one since the last wait. Cancel safe.
    pub(crate) async fn dropped(&self) {
        self.dropped.notified().await;
    }

    /// Hands `payload` to the user: it counts until the last reference to any of its bytes is gone.
    pub(crate) fn hand_over(self: &Arc<Self>, id: VersionId, payload: Bytes) -> Bytes {
        Bytes::from_owner(Handed { payload, _held: self.hold(id) })
    }

    /// Counts one more, until what this gives is dropped.
    pub(crate) fn hold(self: &Arc<Self>, id: VersionId) -> Held {
        let mut state = self.state();
        let number = state.ever;
        state.ever += 1;
        state.versions.insert(number, id);
        Held { number, holding: Arc::clone(self) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes in the user's hands. Fields are dropped in order: whoever sees that it is held no more finds its memory free.
struct Handed {
    payload: Bytes,
    _held: Held,
}

impl AsRef<[u8]> for Handed {
    fn as_ref(&self) -> &[u8] {
        &self.payload
    }
}

/// One version that the user holds.
#[derive(Debug)]
pub(crate) struct Held {
    number: u64,
    holding: Arc<Holding>,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.holding.state().versions.remove(&self.number);
        self.holding.dropped.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensor_relay_protocol::{Epoch, Topic, Version};

    #[test]
    fn a_version_is_held_until_its_last_slice_is_gone() {
        let holding = Arc::new(Holding::default());
        let id = VersionId { topic: Topic::new("t").unwrap(), epoch: Epoch(1), version: Version(7) };
        let payload = holding.hand_over(id.clone(), Bytes::from_static(b"abcdef"));
        let slice = payload.slice(2..4);
        drop(payload);
        assert_eq!(holding.versions(), [id]);
        assert_eq!(&slice[..], b"cd");
        drop(slice);
        assert_eq!(holding.count(), 0);
    }
}
