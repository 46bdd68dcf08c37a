//! Bases: versions of which subscribers hold copies, kept readable so that later versions can be sent as deltas.
//!
//! Retained versions are readable anyway. A version that left retention is cached, within one budget for all topics,
//! while a subscription holds it as its base, or did so when its connection was lost: its client may reconnect within
//! seconds. Without a base, chunks are sent without deltas.

mod base_cache;
mod delta_trial;

pub(crate) use delta_trial::DeltaTrial;

use crate::{base_terms::BaseTerms, retained::Retained, retention::Keep};
use base_cache::{BaseCache, Key};
use std::sync::{
    Arc, Weak,
    atomic::{AtomicU64, Ordering},
};
use tensor_relay_device::Lock;
use tensor_relay_protocol::{Epoch, ManifestDigest, Version};

/// Identifies a version of a topic.
pub(crate) type VersionKey = (Epoch, Version);

/// The counters of bases that left retention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BaseStats {
    /// The number of bases.
    pub versions: u64,
    /// The size of their payloads. Never more than [`Config::base_bytes`](crate::Config::base_bytes).
    pub bytes: u64,
}

/// The bases of all topics of a server.
#[derive(Debug, Default)]
pub(crate) struct Bases {
    budget_bytes: u64,
    cache: Lock<BaseCache<Arc<Retained>>>,
    topics_ever: AtomicU64,
}

/// Released versions. They may be gigabytes, so drop them outside the lock.
#[must_use = "drop it outside of locks"]
#[derive(Debug)]
pub(crate) struct ReleasedVersions(#[expect(dead_code, reason = "it is only dropped")] Vec<Arc<Retained>>);

/// A subscription's reference to one version. If that is the client's base, the version stays cached after the
/// reference is dropped: the client may reconnect and need it.
#[derive(Debug)]
pub(crate) struct Hold {
    bases: Arc<Bases>,
    key: Key,
    retained: Weak<Retained>,
    /// Whether its client may reconnect and need it.
    lingers: bool,
}

/// A base that may be released at any time.
#[derive(Debug, Clone)]
pub(crate) struct WeakBase {
    bases: Arc<Bases>,
    key: Key,
    retained: Weak<Retained>,
}

impl Bases {
    /// Bases of at most `budget_bytes` of payloads.
    pub(crate) fn new(budget_bytes: u64) -> Self {
        Self { budget_bytes, cache: Lock::new(BaseCache::new(budget_bytes)), topics_ever: AtomicU64::new(0) }
    }

    /// A number for a new topic.
    pub(crate) fn number_topic(&self) -> u64 {
        self.topics_ever.fetch_add(1, Ordering::Relaxed)
    }

    /// The terms of a version of `bytes`, of a topic with at most `versions_max` cached bases and retention `keep`.
    /// `may_outlive_retention` is false if its producer waits for its memory, or if it is on a device, where the next
    /// version needs the memory.
    pub(crate) fn terms(
        &self,
        bytes: u64,
        versions_max: u32,
        keep: Keep,
        may_outlive_retention: bool,
    ) -> BaseTerms {
        let may_stay = versions_max > 0 && may_outlive_retention && bytes <= self.budget_bytes;
        let is_retained_with_another = keep.versions > 1 && keep.bytes >= bytes.saturating_mul(2);
        let may_be = versions_max > 0 && bytes > 0 && (may_stay || is_retained_with_another);
        BaseTerms::new(may_be, may_stay, versions_max)
    }

    /// Holds a version of topic number `topic` for a subscription. `is_retained` is whether it is still retained.
    pub(crate) fn hold(self: &Arc<Self>, topic: u64, retained: &Arc<Retained>, is_retained: bool) -> Hold {
        let key = Key::new(topic, &retained.id);
        let left = {
            let mut cache = self.cache.lock();
            cache.hold(key, is_retained);
            match !is_retained && cache.get(key).is_none() {
                true => leave_retention(&mut cache, key, retained),
                false => vec![],
            }
        };
        drop(left); // Outside the lock: it may be gigabytes.
        Hold { bases: Arc::clone(self), key, retained: Arc::downgrade(retained), lingers: false }
    }

    /// Records that a client reconnected and holds its version.
    pub(crate) fn handle_reconnected(&self, topic: u64, (epoch, version): VersionKey) {
        self.cache.lock().handle_reconnected(Key { topic, epoch, version });
    }

    /// A cached version that left retention.
    pub(crate) fn find(&self, topic: u64, (epoch, version): VersionKey) -> Option<Arc<Retained>> {
        self.cache.lock().get(Key { topic, epoch, version }).cloned()
    }

    /// Whether a version that left retention is cached.
    fn is_cached(&self, key: Key) -> bool {
        self.cache.lock().get(key).is_some()
    }

    /// Handles a version that leaves retention: caches it if it is in use. Returns the versions evicted for it.
    pub(crate) fn handle_left_retention(&self, topic: u64, retained: &Arc<Retained>) -> ReleasedVersions {
        ReleasedVersions(leave_retention(&mut self.cache.lock(), Key::new(topic, &retained.id), retained))
    }

    /// Releases all cached versions of a topic: no chunk will be encoded against them.
    pub(crate) fn forget(&self, topic: u64) -> ReleasedVersions {
        ReleasedVersions(self.cache.lock().forget(topic))
    }

    /// Whether a version of this topic is in use, or may be needed by a reconnecting client.
    pub(crate) fn has_any(&self, topic: u64) -> bool {
        self.cache.lock().has_any(topic)
    }

    /// Withdraws a version that left retention, if it is cached.
    pub(crate) fn reclaim(&self, topic: u64, (epoch, version): VersionKey) -> ReleasedVersions {
        let taken = self.cache.lock().evict(Key { topic, epoch, version });
        taken.iter().for_each(|retained| retained.base.withdraw());
        ReleasedVersions(Vec::from_iter(taken))
    }

    /// Records that a version with this manifest was published: cached versions with another manifest are useless to
    /// clients that reconnect.
    pub(crate) fn handle_published(&self, topic: u64, manifest: ManifestDigest) -> ReleasedVersions {
        let is_useful = |base: &Arc<Retained>| base.payload.manifest().digest() == manifest;
        ReleasedVersions(self.cache.lock().remove_useless(topic, is_useful))
    }

    /// Releases all cached versions, for a new one that needs memory. Returns whether there were any.
    pub(crate) fn release_all(&self) -> bool {
        let left = self.cache.lock().clear();
        !left.is_empty()
    }

    /// The counters of cached versions.
    pub(crate) fn stats(&self) -> BaseStats {
        let (versions, bytes) = self.cache.lock().totals();
        BaseStats { versions, bytes }
    }
}

/// Caches a version that is no longer retained, if it may stay. Returns the versions evicted for it.
fn leave_retention(
    cache: &mut BaseCache<Arc<Retained>>,
    key: Key,
    retained: &Arc<Retained>,
) -> Vec<Arc<Retained>> {
    let terms = &retained.base;
    let item = terms.may_stay().then(|| Arc::clone(retained));
    cache.leave_retention(key, item, retained.payload.manifest().payload_bytes(), terms.versions_max)
}

impl Hold {
    /// Its epoch and number.
    pub(crate) fn version_key(&self) -> VersionKey {
        (self.key.epoch, self.key.version)
    }

    /// The version, if it is still in memory.
    pub(crate) fn retained(&self) -> Option<Arc<Retained>> {
        self.retained.upgrade()
    }

    /// A reference to the version for the time of a transfer.
    pub(crate) fn weak(&self) -> WeakBase {
        WeakBase { bases: Arc::clone(&self.bases), key: self.key, retained: Weak::clone(&self.retained) }
    }

    /// Marks the version as completely held by the client, which may reconnect and need it.
    pub(crate) fn linger(mut self) -> Self {
        self.lingers = true;
        self
    }

    /// Releases the version: its client will not reconnect for it.
    pub(crate) fn release(mut self) {
        self.lingers = false;
    }
}

impl WeakBase {
    /// The version, while it is retained or cached. After that it must not be read, even if it is still in memory: its
    /// producer may wait for the memory. Hold the result for one comparison only.
    pub(crate) fn upgrade(&self) -> Option<Arc<Retained>> {
        let retained = self.retained.upgrade()?;
        let may_be_read = !retained.has_left_retention() || self.bases.is_cached(self.key);
        may_be_read.then_some(retained)
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let left = self.bases.cache.lock().release(self.key, self.lingers);
        drop(left);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_readable_versions_may_be_bases() {
        let bases = Bases::new(100);
        let all = u64::MAX;
        for (bytes, versions_max, (versions, kept_bytes), may_outlive, expected) in [
            (100, 1, (1, all), true, (true, true)),
            (101, 1, (1, all), true, (false, false)),
            (101, 1, (2, 202), true, (true, false)),
            (101, 1, (2, 201), true, (false, false)),
            (100, 1, (1, all), false, (false, false)),
            (100, 1, (2, all), false, (true, false)),
            (100, 0, (2, all), true, (false, false)),
            (0, 1, (2, all), true, (false, true)),
        ] {
            let keep = Keep { versions, bytes: kept_bytes };
            let terms = bases.terms(bytes, versions_max, keep, may_outlive);
            let what = format!("{bytes} bytes, {versions_max} bases, {keep:?}, {may_outlive}");
            assert_eq!((terms.may_be, terms.may_stay()), expected, "{what}");
        }
        assert_ne!(bases.number_topic(), bases.number_topic());
    }
}
