//! [`TakerPlaces`]: bounds the connections of takers.

use crate::{logins::Login, logins::Logins, shares::Eviction};
use std::{collections::BTreeMap, net::IpAddr, sync::Arc};
use tensor_relay_device::Lock;

/// The most connections that have shown no valid grant yet. A further one takes the place of the oldest of the network with
/// the most.
const UNGRANTED_MAX: usize = 16;

/// The most connections of takers with a grant: more than an origin names to each other.
const GRANTED_MAX: usize = 64;

/// The most of one taker, which may reconnect before the old connection is known to be lost.
const GRANTED_EACH_MAX: usize = 4;

/// The connections of takers, which no ticket admits.
#[derive(Debug)]
pub(crate) struct TakerPlaces {
    ungranted: Logins,
    granted: Arc<Lock<BTreeMap<[u8; 32], usize>>>,
}

/// The place of one connection with a grant, until this is dropped.
#[derive(Debug)]
pub(crate) struct GrantedPlace {
    granted: Arc<Lock<BTreeMap<[u8; 32], usize>>>,
    key: [u8; 32],
}

impl Default for TakerPlaces {
    fn default() -> Self {
        Self { ungranted: Logins::new(UNGRANTED_MAX), granted: Arc::default() }
    }
}

impl TakerPlaces {
    /// Gives a place to a connection from `address` that has shown no grant yet.
    pub(crate) fn enter(&self, address: IpAddr) -> (Login, Eviction) {
        self.ungranted.enter(address)
    }

    /// Gives a place to a connection of the taker with `key`, which has shown a valid grant; `None` if all are taken, or the
    /// taker has its share.
    pub(crate) fn grant(&self, key: [u8; 32]) -> Option<GrantedPlace> {
        let mut granted = self.granted.lock();
        let (all, own) = (granted.values().sum::<usize>(), granted.get(&key).copied().unwrap_or(0));
        if all >= GRANTED_MAX || own >= GRANTED_EACH_MAX {
            return None;
        }
        granted.insert(key, own + 1);
        drop(granted);
        Some(GrantedPlace { granted: Arc::clone(&self.granted), key })
    }
}

impl Drop for GrantedPlace {
    fn drop(&mut self) {
        let mut granted = self.granted.lock();
        match granted.get_mut(&self.key) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(granted.remove(&self.key)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Goal: whatever comes and goes, the bounds hold, a place that is free is given, and no count remains.
        #[test]
        fn places_are_bounded(steps in prop::collection::vec((any::<bool>(), 0u8..20, any::<usize>()), 0..400)) {
            let places = TakerPlaces::default();
            let mut held: Vec<GrantedPlace> = vec![];
            for (enters, key, at) in steps {
                if enters {
                    let own = held.iter().filter(|place| place.key == [key; 32]).count();
                    let has_room = held.len() < GRANTED_MAX && own < GRANTED_EACH_MAX;
                    let place = places.grant([key; 32]);
                    prop_assert_eq!(place.is_some(), has_room);
                    held.extend(place);
                } else if !held.is_empty() {
                    held.swap_remove(at % held.len());
                }
            }
            drop(held);
            prop_assert!(places.granted.lock().is_empty());
        }
    }
}
