//! Snapshots held by the user: their number and its bound.

use bytes::Bytes;
use std::{collections::BTreeMap, sync::Arc};
use tensor_relay_device::{HostBytes, Lock};
use tensor_relay_protocol::VersionId;
use tokio::sync::Notify;

/// Counts the snapshots of one subscription that the user holds.
#[derive(Debug, Default)]
pub(crate) struct HoldCounter {
    state: Lock<State>,
    dropped: Notify,
}

#[derive(Debug, Default)]
struct State {
    versions_by_key: BTreeMap<u64, VersionId>,
    /// The key of the next version: later versions have higher keys.
    next_key: u64,
}

impl HoldCounter {
    /// The versions that the user holds, in the order in which they were taken.
    pub(crate) fn versions(&self) -> Vec<VersionId> {
        self.state.lock().versions_by_key.values().cloned().collect()
    }

    pub(crate) fn count(&self) -> usize {
        self.state.lock().versions_by_key.len()
    }

    /// Waits until the user drops a snapshot, or has dropped one since the last wait. Cancel safe.
    pub(crate) async fn dropped(&self) {
        self.dropped.notified().await;
    }

    /// Wraps a payload for the user: it counts as held until the last reference to any of its bytes is dropped.
    pub(crate) fn count_payload(self: &Arc<Self>, id: VersionId, payload: HostBytes) -> HostBytes {
        let held = self.hold(id);
        match payload {
            HostBytes::Stable(payload) => Bytes::from_owner(HeldBytes { payload, _held: held }).into(),
            HostBytes::Volatile(payload) => payload.keep(held).into(),
        }
    }

    /// Counts one more held version until the result is dropped.
    pub(crate) fn hold(self: &Arc<Self>, id: VersionId) -> HeldVersion {
        let mut state = self.state.lock();
        let key = state.next_key;
        state.next_key += 1;
        state.versions_by_key.insert(key, id);
        HeldVersion { key, holding: Arc::clone(self) }
    }
}

/// Bytes held by the user. Fields are dropped in order: the memory is freed before the version stops counting as held.
struct HeldBytes {
    payload: Bytes,
    _held: HeldVersion,
}

impl AsRef<[u8]> for HeldBytes {
    fn as_ref(&self) -> &[u8] {
        &self.payload
    }
}

/// One version that the user holds.
#[derive(Debug)]
pub(crate) struct HeldVersion {
    key: u64,
    holding: Arc<HoldCounter>,
}

impl Drop for HeldVersion {
    fn drop(&mut self) {
        self.holding.state.lock().versions_by_key.remove(&self.key);
        self.holding.dropped.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensor_relay_device::{Region, VolatileBytes};
    use tensor_relay_protocol::{Epoch, Topic, Version};

    #[test]
    fn a_version_is_held_until_its_last_slice_is_dropped() {
        let holding = Arc::new(HoldCounter::default());
        let id = VersionId { topic: Topic::new("t").unwrap(), epoch: Epoch(1), version: Version(7) };
        let region = || Region::from_owner(b"abcdef".to_vec());
        for payload in [HostBytes::from(region().freeze()), VolatileBytes::from(region()).into()] {
            let payload = holding.count_payload(id.clone(), payload);
            let slice = payload.slice(2..4);
            drop(payload);
            assert_eq!(holding.versions(), std::slice::from_ref(&id));
            let mut copy = [0; 2];
            slice.copy_to(&mut copy);
            assert_eq!(&copy, b"cd");
            drop(slice);
            assert_eq!(holding.count(), 0);
        }
    }
}
