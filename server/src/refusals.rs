//! [`Refusals`]: limits the log of refused clients to one line a minute for each network and reason, so that they
//! cannot flood it.

use crate::{access::Denied, logins::network_of};
use std::{
    collections::HashMap,
    mem::{Discriminant, discriminant},
    net::IpAddr,
    time::Duration,
};
use tensor_relay_device::Lock;
use tokio::time::Instant;

/// The time for which further refusals of one network for one reason are counted but not logged.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// The maximum number of pairs of network and reason that are counted separately. Further ones are counted together.
const KINDS_MAX: usize = 16;

/// Why something was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Reason {
    /// The client was not admitted.
    Denied(Discriminant<Denied>),
    /// The client was admitted but lacks permission for the requested topic.
    Topic,
    /// The user with this number may not publish to the requested topic.
    Publish(u32),
    /// Another reason, with this name: the server has no room, or the client did not log in.
    Named(&'static str),
}

impl From<&Denied> for Reason {
    fn from(denied: &Denied) -> Self {
        Self::Denied(discriminant(denied))
    }
}

/// The network and the reason; `None` for all beyond `KINDS_MAX`.
type Kind = Option<(IpAddr, Reason)>;

/// When each kind of refusal was last logged, and the number of unlogged ones since.
#[derive(Debug, Default)]
pub(crate) struct Refusals(Lock<HashMap<Kind, (Instant, u64)>>);

impl Refusals {
    /// Counts a refusal. If it should be logged, returns the number of unlogged ones before it.
    pub(crate) fn note(&self, address: IpAddr, reason: impl Into<Reason>, now: Instant) -> Option<u64> {
        let mut counts = self.0.lock();
        let is_quiet = |since: Instant| now.duration_since(since) < LOG_INTERVAL;
        let kind = Some((network_of(address), reason.into()));
        if !counts.contains_key(&kind) && counts.len() >= KINDS_MAX {
            counts.retain(|_, (since, _)| is_quiet(*since));
        }
        let has_place = counts.contains_key(&kind) || counts.len() < KINDS_MAX;
        let key = kind.filter(|_| has_place);
        match counts.get_mut(&key) {
            Some((since, unlogged)) if is_quiet(*since) => {
                *unlogged += 1;
                None
            }
            Some((since, unlogged)) => {
                *since = now;
                Some(std::mem::take(unlogged))
            }
            None => {
                counts.insert(key, (now, 0));
                Some(0)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, Ipv6Addr};

    #[test]
    fn each_network_is_logged_once_a_minute() {
        let (refusals, now) = (Refusals::default(), Instant::now());
        let [one, other] = [1, 2].map(|last| IpAddr::from(Ipv4Addr::new(10, 0, 0, last)));
        let note = |address, later| refusals.note(address, &Denied::NoCredentials, now + later);
        let zero = Duration::ZERO;
        assert_eq!(note(one, zero), Some(0));
        assert_eq!([note(one, zero), note(one, zero)], [None, None]);
        assert_eq!(note(other, zero), Some(0));
        assert_eq!(refusals.note(one, &Denied::Expired, now), Some(0), "another reason");
        assert_eq!(refusals.note(one, Reason::Named("no_memory"), now), Some(0), "and another one");
        assert_eq!(note(one, LOG_INTERVAL), Some(2));
        assert_eq!(note(one, LOG_INTERVAL), None);
    }

    #[test]
    fn many_networks_are_counted_together() {
        let (refusals, now) = (Refusals::default(), Instant::now());
        let network = |number| IpAddr::from(Ipv6Addr::from_bits(u128::from(number) << 64 | 7));
        let counts =
            (0_u64..10_000).filter(|number| refusals.note(network(*number), &Denied::Expired, now).is_some());
        assert_eq!(counts.count(), KINDS_MAX + 1);
        assert!(refusals.0.lock().len() <= KINDS_MAX + 1);
    }
}
