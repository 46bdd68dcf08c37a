//! [`Quotas`] of producers by user, so that no user locks others out.

use std::{collections::HashMap, sync::Arc};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The maximum number of connected producers of one user. A training job has a few.
pub(super) const PRODUCERS_MAX: usize = 64;

/// The maximum size of pending manifests of all producers of one user: eight of maximal size.
const MANIFESTS_MAX_BYTES: usize = 256 << 20;

/// The quotas of users with producers so far. Call `take` only for permitted users, which bounds them.
#[derive(Debug, Default)]
pub(super) struct Quotas(HashMap<u32, Quota>);

#[derive(Debug)]
struct Quota {
    producers: Arc<Semaphore>,
    manifests: Arc<Semaphore>,
}

/// One producer's share of its user's quota, until this is dropped.
#[derive(Debug)]
pub(super) struct Share {
    _producer: OwnedSemaphorePermit,
    /// One permit for each byte of pending manifests.
    pub(super) manifests: Arc<Semaphore>,
}

impl Quotas {
    /// A share for another producer of `uid`; `None` at the maximum.
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
    fn a_full_quota_does_not_limit_other_users() {
        let mut quotas = Quotas::default();
        let mut taken: Vec<Share> = (0..PRODUCERS_MAX).map(|_| quotas.take(7).unwrap()).collect();
        assert!(quotas.take(7).is_none());
        let other = quotas.take(0).unwrap();
        assert!(!Arc::ptr_eq(&taken[0].manifests, &other.manifests));
        assert!(
            Arc::ptr_eq(&taken[0].manifests, &taken[1].manifests),
            "connections share the quota of manifests"
        );
        taken.pop();
        assert!(quotas.take(7).is_some(), "a released share can be taken again");
    }
}
