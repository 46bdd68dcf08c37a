//! [`Claims`]: the versions that a client claims to hold, compared with this server's content of the same epoch and
//! number (PROTOCOL.md §6.6): two servers may have published different bytes under the same version id.

use crate::{
    bases::VersionKey,
    read_retry::ReadRetry,
    topic::{Retained, TopicState},
};
use std::sync::Arc;
use tensor_relay_protocol::{Have, Partial, RangeSet, Subscribe, VersionDigest};
use tensor_relay_transport::egress::Encoder;
use tokio::time::Instant;

/// The versions that a `Subscribe` names as held. They are used until the first version starts.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    base: Option<Claim>,
    partial: Option<Claim>,
    have: Option<Claim>,
}

/// The field in which a version was named.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Named {
    Base,
    Partial,
    Have,
}

/// One version that the client claims to hold.
#[derive(Debug, Clone)]
pub(crate) struct Claim {
    pub(crate) named: Named,
    pub(crate) version: VersionKey,
    pub(crate) digest: VersionDigest,
    /// The chunks that the digest covers; `None`: the selected chunks.
    pub(crate) chunks: Option<RangeSet>,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Not compared yet.
    Waiting,
    Same,
    Other,
}

impl Claims {
    pub(crate) fn new(subscribe: &Subscribe) -> Self {
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
    pub(crate) fn next(
        &self,
        topic: &TopicState,
        base: impl Fn() -> Option<Arc<Retained>>,
    ) -> Option<(Claim, Arc<Retained>)> {
        let find = |(epoch, version): VersionKey| topic.find(epoch, version).map(|(_, retained)| retained);
        let due = |claim: &Option<Claim>, find: &dyn Fn(VersionKey) -> Option<Arc<Retained>>| {
            let claim = claim.as_ref().filter(|claim| claim.state == State::Waiting)?;
            Some((claim.clone(), find(claim.version)?))
        };
        due(&self.base, &|_| base())
            .or_else(|| due(&self.partial, &find))
            .or_else(|| due(&self.have, &find))
    }

    /// Records the result of a comparison.
    pub(crate) fn handle_compared(&mut self, named: Named, is_same: bool) {
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
    pub(crate) fn is_afresh(&self, version: VersionKey) -> bool {
        let named = self.partial.iter().chain(&self.have).find(|claim| claim.version == version);
        named.map_or_else(|| self.is_ahead_of(version), |claim| claim.state == State::Other)
    }

    /// Whether the client claims to have a newer version of the epoch than `version`, although this server sends
    /// `version`.
    pub(crate) fn is_ahead_of(&self, (epoch, version): VersionKey) -> bool {
        self.have
            .as_ref()
            .is_some_and(|have| have.version.0 == epoch && have.version.1 > version)
    }
}

/// Whether these chunks of `retained` have this digest. If they cannot be compared, they count as the same: a version
/// that can never be read cannot be sent, and a version that leaves retention is not kept for the comparison.
///
/// Reads those chunks that were never hashed, again and again if that may succeed later.
pub(crate) async fn is_same(
    encoder: &Encoder,
    retained: Arc<Retained>,
    chunks: RangeSet,
    digest: VersionDigest,
) -> bool {
    let count = retained.payload.manifest().chunking().count();
    if chunks.ranges().last().is_some_and(|last| last.end > count) {
        return false;
    }
    let mut retry = ReadRetry::default();
    let compare = async {
        loop {
            match encoder.digest(&retained.payload, &chunks).await {
                Ok(found) => return found == digest,
                Err(error) if error.is_final() => return true,
                Err(_) => tokio::time::sleep_until(retry.handle_failed(Instant::now()).at).await,
            }
        }
    };
    tokio::select! {
        is_same = compare => is_same,
        () = retained.left_retention() => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensor_relay_protocol::{Epoch, SubscriptionId, Topic, Version};

    const DIGEST: VersionDigest = VersionDigest([1; 32]);

    fn new_claims(have: u64, partial: u64) -> Claims {
        let chunks = RangeSet::from_range(0..3);
        Claims::new(&Subscribe {
            have: Some(Have { epoch: Epoch(1), version: Version(have), digest: DIGEST }),
            partial: Some(Partial { epoch: Epoch(1), version: Version(partial), chunks, digest: DIGEST }),
            ..Subscribe::latest(SubscriptionId(1), Topic::new("t").unwrap(), 1)
        })
    }

    fn afresh(claims: &Claims) -> Vec<u64> {
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
