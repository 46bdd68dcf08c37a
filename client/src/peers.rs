//! [`Peers`]: the holders that the origin named, and which of them to connect to (PROTOCOL.md §3.15).

mod report;

pub(crate) use report::PeerReports;
pub use report::{PeerReport, PeerState};

use std::collections::{BTreeMap, BTreeSet};
use tensor_relay_protocol::{LaneGrant, Source, SubscriptionId};
use tensor_relay_transport::Fingerprint;

/// The most peers that a client is connected to at once.
pub(crate) const PEERS_MAX: usize = 16;

/// The most keys that are barred. Beyond it, no further peer is used in the session.
const BARRED_MAX: usize = 1_024;

/// The holders that were named to a session's subscriptions. Pure.
#[derive(Debug)]
pub(crate) struct Peers {
    /// This client's own key: an origin that names the client to itself wastes nothing.
    own: [u8; 32],
    named: BTreeMap<SubscriptionId, Named>,
    /// The keys of those that lied: they are not used in this session.
    barred: BTreeSet<[u8; 32]>,
}

/// The latest list of a subscription.
#[derive(Debug)]
struct Named {
    sources: Vec<Source>,
    /// Whether the version that they hold is being received. Afterwards connections are kept, for the next version, and
    /// none is opened.
    is_needed: bool,
}

impl Peers {
    /// Without any peer, for the client with the key `own`.
    pub(crate) fn new(own: Fingerprint) -> Self {
        Self { own: own.0, named: BTreeMap::new(), barred: BTreeSet::new() }
    }

    /// Replaces the list of a subscription, whose version is being received.
    pub(crate) fn name(&mut self, reception: SubscriptionId, sources: Vec<Source>) {
        let others = sources.into_iter().filter(|source| source.key != self.own).collect();
        self.named.insert(reception, Named { sources: others, is_needed: true });
    }

    /// Handles the end of a subscription's version.
    pub(crate) fn handle_version_ended(&mut self, reception: SubscriptionId) {
        if let Some(named) = self.named.get_mut(&reception) {
            named.is_needed = false;
        }
    }

    /// Forgets the lists of the subscriptions that have ended. Returns whether there were any.
    pub(crate) fn forget(&mut self, is_ended: impl Fn(SubscriptionId) -> bool) -> bool {
        self.named.extract_if(.., |reception, _| is_ended(*reception)).count() > 0
    }

    /// Bars a peer for the rest of the session.
    pub(crate) fn bar(&mut self, key: [u8; 32]) {
        if self.barred.len() < BARRED_MAX {
            self.barred.insert(key);
        }
    }

    /// The grant with which to take the version of a subscription from a peer.
    pub(crate) fn grant(&self, reception: SubscriptionId, key: &[u8; 32]) -> Option<LaneGrant> {
        let named = self.named.get(&reception).filter(|named| named.is_needed)?;
        let source = named.sources.iter().find(|source| source.key == *key)?;
        Some(source.grant)
    }

    /// Whether a connection to this peer is kept.
    pub(crate) fn is_named(&self, key: &[u8; 32]) -> bool {
        self.usable(|_| true).any(|source| source.key == *key)
    }

    /// Whether a connection to this peer is made again if it is lost.
    pub(crate) fn is_needed(&self, key: &[u8; 32]) -> bool {
        self.usable(|named| named.is_needed).any(|source| source.key == *key)
    }

    /// The peers to connect to beside those `in_use`: of each subscription in turn, in the order in which the origin
    /// named them, so that no topic takes all places.
    pub(crate) fn missing(&self, in_use: &[[u8; 32]]) -> Vec<Source> {
        let mut missing: Vec<&Source> = vec![];
        let places = PEERS_MAX.saturating_sub(in_use.len());
        let lists: Vec<_> = self.named.values().filter(|named| named.is_needed).collect();
        let longest = lists.iter().map(|named| named.sources.len()).max().unwrap_or(0);
        for source in
            (0..longest).flat_map(|place| lists.iter().filter_map(move |named| named.sources.get(place)))
        {
            if missing.len() == places {
                break;
            }
            let is_known = in_use.contains(&source.key) || missing.iter().any(|it| it.key == source.key);
            if !is_known && self.is_usable(source) {
                missing.push(source);
            }
        }
        missing.into_iter().cloned().collect()
    }

    fn usable(&self, is_considered: impl Fn(&Named) -> bool) -> impl Iterator<Item = &Source> {
        let lists = self.named.values().filter(move |named| is_considered(named));
        lists.flat_map(|named| &named.sources).filter(|source| self.is_usable(source))
    }

    fn is_usable(&self, source: &Source) -> bool {
        self.barred.len() < BARRED_MAX && !self.barred.contains(&source.key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensor_relay_protocol::{PeerAddress, RangeSet, Transport};

    const FIRST: SubscriptionId = SubscriptionId(1);
    const SECOND: SubscriptionId = SubscriptionId(2);

    const fn key(number: u16) -> [u8; 32] {
        let mut key = [0; 32];
        [key[0], key[1]] = number.to_le_bytes();
        key
    }

    fn source(number: u16) -> Source {
        let address = PeerAddress { transport: Transport::Tcp, address: "10.0.0.1:4747".parse().unwrap() };
        Source {
            addresses: vec![address],
            key: key(number),
            grant: LaneGrant::new([number as u8; 32]),
            chunks: RangeSet::default(),
            is_near: false,
        }
    }

    fn sources(numbers: impl IntoIterator<Item = u16>) -> Vec<Source> {
        numbers.into_iter().map(source).collect()
    }

    fn missing(peers: &Peers, in_use: &[u16]) -> Vec<u16> {
        let in_use: Vec<_> = in_use.iter().map(|number| key(*number)).collect();
        let number = |source: Source| u16::from_le_bytes([source.key[0], source.key[1]]);
        peers.missing(&in_use).into_iter().map(number).collect()
    }

    #[test]
    fn subscriptions_take_the_places_in_turn() {
        let mut peers = Peers::new(Fingerprint(key(0)));
        assert!(missing(&peers, &[]).is_empty());
        peers.name(FIRST, sources([1, 2, 0, 3])); // 0 is this client itself.
        peers.name(SECOND, sources([2, 7, 8, 9, 10]));
        assert_eq!(missing(&peers, &[]), [1, 2, 7, 3, 8, 9, 10]);
        assert_eq!(missing(&peers, &[2, 3, 99]), [1, 7, 8, 9, 10]);
        peers.name(FIRST, sources(100..200));
        assert_eq!(missing(&peers, &[]).len(), PEERS_MAX);
        assert_eq!(missing(&peers, &[2, 7, 8, 9, 10]).len(), PEERS_MAX - 5);
        assert!(missing(&peers, &std::array::from_fn::<u16, 20, _>(|at| at as u16)).is_empty());
    }

    #[test]
    fn a_peer_is_kept_while_it_is_named_and_made_again_while_it_is_needed() {
        let mut peers = Peers::new(Fingerprint(key(0)));
        peers.name(FIRST, sources([1, 2]));
        assert_eq!(peers.grant(FIRST, &key(1)), Some(LaneGrant::new([1; 32])));
        assert_eq!([peers.grant(FIRST, &key(3)), peers.grant(SECOND, &key(1))], [None, None]);
        peers.handle_version_ended(FIRST);
        let of = |peers: &Peers, number| (peers.is_named(&key(number)), peers.is_needed(&key(number)));
        assert_eq!((of(&peers, 1), missing(&peers, &[])), ((true, false), vec![]));
        assert_eq!(peers.grant(FIRST, &key(1)), None, "a grant is for a version");
        peers.name(FIRST, sources([2]));
        assert_eq!([of(&peers, 1), of(&peers, 2)], [(false, false), (true, true)]);
        assert!(!peers.forget(|reception| reception == SECOND) && of(&peers, 2).0);
        assert!(peers.forget(|reception| reception == FIRST) && !of(&peers, 2).0);
    }

    #[test]
    fn a_barred_peer_is_never_used_again() {
        let mut peers = Peers::new(Fingerprint(key(0)));
        peers.name(FIRST, sources([1, 2]));
        peers.bar(key(1));
        peers.name(FIRST, sources([1, 2]));
        assert_eq!((missing(&peers, &[]), peers.is_named(&key(1))), (vec![2], false));
        for liar in 0..2 * BARRED_MAX as u16 {
            peers.bar(key(1_000 + liar));
        }
        assert_eq!(peers.barred.len(), BARRED_MAX);
        assert!(missing(&peers, &[]).is_empty(), "an origin that names liars only gets no further chance");
    }
}
