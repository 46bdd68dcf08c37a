//! Connections that have not said who they are. They are bounded, and none of them keeps others out.

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use tokio::sync::oneshot;

/// How many there may be. Each costs up to 128 KiB of an unfinished handshake and a task, so all together stay below 150 MiB;
/// a client that is let in is one for some milliseconds.
const MAX: usize = 1_024;

/// The connections of a server that are not let in yet, by address. Cheap to clone.
///
/// A further one always has a place. Where there are too many, that goes at its cost which came first from the address that
/// has most: who fills the places from a few addresses keeps nobody at another one out.
#[derive(Debug, Clone, Default)]
pub(crate) struct Strangers(Arc<Mutex<Waiting>>);

#[derive(Debug, Default)]
struct Waiting {
    ever: u64,
    /// In the order in which they came.
    by_age: BTreeMap<u64, (IpAddr, oneshot::Sender<()>)>,
    by_address: HashMap<IpAddr, usize>,
}

/// One connection's place among them, until this is dropped.
#[derive(Debug)]
#[must_use = "it is counted until this is dropped"]
pub(crate) struct Stranger {
    among: Strangers,
    number: u64,
}

/// Tells a connection that its place went to another.
#[derive(Debug)]
pub(crate) struct Eviction(oneshot::Receiver<()>);

impl Strangers {
    /// Gives a place to a connection from `address`, at the cost of another one if need be.
    pub(crate) fn enter(&self, address: IpAddr) -> (Stranger, Eviction) {
        let (tell, told) = oneshot::channel();
        let mut waiting = self.waiting();
        if waiting.by_age.len() >= MAX {
            waiting.evict();
        }
        let number = waiting.ever;
        waiting.ever += 1;
        waiting.by_age.insert(number, (address, tell));
        *waiting.by_address.entry(address).or_default() += 1;
        drop(waiting);
        (Stranger { among: self.clone(), number }, Eviction(told))
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiting {
    /// Takes a place from the address that has most of them: the oldest of it, or of several that have as many.
    fn evict(&mut self) {
        let most = self.by_address.values().copied().max().unwrap_or_default();
        let fills = |address: &IpAddr| self.by_address.get(address) == Some(&most);
        let oldest = self.by_age.iter().find(|(_, (address, _))| fills(address));
        if let Some(number) = oldest.map(|(number, _)| *number)
            && let Some(tell) = self.remove(number)
        {
            let _ = tell.send(()); // It may be ending by itself.
        }
    }

    fn remove(&mut self, number: u64) -> Option<oneshot::Sender<()>> {
        let (address, tell) = self.by_age.remove(&number)?;
        if let Some(count) = self.by_address.get_mut(&address) {
            *count -= 1;
            if *count == 0 {
                self.by_address.remove(&address);
            }
        }
        Some(tell)
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        self.among.waiting().remove(self.number);
    }
}

impl Eviction {
    /// Waits until the place is another's; for ever once the connection has been let in. Cancel safe.
    pub(crate) async fn came(&mut self) {
        if (&mut self.0).await.is_err() {
            std::future::pending().await
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    fn address(number: u8) -> IpAddr {
        Ipv4Addr::new(10, 0, 0, number).into()
    }

    fn is_evicted(eviction: &mut Eviction) -> bool {
        eviction.0.try_recv().is_ok()
    }

    #[test]
    fn whoever_has_most_pays_for_the_next() {
        let strangers = Strangers::default();
        let (good, mut good_eviction) = strangers.enter(address(1));
        let mut bad: Vec<_> = (0..MAX - 1).map(|_| strangers.enter(address(2))).collect();
        assert!(bad.iter_mut().all(|(_, eviction)| !is_evicted(eviction)));
        let (_other, mut other_eviction) = strangers.enter(address(3));
        assert!(is_evicted(&mut bad[0].1), "the oldest of the address that has most");
        assert!(!is_evicted(&mut good_eviction) && !is_evicted(&mut other_eviction));
        bad.push(strangers.enter(address(2)));
        assert!(
            is_evicted(&mut bad[1].1) && !is_evicted(&mut good_eviction),
            "its own newest costs it one as well"
        );
        drop((good, bad, _other));
        let waiting = strangers.waiting();
        assert!(waiting.by_age.is_empty() && waiting.by_address.is_empty());
    }

    #[test]
    fn among_equals_the_oldest_goes() {
        let strangers = Strangers::default();
        let each: Vec<_> = (0..MAX)
            .map(|n| strangers.enter(Ipv4Addr::from_bits(n as u32).into()))
            .collect();
        let _one_more = strangers.enter(Ipv4Addr::from_bits(u32::MAX).into());
        let evicted: Vec<_> = each.into_iter().map(|(_, mut eviction)| is_evicted(&mut eviction)).collect();
        assert!(evicted[0] && !evicted[1..].contains(&true));
    }
}
