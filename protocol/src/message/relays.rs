//! [`RelayPath`]: the relays through which a version came (PROTOCOL.md §3.20).

use super::field::{Field, exactly, list};
use crate::MessageError;
use std::fmt;

/// The most relays on the way of a version. A longer chain is refused.
pub const RELAYS_MAX: usize = 16;

/// Identifies a relay: the first half of the SHA-256 of its public key.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RelayId(pub [u8; 16]);

impl RelayId {
    /// The id of the relay whose public key has this SHA-256.
    pub fn of_key(fingerprint: [u8; 32]) -> Self {
        let [first, ..] = fingerprint.as_chunks().0 else { unreachable!("there are two halves") };
        Self(*first)
    }
}

/// The beginning of a key's fingerprint, as `keys show` prints it.
impl fmt::Display for RelayId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("sha256:")?;
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        f.write_str("…")
    }
}

impl fmt::Debug for RelayId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The relays through which a version came, from its publisher on: at most [`RELAYS_MAX`]. Empty at its publisher.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RelayPath(Vec<RelayId>);

/// Why a relay does not pass a version on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    /// It has passed through the relay already.
    #[error(
        "it came through this relay ({0}) before: relays form a ring. Give each relay tickets only of servers that are nearer \
         to the publisher than itself"
    )]
    Ring(RelayId),
    /// The path is full.
    #[error(
        "it came through {RELAYS_MAX} relays already, the most that there may be: give this relay a ticket of an earlier one"
    )]
    TooLong,
}

impl RelayPath {
    /// No relay.
    pub fn none() -> &'static Self {
        static NONE: RelayPath = RelayPath(vec![]);
        &NONE
    }

    /// The relays.
    pub fn relays(&self) -> &[RelayId] {
        &self.0
    }

    /// The path of what `relay` passes on.
    ///
    /// # Errors
    /// [`PathError`], if it must not.
    pub fn through(&self, relay: RelayId) -> Result<Self, PathError> {
        match self.0.len() {
            _ if self.0.contains(&relay) => Err(PathError::Ring(relay)),
            RELAYS_MAX.. => Err(PathError::TooLong),
            _ => Ok(Self(self.0.iter().copied().chain([relay]).collect())),
        }
    }
}

impl TryFrom<Vec<RelayId>> for RelayPath {
    type Error = PathError;

    fn try_from(relays: Vec<RelayId>) -> Result<Self, PathError> {
        if relays.len() > RELAYS_MAX { Err(PathError::TooLong) } else { Ok(Self(relays)) }
    }
}

impl Field for RelayPath {
    type Wire = Vec<Vec<u8>>;

    fn into_wire(self) -> Self::Wire {
        self.0.into_iter().map(|relay| relay.0.into()).collect()
    }

    fn from_wire(field: &'static str, wire: Self::Wire) -> Result<Self, MessageError> {
        list(field, RELAYS_MAX, wire, |relay| exactly(field, &relay).map(RelayId)).map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_bounded_and_has_no_ring() {
        let relay = |number| RelayId::of_key([number; 32]);
        let mut path = RelayPath::default();
        for number in 0..RELAYS_MAX as u8 {
            assert_eq!(path.through(relay(0)).is_err(), number > 0);
            path = path.through(relay(number)).unwrap();
        }
        assert_eq!(path.through(relay(200)), Err(PathError::TooLong));
        assert_eq!(path.through(relay(3)), Err(PathError::Ring(relay(3))));
        assert_eq!(RelayPath::from_wire("relays", path.clone().into_wire()), Ok(path.clone()));
        let longer = [path.into_wire(), vec![vec![9; 16]]].concat();
        assert!(RelayPath::from_wire("relays", longer).is_err());
        assert!(RelayPath::from_wire("relays", vec![vec![9; 15]]).is_err());
    }
}
