//! [`Versions`]: the versions whose files are known.

use super::{failure::Failure, recent::Recent, version::HubVersion};
use std::sync::Arc;
use tensor_relay_client::{InstanceId, VersionId};
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
    known: Recent<Key, Known>,
    /// The number of the last version.
    last: u64,
}

/// A version of a server process. Another process may have other content under its epoch and number, as after a
/// restored backup, and so may a relay whose origin was restored.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Key {
    /// The number of the origin.
    pub(super) origin: usize,
    pub(super) instance: InstanceId,
    /// The count of [`Newest::reversals`](super::origin::Newest::reversals).
    pub(super) reversals: u64,
    pub(super) id: VersionId,
}

#[derive(Debug)]
struct Known {
    version: Arc<OnceCell<Arc<HubVersion>>>,
    number: u64,
}

impl Versions {
    /// The version, if its files are known.
    pub(super) fn find(&self, key: &Key) -> Option<Arc<HubVersion>> {
        self.0.lock().known.get(key)?.version.get().cloned()
    }

    /// The version, which `describe` finds out about unless it is known; it receives the version's number. Concurrent callers
    /// share one description.
    ///
    /// # Errors
    /// Those of `describe`; the next caller tries again.
    pub(super) async fn get<F>(
        &self,
        key: Key,
        describe: impl FnOnce(u64) -> F,
    ) -> Result<Arc<HubVersion>, Failure>
    where
        F: Future<Output = Result<Arc<HubVersion>, Failure>>,
    {
        let (version, number) = self.0.lock().use_or_add(key);
        version.get_or_try_init(|| describe(number)).await.cloned()
    }
}

impl State {
    fn use_or_add(&mut self, key: Key) -> (Arc<OnceCell<Arc<HubVersion>>>, u64) {
        let found = match self.known.get(&key) {
            Some(known) => (Arc::clone(&known.version), known.number),
            None => {
                self.last += 1;
                let (version, number) = (Arc::default(), self.last);
                self.known.insert(key, Known { version: Arc::clone(&version), number });
                (version, number)
            }
        };
        let is_over = |known: usize, tensors| known > VERSIONS_MAX || known > 1 && tensors > TENSORS_MAX;
        while is_over(self.known.values().len(), self.tensors()) {
            self.known.remove_oldest(|_| true);
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

    fn key(origin: usize, version: u64) -> Key {
        let id = VersionId { topic: Topic::new("t").unwrap(), epoch: Epoch(1), version: Version(version) };
        Key { origin, instance: InstanceId([1; 16]), reversals: 0, id }
    }

    #[test]
    fn the_last_used_versions_are_remembered_under_their_numbers() {
        let versions = Versions::default();
        let number = |key| versions.0.lock().use_or_add(key).1;
        let first = number(key(0, 1));
        for version in 2..=VERSIONS_MAX as u64 {
            assert_eq!(number(key(0, version)), version);
        }
        assert_eq!(number(key(0, 1)), first);
        assert!(versions.find(&key(0, 2)).is_none(), "its files are not known");
        let last = number(key(1, 1));
        assert_eq!([number(key(0, 1)), number(key(0, 2))], [1, 2], "they were used");
        assert_eq!(number(key(0, 3)), last + 1, "it was forgotten");
    }

    #[test]
    fn other_content_under_a_number_is_another_version() {
        let versions = Versions::default();
        let number = |key| versions.0.lock().use_or_add(key).1;
        let restarted = Key { instance: InstanceId([2; 16]), ..key(0, 2) };
        let reversed = Key { reversals: 1, ..key(0, 2) };
        assert_eq!([number(key(0, 1)), number(key(0, 2)), number(restarted)], [1, 2, 3]);
        assert_eq!([number(key(1, 2)), number(reversed), number(key(0, 2))], [4, 5, 2]);
    }
}
