//! Lanes of a session: their ids, and the server's offer and grant for further ones (PROTOCOL.md §3.10).

use super::field::{Field, bytes, exactly};
use crate::MessageError;
use std::fmt;

/// The id of a server process: 16 random bytes made at its start. A further lane names that of its session in `Join`,
/// because a load balancer may connect it to another process, which then refuses it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct InstanceId(pub [u8; 16]);

bytes! { InstanceId }

impl fmt::Display for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// The number of a lane of a session. 0 is the session's first connection; the client chooses the others and reuses
/// none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LaneId(pub u32);

impl fmt::Display for LaneId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// The secret with which a connection joins a session as a further lane. It is valid as long as the session.
///
/// Comparison takes constant time, so that a grant cannot be guessed byte by byte. `Debug` hides the grant, so that it
/// does not appear in logs.
#[derive(Clone, Copy)]
pub struct LaneGrant([u8; Self::BYTES]);

impl LaneGrant {
    /// The size of a grant in bytes.
    pub const BYTES: usize = 32;

    /// The grant with these `bytes`, which must be random and made for a single session.
    pub fn new(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    pub(crate) fn bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }
}

impl PartialEq for LaneGrant {
    fn eq(&self, other: &Self) -> bool {
        // `blake3::Hash` compares its bytes in constant time.
        blake3::Hash::from_bytes(self.0) == blake3::Hash::from_bytes(other.0)
    }
}

impl Eq for LaneGrant {}

impl fmt::Debug for LaneGrant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LaneGrant(secret)")
    }
}

/// A server's offer of further lanes to a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaneOffer {
    /// The maximum number of the session's lanes at once, lane 0 included unless it is retired.
    pub lanes_max: u32,
    /// The grant that a further lane presents.
    pub grant: LaneGrant,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FeatureSet, ServerMessage, Welcome};

    #[test]
    fn grants_are_compared_whole_and_hidden_by_debug() {
        let grant = LaneGrant::new([0x5a; 32]);
        assert_eq!(grant, LaneGrant::new([0x5a; 32]));
        for at in 0..32 {
            let mut other = [0x5a; 32];
            other[at] ^= 1;
            assert_ne!(grant, LaneGrant::new(other), "byte {at}");
        }
        let lanes = Some(LaneOffer { lanes_max: 4, grant });
        let welcome = Welcome {
            revision: 1,
            agent: "t".into(),
            session: 1,
            subscriptions_max: 1,
            lanes,
            instance: InstanceId([3; 16]),
            lane_addresses: vec![],
            features: FeatureSet::default(),
        };
        let printed = format!("{:?}", ServerMessage::Welcome(welcome));
        assert!(!printed.contains("5a") && !printed.contains("90"), "{printed}");
    }
}
