//! [`Versions`]: the versions whose files are known.

use super::failure::Failure;
use super::version::HubVersion;
use std::{collections::HashMap, sync::Arc};
use tensor_relay_client::VersionId;
use tensor_relay_device::Lock;
use tokio::sync::OnceCell;

/// The maximum number of versions that are remembered, and of their tensors, of which each takes about 0.8 KiB: for its
/// place in the manifest and in the header of its file.
const VERSIONS_MAX: usize = 16;
const TENSORS_MAX: usize = 1 << 20;

/// The described versions, of which those that were asked for last are remembered.
#[derive(Debug, Default)]
pub(super) struct Versions(Lock<State>);

#[derive(Debug, Default)]
struct State {
    known: HashMap<Key, Known>,
    clock: u64,
    /// The number of the last version.
    last: u64,
}

/// The number of an origin, and a version of it.
type Key = (usize, VersionId);

#[derive(Debug)]
struct Known {
    version: Arc<OnceCell<Arc<HubVersion>>>,
    number: u64,
    used: u64,
}

impl Versions {
    /// The version, if its files are known.
    pub(super) fn find(&self, origin: usize, id: &VersionId) -> Option<Arc<HubVersion>> {
        let state = self.0.lock();
        state.known.get(&(origin, id.clone()))?.version.get().cloned()
    }

    /// The version, which `describe` finds out about unless it is known; it receives the version's number. Concurrent callers
    /// share one description.
    ///
    /// # Errors
    /// Those of `describe`; the next caller tries again.
    pub(super) async fn get<F>(
        &self,
        origin: usize,
        id: &VersionId,
        describe: impl FnOnce(u64) -> F,
    ) -> Result<Arc<HubVersion>, Failure>
    where
        F: Future<Output = Result<Arc<HubVersion>, Failure>>,
    {
        let (version, number) = self.0.lock().use_or_add((origin, id.clone()));
        version.get_or_try_init(|| describe(number)).await.cloned()
    }
}

impl State {
    fn use_or_add(&mut self, key: Key) -> (Arc<OnceCell<Arc<HubVersion>>>, u64) {
        self.clock += 1;
        if !self.known.contains_key(&key) {
            self.last += 1;
        }
        let (number, used) = (self.last, self.clock);
        let known = self
            .known
            .entry(key)
            .or_insert_with(|| Known { version: Arc::default(), number, used });
        known.used = used;
        let found = (Arc::clone(&known.version), known.number);
        while self.known.len() > VERSIONS_MAX || self.known.len() > 1 && self.tensors() > TENSORS_MAX {
            let oldest = self.known.iter().min_by_key(|(_, known)| known.used);
            let Some(oldest) = oldest.map(|(key, _)| key.clone()) else { break };
            self.known.remove(&oldest);
        }
        found
    }

    fn tensors(&self) -> usize {
        let described = self.known.values().filter_map(|known| known.version.get());
        described.map(|version| version.manifest().tensors().len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensor_relay_client::{Epoch, Topic, Version};

    #[test]
    fn the_last_used_versions_are_remembered_under_their_numbers() {
        let id = |version| VersionId {
            topic: Topic::new("t").unwrap(),
            epoch: Epoch(1),
            version: Version(version),
        };
        let mut state = State::default();
        let (_, first) = state.use_or_add((0, id(1)));
        for version in 2..=VERSIONS_MAX as u64 {
            assert_eq!(state.use_or_add((0, id(version))).1, version);
        }
        assert_eq!(state.use_or_add((0, id(1))).1, first);
        state.use_or_add((1, id(1)));
        let is_known = |version| state.known.contains_key(&(0, id(version)));
        assert!(is_known(1) && !is_known(2) && is_known(3));
    }
}
