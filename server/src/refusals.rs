//! Refused clients, as far as the log is told of them: one a minute from each network for each reason, so that nobody drives
//! other events out.

use crate::{access::Denied, strangers::network_of};
use std::{
    collections::HashMap,
    mem::{Discriminant, discriminant},
    net::IpAddr,
    sync::{Mutex, PoisonError},
    time::Duration,
};
use tokio::time::Instant;

/// For how long further refusals of one network for one reason are counted and not told.
const QUIET: Duration = Duration::from_secs(60);

/// How many networks and reasons are told apart in that time. Those beyond it are told of together, as one.
const KINDS_MAX: usize = 16;

/// Why something was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Reason {
    /// The client has no right to it.
    Denied(Discriminant<Denied>),
    /// The client is let in, and may not have the topic that it asked for.
    Topic,
    /// The server has no room for it: in this word's sense.
    NoRoom(&'static str),
}

impl From<&Denied> for Reason {
    fn from(denied: &Denied) -> Self {
        Self::Denied(discriminant(denied))
    }
}

/// Whom something was refused and why; `None` stands for those that no place was left for.
type Kind = Option<(IpAddr, Reason)>;

/// When the log was last told of each kind of refusal, and how many it was not told of since.
#[derive(Debug, Default)]
pub(crate) struct Refusals(Mutex<HashMap<Kind, (Instant, u64)>>);

impl Refusals {
    /// Counts a refusal. Where the log is to be told, returns how many it was not told of before.
    pub(crate) fn note(&self, address: IpAddr, reason: impl Into<Reason>, now: Instant) -> Option<u64> {
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_quiet = |since: Instant| now.duration_since(since) < QUIET;
        let kind = Some((network_of(address), reason.into()));
        if !told.contains_key(&kind) && told.len() >= KINDS_MAX {
            told.retain(|_, (since, _)| is_quiet(*since));
        }
        let has_place = told.contains_key(&kind) || told.len() < KINDS_MAX;
        let key = kind.filter(|_| has_place);
        match told.get_mut(&key) {
            Some((since, untold)) if is_quiet(*since) => {
                *untold += 1;
                None
            }
            Some((since, untold)) => {
                *since = now;
                Some(std::mem::take(untold))
            }
            None => {
                told.insert(key, (now, 0));
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
    fn each_network_is_told_of_once_a_minute() {
        let (refusals, now) = (Refusals::default(), Instant::now());
        let [one, other] = [1, 2].map(|last| IpAddr::from(Ipv4Addr::new(10, 0, 0, last)));
        let note = |address, later| refusals.note(address, &Denied::NothingShown, now + later);
        let zero = Duration::ZERO;
        assert_eq!(note(one, zero), Some(0));
        assert_eq!([note(one, zero), note(one, zero)], [None, None]);
        assert_eq!(note(other, zero), Some(0));
        assert_eq!(refusals.note(one, &Denied::Expired, now), Some(0), "another reason");
        assert_eq!(refusals.note(one, Reason::NoRoom("no_memory"), now), Some(0), "and another one");
        assert_eq!(note(one, QUIET), Some(2));
        assert_eq!(note(one, QUIET), None);
    }

    #[test]
    fn many_networks_are_told_of_as_few() {
        let (refusals, now) = (Refusals::default(), Instant::now());
        let network = |number| IpAddr::from(Ipv6Addr::from_bits(u128::from(number) << 64 | 7));
        let told =
            (0_u64..10_000).filter(|number| refusals.note(network(*number), &Denied::Expired, now).is_some());
        assert_eq!(told.count(), KINDS_MAX + 1);
        assert!(refusals.0.lock().unwrap().len() <= KINDS_MAX + 1);
    }
}
