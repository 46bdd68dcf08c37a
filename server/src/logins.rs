//! [`Logins`]: bounds unauthenticated connections, so that no network can lock others out.

use std::{
    collections::{BTreeMap, HashMap},
    net::{IpAddr, Ipv6Addr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use tokio::sync::oneshot;

/// The maximum memory of an unauthenticated connection: 128 KiB for an unfinished handshake, and a task.
pub(crate) const LOGIN_BYTES: u64 = 150 << 10;

/// The minimum number of places in a small container: fewer could be filled from a few networks.
pub(crate) const PLACES_MIN: usize = 64;

/// The unauthenticated connections of a server, by network. Cheap to clone.
///
/// A new connection always gets a place. If there are too many, the oldest of the network with the most is evicted: an
/// attacker who fills the places from a few networks locks out no other network.
#[derive(Debug, Clone)]
pub struct Logins(Arc<Mutex<Waiting>>);

#[derive(Debug)]
struct Waiting {
    max: usize,
    next_number: u64,
    /// The network of each connection and its signal of eviction, in the order of arrival.
    by_age: BTreeMap<u64, (IpAddr, oneshot::Sender<()>)>,
    by_network: HashMap<IpAddr, usize>,
}

/// The network of an address: an IPv4 address itself, or the first 64 bits of an IPv6 address, because one host may
/// have all addresses with that prefix.
pub(crate) fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
        address => address,
    }
}

/// The place of one connection, until this is dropped.
#[derive(Debug)]
#[must_use = "it is counted until this is dropped"]
pub struct Login {
    logins: Logins,
    number: u64,
}

/// Signals a connection that it was evicted.
#[derive(Debug)]
pub struct Eviction(oneshot::Receiver<()>);

impl Logins {
    /// Places for `max` connections.
    pub fn new(max: usize) -> Self {
        let waiting = Waiting { max, next_number: 0, by_age: BTreeMap::new(), by_network: HashMap::new() };
        Self(Arc::new(Mutex::new(waiting)))
    }

    /// Gives a place to a connection from `address`; evicts another connection if necessary.
    pub fn enter(&self, address: IpAddr) -> (Login, Eviction) {
        let network = network_of(address);
        let (signal, signalled) = oneshot::channel();
        let mut waiting = self.waiting();
        if waiting.by_age.len() >= waiting.max {
            waiting.evict();
        }
        let number = waiting.next_number;
        waiting.next_number += 1;
        waiting.by_age.insert(number, (network, signal));
        *waiting.by_network.entry(network).or_default() += 1;
        drop(waiting);
        (Login { logins: self.clone(), number }, Eviction(signalled))
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiting {
    /// Evicts the oldest connection of the network with the most; of several such networks, the oldest of all.
    fn evict(&mut self) {
        let most = self.by_network.values().copied().max().unwrap_or_default();
        let has_most = |network: &IpAddr| self.by_network.get(network) == Some(&most);
        let oldest = self.by_age.iter().find(|(_, (network, _))| has_most(network));
        if let Some(number) = oldest.map(|(number, _)| *number)
            && let Some(signal) = self.remove(number)
        {
            let _ = signal.send(()); // It may have ended.
        }
    }

    fn remove(&mut self, number: u64) -> Option<oneshot::Sender<()>> {
        let (network, signal) = self.by_age.remove(&number)?;
        if let Some(count) = self.by_network.get_mut(&network) {
            *count -= 1;
            if *count == 0 {
                self.by_network.remove(&network);
            }
        }
        Some(signal)
    }
}

impl Drop for Login {
    fn drop(&mut self) {
        self.logins.waiting().remove(self.number);
    }
}

impl Eviction {
    /// Waits until the connection is evicted; never returns once it is authenticated. Cancel safe.
    pub async fn evicted(&mut self) {
        if (&mut self.0).await.is_err() {
            std::future::pending().await
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    const MAX: usize = 100;

    fn address(number: u8) -> IpAddr {
        Ipv4Addr::new(10, 0, 0, number).into()
    }

    fn is_evicted(eviction: &mut Eviction) -> bool {
        eviction.0.try_recv().is_ok()
    }

    #[test]
    fn the_network_with_the_most_is_evicted_first() {
        let logins = Logins::new(MAX);
        let (good, mut good_eviction) = logins.enter(address(1));
        let mut bad: Vec<_> = (0..MAX - 1).map(|_| logins.enter(address(2))).collect();
        assert!(bad.iter_mut().all(|(_, eviction)| !is_evicted(eviction)));
        let (_other, mut other_eviction) = logins.enter(address(3));
        assert!(is_evicted(&mut bad[0].1), "the oldest of the network with the most");
        assert!(!is_evicted(&mut good_eviction) && !is_evicted(&mut other_eviction));
        bad.push(logins.enter(address(2)));
        assert!(
            is_evicted(&mut bad[1].1) && !is_evicted(&mut good_eviction),
            "also for its own new connection"
        );
        drop((good, bad, _other));
        let waiting = logins.waiting();
        assert!(waiting.by_age.is_empty() && waiting.by_network.is_empty());
    }

    #[test]
    fn a_64_bit_prefix_counts_as_one_network() {
        let logins = Logins::new(3);
        let one = |number: u128| IpAddr::from(Ipv6Addr::from_bits(0x2001_0db8 << 96 | number));
        let (_good, mut good_eviction) = logins.enter(address(1));
        let (_first, mut first_eviction) = logins.enter(one(1));
        let (_second, _) = logins.enter(one(u128::from(u64::MAX)));
        let (_mapped, _) = logins.enter(Ipv4Addr::new(10, 0, 0, 1).to_ipv6_mapped().into());
        assert!(is_evicted(&mut first_eviction) && !is_evicted(&mut good_eviction));
        assert_ne!(network_of(one(1)), network_of(one(1 << 64)));
    }

    #[test]
    fn among_equals_the_oldest_is_evicted() {
        let logins = Logins::new(MAX);
        let each: Vec<_> = (0..MAX).map(|n| logins.enter(Ipv4Addr::from_bits(n as u32).into())).collect();
        let _one_more = logins.enter(Ipv4Addr::from_bits(u32::MAX).into());
        let evicted: Vec<_> = each.into_iter().map(|(_, mut eviction)| is_evicted(&mut eviction)).collect();
        assert!(evicted[0] && !evicted[1..].contains(&true));
    }
}
