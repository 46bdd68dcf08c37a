//! Bases: versions kept readable because subscribers hold copies of them, so that later ones can be sent as deltas.
//!
//! Retained versions can be read anyway. A version that left retention is kept within one budget for all topics while a
//! subscription holds it as its base, or did so when its connection was lost, since its client may reconnect within
//! seconds. A base that is gone is not an error: chunks are sent whole.

mod base_cache;
mod client_base;
mod delta_trial;

pub(crate) use client_base::{ClientBase, DeltaBase, VersionKey};
pub(crate) use delta_trial::DeltaTrial;

use crate::{retention::Keep, topic::Retained};
use base_cache::{BaseCache, Key};
use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError, Weak,
    atomic::{AtomicBool, AtomicU64, Ordering},
};
use tensor_relay_protocol::ManifestDigest;

/// The versions kept as bases, beyond retention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BaseStats {
    /// Versions that left retention and are kept.
    pub versions: u64,
    /// Their payloads. Never more than [`Config::base_bytes`](crate::Config::base_bytes).
    pub bytes: u64,
}

/// The bases of all topics of a server.
#[derive(Debug, Default)]
pub(crate) struct Bases {
    budget_bytes: u64,
    shelf: Mutex<BaseCache<Arc<Retained>>>,
    topics_ever: AtomicU64,
}

/// Released versions. They may be gigabytes, so they are dropped outside of the lock.
#[must_use = "it is to be dropped outside of locks"]
#[derive(Debug)]
pub(crate) struct ReleasedVersions(#[expect(dead_code, reason = "it is only dropped")] Vec<Arc<Retained>>);

/// Whether and how long a version may serve as a base.
#[derive(Debug)]
pub(crate) struct Terms {
    /// Whether later versions may be encoded against it.
    pub(crate) may_be: bool,
    /// Whether it may be kept after it left retention: its producer does not wait for its memory, and it was not
    /// withdrawn.
    may_stay: AtomicBool,
    /// The most such versions of its topic.
    most: u32,
}

/// A subscription's reference to one version. If that is the client's base, dropping the reference keeps the version:
/// the client may reconnect and need it.
#[derive(Debug)]
pub(crate) struct Hold {
    bases: Arc<Bases>,
    key: Key,
    retained: Weak<Retained>,
    /// Whether its client may reconnect and need it.
    lingers: bool,
}

impl Bases {
    /// Keeps `budget_bytes` of payloads at most.
    pub(crate) fn new(budget_bytes: u64) -> Self {
        Self { budget_bytes, shelf: Mutex::new(BaseCache::new(budget_bytes)), topics_ever: AtomicU64::new(0) }
    }

    /// A number for a new topic.
    pub(crate) fn number_topic(&self) -> u64 {
        self.topics_ever.fetch_add(1, Ordering::Relaxed)
    }

    /// What may become of a version of `bytes`, of a topic that keeps `most` as bases and retains what `keep` says.
    /// `is_ours` says that it lies in memory of the server's own, on the host: else its producer waits for it, or the next
    /// version needs its room on a device.
    pub(crate) fn terms(&self, bytes: u64, most: u32, keep: Keep, is_ours: bool) -> Terms {
        let may_stay = most > 0 && is_ours && bytes <= self.budget_bytes;
        let is_retained_with_another = keep.versions > 1 && keep.bytes >= bytes.saturating_mul(2);
        let may_be = most > 0 && bytes > 0 && (may_stay || is_retained_with_another);
        Terms { may_be, may_stay: may_stay.into(), most }
    }

    /// Holds a version of topic number `topic` for a subscription. `is_retained` says whether retention keeps it.
    pub(crate) fn hold(self: &Arc<Self>, topic: u64, retained: &Arc<Retained>, is_retained: bool) -> Hold {
        let key = Key::new(topic, &retained.id);
        let left = {
            let mut shelf = self.shelf();
            shelf.hold(key, is_retained);
            match !is_retained && shelf.get(key).is_none() {
                true => leave(&mut shelf, key, retained),
                false => vec![],
            }
        };
        drop(left); // Outside of the lock: it may be gigabytes.
        Hold { bases: Arc::clone(self), key, retained: Arc::downgrade(retained), lingers: false }
    }

    /// Records that a client reconnected and holds its version.
    pub(crate) fn come_back(&self, topic: u64, (epoch, version): VersionKey) {
        self.shelf().come_back(Key { topic, epoch, version });
    }

    /// A kept version that left retention.
    pub(crate) fn find(&self, topic: u64, (epoch, version): VersionKey) -> Option<Arc<Retained>> {
        self.shelf().get(Key { topic, epoch, version }).cloned()
    }

    /// Whether a version that left retention is kept.
    fn is_kept(&self, key: Key) -> bool {
        self.shelf().get(key).is_some()
    }

    /// Handles a version that leaves retention: it is kept if it is in use. Returns what is evicted for it.
    pub(crate) fn handle_left(&self, topic: u64, retained: &Arc<Retained>) -> ReleasedVersions {
        ReleasedVersions(leave(&mut self.shelf(), Key::new(topic, &retained.id), retained))
    }

    /// Releases all versions of a topic: nothing will be encoded against them.
    pub(crate) fn forget(&self, topic: u64) -> ReleasedVersions {
        ReleasedVersions(self.shelf().forget(topic))
    }

    /// Whether a version of this topic is in use, or may be needed by a reconnecting client.
    pub(crate) fn has_any(&self, topic: u64) -> bool {
        self.shelf().has_any(topic)
    }

    /// Withdraws a version that left retention, if it is kept.
    pub(crate) fn take_back(&self, topic: u64, (epoch, version): VersionKey) -> ReleasedVersions {
        let taken = self.shelf().evict(Key { topic, epoch, version });
        taken.iter().for_each(|retained| retained.base.withdraw());
        ReleasedVersions(Vec::from_iter(taken))
    }

    /// Records that a version with this manifest was published: kept versions with another one are of no use to clients
    /// that reconnect.
    pub(crate) fn handle_published(&self, topic: u64, manifest: ManifestDigest) -> ReleasedVersions {
        let is_useful = |base: &Arc<Retained>| base.payload.manifest().digest() == manifest;
        ReleasedVersions(self.shelf().remove_useless(topic, is_useful))
    }

    /// Releases everything, for a version that has no room otherwise. Returns whether there was anything.
    pub(crate) fn give_way(&self) -> bool {
        let left = self.shelf().clear();
        !left.is_empty()
    }

    /// The kept versions, beyond retention.
    pub(crate) fn stats(&self) -> BaseStats {
        let (versions, bytes) = self.shelf().kept();
        BaseStats { versions, bytes }
    }

    fn shelf(&self) -> MutexGuard<'_, BaseCache<Arc<Retained>>> {
        self.shelf.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps a version that is no longer retained, if it may stay. Returns what is evicted for it.
fn leave(shelf: &mut BaseCache<Arc<Retained>>, key: Key, retained: &Arc<Retained>) -> Vec<Arc<Retained>> {
    let Terms { may_stay, most, .. } = &retained.base;
    let item = may_stay.load(Ordering::Relaxed).then(|| Arc::clone(retained));
    shelf.leave(key, item, retained.payload.manifest().payload_bytes(), *most)
}

impl Terms {
    /// Withdraws the version: only transfers in progress still hold it.
    pub(crate) fn withdraw(&self) {
        self.may_stay.store(false, Ordering::Relaxed);
    }
}

impl Hold {
    /// Its epoch and number.
    fn of(&self) -> VersionKey {
        (self.key.epoch, self.key.version)
    }

    /// Marks the version as held whole by the client, which may reconnect and need it.
    fn linger(mut self) -> Self {
        self.lingers = true;
        self
    }

    /// Releases the version for good: its client will not reconnect for it.
    fn let_go(mut self) {
        self.lingers = false;
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let left = self.bases.shelf().release(self.key, self.lingers);
        drop(left);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_stays_readable_may_be_a_base() {
        let bases = Bases::new(100);
        let all = u64::MAX;
        for (bytes, most, (versions, kept_bytes), is_ours, expected) in [
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
            let Terms { may_be, may_stay, .. } = bases.terms(bytes, most, keep, is_ours);
            let what = format!("{bytes} bytes, {most} bases, {keep:?}, {is_ours}");
            assert_eq!((may_be, may_stay.into_inner()), expected, "{what}");
        }
        assert_ne!(bases.number_topic(), bases.number_topic());
    }
}
