//! [`Claimed`]: the versions that a client claims to hold, compared with the content here of the same epoch and number
//! (PROTOCOL.md §6.6): two servers may have published different bytes under the same version id.

use super::Versions;
use crate::{Epoch, Have, Partial, RangeSet, Subscribe, Version, VersionDigest};

/// The versions that a `Subscribe` names as held. They are used until the first version starts.
#[derive(Debug, Default)]
pub(super) struct Claimed {
    base: Option<Claim>,
    partial: Option<Claim>,
    have: Option<Claim>,
}

/// The field in which a version was named.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Named {
    /// `base`.
    Base,
    /// `partial`.
    Partial,
    /// `have`.
    Have,
}

/// One version that the client claims to hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// The field that named it.
    pub named: Named,
    /// The version.
    pub version: (Epoch, Version),
    /// The digest of the client's chunks.
    pub digest: VersionDigest,
    /// The chunks that the digest covers; `None`: the selected chunks.
    pub chunks: Option<RangeSet>,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Not compared yet.
    Waiting,
    Same,
    Other,
}

impl Claimed {
    pub(super) fn new(subscribe: &Subscribe) -> Self {
        let complete = |named, have: &Have| Claim {
            named,
            version: have.key(),
            digest: have.digest,
            chunks: None,
            state: State::Waiting,
        };
        let part = |partial: &Partial| Claim {
            named: Named::Partial,
            version: (partial.epoch, partial.version),
            digest: partial.digest,
            chunks: Some(partial.chunks.clone()),
            state: State::Waiting,
        };
        Self {
            base: subscribe.base.as_ref().map(|base| complete(Named::Base, base)),
            partial: subscribe.partial.as_ref().map(part),
            have: subscribe.have.as_ref().map(|have| complete(Named::Have, have)),
        }
    }

    /// A claim that can be compared now, with its version. A version published after the `Subscribe` is compared once
    /// it is published; a base that is not in memory is ignored.
    pub(super) fn due<T: Versions>(&self, topic: &T) -> Option<(Claim, T::Version)> {
        let due = |claim: &Option<Claim>, find: &dyn Fn(&Claim) -> Option<T::Version>| {
            let claim = claim.as_ref().filter(|claim| claim.state == State::Waiting)?;
            Some((claim.clone(), find(claim)?))
        };
        let retained = |claim: &Claim| topic.find(claim.version).map(|(_, version)| version);
        due(&self.base, &|_| topic.base())
            .or_else(|| due(&self.partial, &retained))
            .or_else(|| due(&self.have, &retained))
    }

    /// Records the result of a comparison.
    pub(super) fn handle_compared(&mut self, named: Named, is_same: bool) {
        let claim = match named {
            Named::Base => &mut self.base,
            Named::Partial => &mut self.partial,
            Named::Have => &mut self.have,
        };
        if let Some(claim) = claim {
            claim.state = if is_same { State::Same } else { State::Other };
        }
    }

    /// Whether the client must discard what it holds and receive all of `version`. If the client claims a part of
    /// `version`, that claim decides: the part is newer than the committed content.
    pub(super) fn is_afresh(&self, version: (Epoch, Version)) -> bool {
        let named = self.partial.iter().chain(&self.have).find(|claim| claim.version == version);
        named.map_or_else(|| self.is_ahead_of(version), |claim| claim.state == State::Other)
    }

    /// Whether the client claims to have a newer version of the epoch than `version`, although this server sends
    /// `version`.
    pub(super) fn is_ahead_of(&self, (epoch, version): (Epoch, Version)) -> bool {
        self.have
            .as_ref()
            .is_some_and(|have| have.version.0 == epoch && have.version.1 > version)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{SubscriptionId, Topic};

    const DIGEST: VersionDigest = VersionDigest([1; 32]);

    fn new_claims(have: u64, partial: u64) -> Claimed {
        let chunks = RangeSet::from_range(0..3);
        Claimed::new(&Subscribe {
            have: Some(Have { epoch: Epoch(1), version: Version(have), digest: DIGEST }),
            partial: Some(Partial { epoch: Epoch(1), version: Version(partial), chunks, digest: DIGEST }),
            ..Subscribe::latest(SubscriptionId(1), Topic::new("t").unwrap(), 1)
        })
    }

    fn afresh(claims: &Claimed) -> Vec<u64> {
        (1..5)
            .filter(|version| claims.is_afresh((Epoch(1), Version(*version))))
            .collect()
    }

    #[test]
    fn differing_versions_and_those_before_have_are_sent_afresh() {
        let mut claims = new_claims(2, 3);
        assert_eq!(afresh(&claims), [1], "nothing was compared; the client has a newer version than 1");
        claims.handle_compared(Named::Have, false);
        assert_eq!(afresh(&claims), [1, 2]);
        claims.handle_compared(Named::Partial, true);
        assert_eq!(afresh(&claims), [1, 2]);
        claims.handle_compared(Named::Partial, false);
        assert_eq!(afresh(&claims), [1, 2, 3]);
        assert!(!claims.is_afresh((Epoch(2), Version(3))), "another epoch");
    }

    #[test]
    fn a_client_is_ahead_of_earlier_versions_of_its_epoch() {
        let claims = new_claims(3, 3);
        let is_ahead = |epoch, version| claims.is_ahead_of((Epoch(epoch), Version(version)));
        assert_eq!([2, 3, 4].map(|version| is_ahead(1, version)), [true, false, false]);
        assert!(!is_ahead(2, 2), "another epoch");
    }

    /// A client that lost its connection while it received a version afresh holds a part of the new content, and
    /// committed the old.
    #[test]
    fn the_part_decides_for_its_version() {
        let mut claims = new_claims(3, 3);
        claims.handle_compared(Named::Have, false);
        claims.handle_compared(Named::Partial, true);
        assert_eq!(afresh(&claims), [1, 2]);
        claims.handle_compared(Named::Partial, false);
        assert_eq!(afresh(&claims), [1, 2, 3]);
    }
}
