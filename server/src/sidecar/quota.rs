//! Quotas of producers by user, so that no user locks others out.

use std::{collections::HashMap, sync::Arc};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The most connected producers of one user. A training job has a few.
pub(super) const PRODUCERS_MAX: usize = 64;

/// The most unread bytes of manifests, of all producers of one user: eight of maximal size.
const MANIFESTS_MAX_BYTES: usize = 256 << 20;

/// The quotas of the users that came so far. There are no more than users who may publish: ask for no others.
#[derive(Debug, Default)]
pub(super) struct Quotas(HashMap<u32, Quota>);

#[derive(Debug)]
struct Quota {
    producers: Arc<Semaphore>,
    manifests: Arc<Semaphore>,
}

/// One producer's part of its user's quota, until this is dropped.
#[derive(Debug)]
pub(super) struct Share {
    _producer: OwnedSemaphorePermit,
    /// A permit for each byte of manifests that may have come and not been read yet.
    pub(super) manifests: Arc<Semaphore>,
}

impl Quotas {
    /// A part for one more producer of `uid`, if there is one.
    pub(super) fn take(&mut self, uid: u32) -> Option<Share> {
        let quota = self.0.entry(uid).or_insert_with(|| Quota {
            producers: Arc::new(Semaphore::new(PRODUCERS_MAX)),
            manifests: Arc::new(Semaphore::new(MANIFESTS_MAX_BYTES)),
        });
        let producer = Arc::clone(&quota.producers).try_acquire_owned().ok()?;
        Some(Share { _producer: producer, manifests: Arc::clone(&quota.manifests) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_who_takes_all_takes_nothing_of_others() {
        let mut quotas = Quotas::default();
        let mut taken: Vec<Share> = (0..PRODUCERS_MAX).map(|_| quotas.take(7).unwrap()).collect();
        assert!(quotas.take(7).is_none());
        let other = quotas.take(0).unwrap();
        assert!(!Arc::ptr_eq(&taken[0].manifests, &other.manifests));
        assert!(Arc::ptr_eq(&taken[0].manifests, &taken[1].manifests), "connections add nothing to it");
        taken.pop();
        assert!(quotas.take(7).is_some(), "a place that became free is given");
    }
}
