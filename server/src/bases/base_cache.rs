//! [`BaseCache`]: the versions that left retention but are in use, within a budget. Pure.

use std::collections::HashMap;
use tensor_relay_protocol::{Epoch, Version, VersionId};

/// Identifies a version among those of all topics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) topic: u64,
    pub(super) epoch: Epoch,
    pub(super) version: Version,
}

impl Key {
    pub(super) fn new(topic: u64, id: &VersionId) -> Self {
        Self { topic, epoch: id.epoch, version: id.version }
    }
}

/// A cache of versions, with the counts of their users, connected or lost.
#[derive(Debug)]
pub(super) struct BaseCache<T> {
    budget_bytes: u64,
    bytes: u64,
    entries: HashMap<Key, Entry<T>>,
    /// The number of versions ever cached, for their order.
    cached_ever: u64,
}

#[derive(Debug)]
struct Entry<T> {
    /// The number of subscriptions that hold it.
    held: u32,
    /// The number of lost subscriptions that held it and may reconnect.
    awaited: u32,
    /// Whether it is still retained.
    is_retained: bool,
    cached: Option<CachedItem<T>>,
}

#[derive(Debug)]
struct CachedItem<T> {
    item: T,
    bytes: u64,
    /// Its place in the order of caching.
    order: u64,
}

impl<T> Default for BaseCache<T> {
    /// A cache without a budget.
    fn default() -> Self {
        Self::new(0)
    }
}

impl<T> BaseCache<T> {
    /// A cache of at most `budget_bytes`.
    pub(super) fn new(budget_bytes: u64) -> Self {
        Self { budget_bytes, bytes: 0, entries: HashMap::new(), cached_ever: 0 }
    }

    /// Adds a user of `key`.
    pub(super) fn hold(&mut self, key: Key, is_retained: bool) {
        let unused = Entry { held: 0, awaited: 0, is_retained, cached: None };
        self.entries.entry(key).or_insert(unused).held += 1;
    }

    /// Records that a lost user of `key` reconnected.
    pub(super) fn handle_reconnected(&mut self, key: Key) {
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.awaited = entry.awaited.saturating_sub(1);
        }
    }

    /// Removes a user of `key`, which may reconnect if it `lingers`. Returns the item if this evicts it.
    pub(super) fn release(&mut self, key: Key, lingers: bool) -> Option<T> {
        let entry = self.entries.get_mut(&key)?;
        entry.held = entry.held.saturating_sub(1);
        entry.awaited += u32::from(lingers);
        let is_available = entry.cached.is_some() || entry.is_retained;
        let is_unneeded = entry.held == 0 && (entry.awaited == 0 || !is_available);
        let entry = is_unneeded.then(|| self.entries.remove(&key))??;
        self.uncache(entry.cached)
    }

    /// Records that `key` is no longer retained. Caches `item` of `bytes`, if it may stay, while it is in use and there
    /// is room: for `items_max` items of its topic, and for all topics within the budget. Returns the evicted items,
    /// which may include this one.
    pub(super) fn leave_retention(
        &mut self,
        key: Key,
        item: Option<T>,
        bytes: u64,
        items_max: u32,
    ) -> Vec<T> {
        let Some(entry) = self.entries.get_mut(&key) else { return item.into_iter().collect() };
        entry.is_retained = false;
        if let (Some(item), None) = (item, &entry.cached) {
            entry.cached = Some(CachedItem { item, bytes, order: self.cached_ever });
            self.cached_ever += 1;
            self.bytes += bytes;
        }
        if entry.held == 0 && entry.cached.is_none() {
            self.entries.remove(&key);
        }
        self.evict_excess(key.topic, items_max)
    }

    /// The item of `key`.
    pub(super) fn get(&self, key: Key) -> Option<&T> {
        Some(&self.entries.get(&key)?.cached.as_ref()?.item)
    }

    /// Whether an item of `topic` has users, or lost users that may reconnect.
    pub(super) fn has_any(&self, topic: u64) -> bool {
        self.entries.keys().any(|key| key.topic == topic)
    }

    /// Releases all items of `topic`.
    pub(super) fn forget(&mut self, topic: u64) -> Vec<T> {
        let keys: Vec<Key> = self.cached_keys(Some(topic)).collect();
        let left = keys.into_iter().filter_map(|key| self.evict(key)).collect();
        for (_, entry) in self.entries.iter_mut().filter(|(key, _)| key.topic == topic) {
            (entry.awaited, entry.is_retained) = (0, false);
        }
        self.entries.retain(|key, entry| key.topic != topic || entry.held > 0);
        left
    }

    /// Releases the items of `topic` that no subscription holds and that are not useful.
    pub(super) fn remove_useless(&mut self, topic: u64, is_useful: impl Fn(&T) -> bool) -> Vec<T> {
        let is_useless = |entry: &Entry<T>| {
            entry.held == 0 && entry.cached.as_ref().is_some_and(|kept| !is_useful(&kept.item))
        };
        let useless = self
            .entries
            .iter()
            .filter(|(key, entry)| key.topic == topic && is_useless(entry));
        let useless: Vec<Key> = useless.map(|(key, _)| *key).collect();
        useless.into_iter().filter_map(|key| self.evict(key)).collect()
    }

    /// Releases every item.
    pub(super) fn clear(&mut self) -> Vec<T> {
        let keys: Vec<Key> = self.cached_keys(None).collect();
        keys.into_iter().filter_map(|key| self.evict(key)).collect()
    }

    /// The number of items, and their bytes.
    pub(super) fn totals(&self) -> (u64, u64) {
        (self.cached_keys(None).count() as u64, self.bytes)
    }

    fn evict_excess(&mut self, topic: u64, items_max: u32) -> Vec<T> {
        let mut left = vec![];
        while self.cached_keys(Some(topic)).count() > items_max as usize {
            left.extend(self.evict_one(Some(topic)));
        }
        while self.bytes > self.budget_bytes {
            left.extend(self.evict_one(None));
        }
        left
    }

    /// Evicts one item: one that no subscription holds before one that is held; among equals, the first cached.
    fn evict_one(&mut self, topic: Option<u64>) -> Option<T> {
        let rank = |key: &Key| {
            let entry = self.entries.get(key)?;
            Some((entry.held > 0, entry.cached.as_ref()?.order))
        };
        let next = self.cached_keys(topic).min_by_key(rank)?;
        self.evict(next)
    }

    /// Evicts one item, if it is cached.
    pub(super) fn evict(&mut self, key: Key) -> Option<T> {
        let entry = self.entries.get_mut(&key)?;
        let kept = entry.cached.take();
        if entry.held == 0 {
            self.entries.remove(&key);
        }
        self.uncache(kept)
    }

    fn uncache(&mut self, kept: Option<CachedItem<T>>) -> Option<T> {
        let kept = kept?;
        self.bytes -= kept.bytes;
        Some(kept.item)
    }

    fn cached_keys(&self, topic: Option<u64>) -> impl Iterator<Item = Key> {
        let entries = self.entries.iter().filter(|(_, entry)| entry.cached.is_some());
        entries
            .map(|(key, _)| *key)
            .filter(move |key| topic.is_none_or(|topic| key.topic == topic))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    fn key_of(topic: u64, version: u64) -> Key {
        Key { topic, epoch: Epoch(1), version: Version(version) }
    }

    #[test]
    fn an_unheld_item_is_not_cached() {
        let mut cache = BaseCache::new(100);
        assert_eq!(cache.leave_retention(key_of(0, 1), Some(1), 10, 2), [1]);
        cache.hold(key_of(0, 2), true);
        assert!(cache.leave_retention(key_of(0, 2), Some(2), 10, 2).is_empty());
        assert_eq!((cache.get(key_of(0, 2)), cache.totals()), (Some(&2), (1, 10)));
        assert_eq!(cache.release(key_of(0, 2), false), Some(2), "no client may reconnect");
        assert_eq!((cache.totals(), cache.entries.len()), ((0, 0), 0));
    }

    #[test]
    fn an_item_stays_for_a_lost_user_within_the_budget() {
        let mut cache = BaseCache::new(100);
        cache.hold(key_of(0, 1), true);
        assert_eq!(cache.release(key_of(0, 1), true), None, "it is retained, and waits");
        assert!(cache.leave_retention(key_of(0, 1), Some(1), 40, 2).is_empty());
        cache.hold(key_of(0, 2), true);
        assert!(cache.leave_retention(key_of(0, 2), Some(2), 40, 2).is_empty());
        assert_eq!(cache.get(key_of(0, 1)), Some(&1));
        cache.hold(key_of(0, 3), true);
        assert_eq!(
            cache.leave_retention(key_of(0, 3), Some(3), 20, 2),
            [1],
            "two of a topic, and nobody holds 1"
        );
        cache.hold(key_of(1, 1), true);
        assert_eq!(
            cache.leave_retention(key_of(1, 1), Some(4), 41, 2),
            [2],
            "the budget, and 2 is the oldest that is held"
        );
        assert_eq!(cache.totals(), (2, 61));
        cache.release(key_of(1, 1), true);
        assert!(cache.remove_useless(0, |_| false).is_empty(), "3 is held");
        assert!(cache.remove_useless(1, |_| true).is_empty());
        assert_eq!(cache.remove_useless(1, |_| false), [4]);
        assert_eq!(cache.forget(0), [3]);
    }

    #[test]
    fn an_item_waits_for_each_lost_user() {
        let mut cache = BaseCache::new(100);
        for _ in 0..3 {
            cache.hold(key_of(0, 1), true);
        }
        cache.leave_retention(key_of(0, 1), Some(1), 40, 2);
        assert_eq!(cache.release(key_of(0, 1), true), None, "it is lost");
        assert_eq!(cache.release(key_of(0, 1), false), None, "it continues with the next version");
        assert_eq!(cache.release(key_of(0, 1), false), None, "one may come back");
        cache.hold(key_of(0, 1), false);
        cache.handle_reconnected(key_of(0, 1));
        assert_eq!(cache.release(key_of(0, 1), false), Some(1));
        assert!(cache.entries.is_empty());
    }

    #[test]
    fn topics_do_not_evict_each_others_items() {
        let mut cache = BaseCache::new(100);
        for topic in 0..2 {
            cache.hold(key_of(topic, 1), true);
            assert!(cache.leave_retention(key_of(topic, 1), Some(topic), 10, 1).is_empty());
        }
        assert_eq!((cache.totals(), cache.forget(0), cache.totals()), ((2, 20), vec![0], (1, 10)));
        assert_eq!((cache.has_any(0), cache.clear(), cache.totals()), (true, vec![1], (0, 0)), "it is held");
    }

    #[test]
    fn a_retained_item_waits_for_a_lost_user() {
        let mut cache = BaseCache::new(100);
        cache.hold(key_of(0, 1), true);
        cache.release(key_of(0, 1), true);
        assert!(cache.remove_useless(0, |_| false).is_empty(), "retention keeps it");
        assert!(cache.leave_retention(key_of(0, 1), Some(1), 10, 1).is_empty());
        assert_eq!(cache.get(key_of(0, 1)), Some(&1));
    }

    #[derive(Debug, Clone)]
    enum Step {
        Hold(u64, u64),
        ComeBack(u64, u64),
        Release { topic: u64, version: u64, lingers: bool },
        Leave { topic: u64, version: u64, may_stay: bool, bytes: u64 },
        Forget(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        let ids = || (0u64..2, 0u64..6);
        prop_oneof![
            5 => ids().prop_map(|(topic, version)| Step::Hold(topic, version)),
            2 => ids().prop_map(|(topic, version)| Step::ComeBack(topic, version)),
            4 => (ids(), any::<bool>()).prop_map(|((topic, version), lingers)| Step::Release { topic, version, lingers }),
            5 => (ids(), prop::bool::weighted(0.9), 0u64..60)
                .prop_map(|((topic, version), may_stay, bytes)| Step::Leave { topic, version, may_stay, bytes }),
            1 => (0u64..2).prop_map(Step::Forget),
        ]
    }

    proptest! {
        /// After any operations: the bounds hold, no held item is evicted while an unheld one of its topic stays, every
        /// item is cached or was evicted exactly once, and no entry stays without a cause.
        #[test]
        fn held_items_are_cached_within_the_bounds(most in 0u32..4, budget in 0u64..120, steps in prop::collection::vec(step(), 0..80)) {
            let mut cache = BaseCache::new(budget);
            let mut held: HashMap<Key, u32> = HashMap::new();
            let mut awaited: HashMap<Key, u32> = HashMap::new();
            let mut left: HashSet<Key> = HashSet::new();
            let mut here: HashMap<Key, u64> = HashMap::new();
            for step in steps {
                let before: Vec<Key> = cache.cached_keys(None).collect();
                let mut came = None;
                let gone = match step {
                    Step::Hold(topic, version) => {
                        let key = key_of(topic, version);
                        cache.hold(key, !left.contains(&key));
                        *held.entry(key).or_default() += 1;
                        vec![]
                    }
                    Step::ComeBack(topic, version) => {
                        let key = key_of(topic, version);
                        cache.hold(key, !left.contains(&key));
                        cache.handle_reconnected(key);
                        *held.entry(key).or_default() += 1;
                        let waiting = awaited.entry(key).or_default();
                        *waiting = waiting.saturating_sub(1);
                        vec![]
                    }
                    Step::Release { topic, version, lingers } => {
                        let key = key_of(topic, version);
                        let Some(count) = held.get_mut(&key).filter(|count| **count > 0) else { continue };
                        *count -= 1;
                        let waiting = awaited.entry(key).or_default();
                        *waiting += u32::from(lingers);
                        let gone = cache.release(key, lingers);
                        prop_assert_eq!(gone.is_some(), here.contains_key(&key) && *count == 0 && *waiting == 0);
                        gone.into_iter().collect()
                    }
                    Step::Leave { topic, version, may_stay, bytes } => {
                        let key = key_of(topic, version);
                        if !left.insert(key) { continue }
                        came = may_stay.then_some(key);
                        if may_stay { here.insert(key, bytes); }
                        let gone = cache.leave_retention(key, may_stay.then_some(key), bytes, most);
                        let is_held = |key: &Key| held.get(key).copied().unwrap_or(0) > 0;
                        if let Some(worst) = gone.iter().find(|key| is_held(key)) {
                            // The budget is for all topics, the number for each.
                            let spared = cache.cached_keys(None).filter(|key| !is_held(key));
                            prop_assert_eq!(spared.filter(|key| key.topic == worst.topic).count(), 0);
                        }
                        gone
                    }
                    Step::Forget(topic) => {
                        let gone = cache.forget(topic);
                        awaited.retain(|key, _| key.topic != topic);
                        prop_assert_eq!(cache.cached_keys(Some(topic)).count(), 0);
                        gone
                    }
                };
                for key in gone {
                    prop_assert!(before.contains(&key) || came == Some(key));
                    prop_assert!(here.remove(&key).is_some());
                }
                awaited.retain(|key, _| cache.entries.contains_key(key));
                let kept: HashSet<Key> = cache.cached_keys(None).collect();
                prop_assert_eq!(kept, here.keys().copied().collect::<HashSet<_>>());
                let bytes: u64 = here.values().sum();
                prop_assert_eq!(cache.totals(), (here.len() as u64, bytes));
                prop_assert!(bytes <= budget);
                for topic in 0..2 {
                    prop_assert!(cache.cached_keys(Some(topic)).count() <= most as usize);
                    let any = |counts: &HashMap<Key, u32>| counts.iter().any(|(key, count)| key.topic == topic && *count > 0);
                    prop_assert_eq!(cache.has_any(topic), any(&held) || any(&awaited));
                }
                for (key, entry) in &cache.entries {
                    prop_assert_eq!(entry.held, held.get(key).copied().unwrap_or(0));
                    prop_assert_eq!(entry.awaited, awaited.get(key).copied().unwrap_or(0));
                    prop_assert!(entry.held > 0 || entry.cached.is_some() || entry.is_retained, "{:?} has no cause", key);
                    prop_assert!(!entry.is_retained || !left.contains(key));
                }
            }
        }
    }
}
