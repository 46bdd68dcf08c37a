//! [`Handshakes`]: paces the handshakes of each network, whose signatures and key exchanges all use the network's
//! thread.

use crate::logins::network_of;
use std::{collections::HashMap, net::IpAddr, time::Duration};
use tensor_relay_device::Lock;
use tokio::time::Instant;

/// The handshakes that a network may begin at once: the consumers of a cluster behind one address that start together.
const BURST: u32 = 512;

/// The rate at which a network may begin further ones: they take 7 % of a processor.
pub(crate) const PER_SECOND: u32 = 128;

/// The maximum time for which a handshake is delayed, shorter than the deadlines of clients; beyond it is refused.
const DELAY_MAX: Duration = Duration::from_secs(5);

/// The number of networks that are paced separately; further ones share one rate.
const NETWORKS_MAX: usize = 4_096;

/// When each network's next handshake may begin without using its burst; `None` for the networks beyond
/// [`NETWORKS_MAX`].
#[derive(Debug, Default)]
pub(crate) struct Handshakes(Lock<HashMap<Option<IpAddr>, Instant>>);

impl Handshakes {
    /// When a handshake with `address` that arrives `now` may begin; `None` if it must be refused.
    pub(crate) fn admit(&self, address: IpAddr, now: Instant) -> Option<Instant> {
        let interval = Duration::from_secs(1) / PER_SECOND;
        let mut due = self.0.lock();
        let network = Some(network_of(address));
        if !due.contains_key(&network) && due.len() >= NETWORKS_MAX {
            due.retain(|_, due| *due > now);
        }
        let has_place = due.contains_key(&network) || due.len() < NETWORKS_MAX;
        let due = due.entry(network.filter(|_| has_place)).or_insert(now);
        let (begins, next) = pace(*due, now, interval, BURST);
        (begins <= now + DELAY_MAX).then(|| {
            *due = next;
            begins
        })
    }
}

/// When an event may begin that arrives `now`, of those of which `burst` may come at once and further ones one in each
/// `interval`; and when the next may begin without using the burst, which was `due` before. This is the generic cell
/// rate algorithm (ITU-T I.371): no timer refills anything.
pub(crate) fn pace(due: Instant, now: Instant, interval: Duration, burst: u32) -> (Instant, Instant) {
    let next = due.max(now) + interval;
    (next.checked_sub(interval * burst).unwrap_or(now).max(now), next)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, Ipv6Addr};

    /// The delays of `count` handshakes at once; `None` for those refused.
    fn delays(handshakes: &Handshakes, address: IpAddr, now: Instant, count: u32) -> Vec<Option<Duration>> {
        (0..count)
            .map(|_| Some(handshakes.admit(address, now)?.duration_since(now)))
            .collect()
    }

    #[test]
    fn a_network_is_paced_beyond_its_burst() {
        let (handshakes, now) = (Handshakes::default(), Instant::now() + Duration::from_secs(60));
        let [one, other] = [1, 2].map(|last| IpAddr::from(Ipv4Addr::new(10, 0, 0, last)));
        let flood = delays(&handshakes, one, now, 2_000);
        assert!(flood[..BURST as usize].iter().all(|delay| *delay == Some(Duration::ZERO)));
        assert!(flood[BURST as usize].unwrap() > Duration::ZERO);
        let admitted = flood.iter().flatten().count() as u32;
        assert_eq!(admitted, BURST + DELAY_MAX.as_secs() as u32 * PER_SECOND, "the rest is refused");
        assert_eq!(flood.iter().flatten().max(), Some(&DELAY_MAX));
        assert_eq!(
            delays(&handshakes, other, now, 1),
            [Some(Duration::ZERO)],
            "another network is not delayed"
        );
        let later = now + Duration::from_secs(1);
        let admitted = delays(&handshakes, one, later, 2_000).iter().flatten().count() as u32;
        assert_eq!(admitted, PER_SECOND, "refused ones cost it nothing");
        let quiet = later + Duration::from_secs(10);
        assert_eq!(delays(&handshakes, one, quiet, BURST), vec![Some(Duration::ZERO); BURST as usize]);
    }

    #[test]
    fn many_networks_share_one_rate() {
        let (handshakes, now) = (Handshakes::default(), Instant::now() + Duration::from_secs(60));
        let network = |number: u32| IpAddr::from(Ipv6Addr::from_bits(u128::from(number) << 64));
        for number in 0..NETWORKS_MAX as u32 {
            assert_eq!(handshakes.admit(network(number), now), Some(now));
        }
        let further = (0..10_000).filter(|number| handshakes.admit(network(1 << 20 | number), now).is_some());
        assert_eq!(further.count() as u32, BURST + DELAY_MAX.as_secs() as u32 * PER_SECOND);
        assert_eq!(handshakes.0.lock().len(), NETWORKS_MAX + 1);
        let later = now + Duration::from_secs(60);
        assert_eq!(handshakes.admit(network(1 << 30), later), Some(later));
        assert_eq!(handshakes.0.lock().len(), 1, "quiet ones are forgotten");
    }
}
