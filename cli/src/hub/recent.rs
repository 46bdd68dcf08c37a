//! [`Recent`]: entries of which those that were used last are kept.

use std::{collections::HashMap, hash::Hash};

/// Entries by key, and the order in which they were used.
#[derive(Debug)]
pub(super) struct Recent<K, V> {
    entries: HashMap<K, (u64, V)>,
    /// Counts uses.
    clock: u64,
}

impl<K, V> Default for Recent<K, V> {
    fn default() -> Self {
        Self { entries: HashMap::new(), clock: 0 }
    }
}

impl<K: Eq + Hash + Clone, V> Recent<K, V> {
    /// An entry, which is used now.
    pub(super) fn get(&mut self, key: &K) -> Option<&mut V> {
        self.clock += 1;
        let (used, value) = self.entries.get_mut(key)?;
        *used = self.clock;
        Some(value)
    }

    /// Adds an entry, which is used now. Returns the one that had its key.
    pub(super) fn insert(&mut self, key: K, value: V) -> Option<V> {
        self.clock += 1;
        self.entries.insert(key, (self.clock, value)).map(|(_, replaced)| replaced)
    }

    pub(super) fn remove(&mut self, key: &K) -> Option<V> {
        self.entries.remove(key).map(|(_, value)| value)
    }

    /// Removes, of the entries that `may_go`, the one that was not used for the longest time.
    pub(super) fn remove_oldest(&mut self, may_go: impl Fn(&V) -> bool) -> Option<V> {
        let candidates = self.entries.iter().filter(|(_, (_, value))| may_go(value));
        let oldest = candidates.min_by_key(|(_, (used, _))| *used).map(|(key, _)| key.clone())?;
        self.remove(&oldest)
    }

    pub(super) fn values(&self) -> impl ExactSizeIterator<Item = &V> {
        self.entries.values().map(|(_, value)| value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_used_last_stays() {
        let mut recent = Recent::default();
        for value in ["a", "b", "c"] {
            assert_eq!(recent.insert(value, value), None);
        }
        assert_eq!(recent.get(&"a"), Some(&mut "a"));
        assert_eq!(recent.remove_oldest(|value| *value != "b"), Some("c"));
        assert_eq!(recent.remove_oldest(|_| true), Some("b"));
        assert_eq!(recent.get(&"b"), None);
        assert_eq!(recent.insert("a", "d"), Some("a"));
        assert_eq!(recent.remove(&"a"), Some("d"));
        assert_eq!(recent.values().len(), 0);
        assert_eq!(recent.remove_oldest(|_| true), None);
    }
}
