//! [`Opening`]: what a client wants of a new connection.

use super::{checking::Check, error::SessionError};
use crate::joining::Join;
use tensor_relay_protocol::{ClientMessage, Hello, PROTOCOL_REVISIONS, ProtocolViolation};

/// What a client wants of a new connection, by its first message.
#[derive(Debug)]
pub(super) enum Opening {
    /// A session of this protocol revision, the newest that client and server support.
    Session(Hello, u32),
    /// A lane for a session.
    Lane(Join),
    /// The proof that a member of this process has a session.
    Check(Check),
}

impl Opening {
    /// Decides what the client's `first` message begins.
    ///
    /// # Errors
    /// [`SessionError`] for another message, and when client and server have no revision in common.
    pub(super) fn new(first: ClientMessage) -> Result<Self, SessionError> {
        match first {
            ClientMessage::Join { session, lane, grant, instance } => {
                Ok(Self::Lane(Join { session, lane, grant, instance }))
            }
            ClientMessage::Hello(hello) => {
                let revision = common_revision(&hello)?;
                Ok(Self::Session(hello, revision))
            }
            ClientMessage::Check { session, nonce } => Ok(Self::Check(Check { session, nonce })),
            _ => {
                Err(ProtocolViolation::OutOfTurn { found: "another message", expected: "Hello or Join" }
                    .into())
            }
        }
    }
}

/// The newest protocol revision that client and server support.
fn common_revision(hello: &Hello) -> Result<u32, SessionError> {
    let newest = hello.revision_max.min(*PROTOCOL_REVISIONS.end());
    match newest >= hello.revision_min && PROTOCOL_REVISIONS.contains(&newest) {
        true => Ok(newest),
        false => Err(SessionError::Incompatible(hello.revision_min, hello.revision_max)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensor_relay_protocol::{CodecSet, FeatureSet, InstanceId, LaneGrant, LaneId};

    fn open(revision_min: u32, revision_max: u32) -> Result<Opening, SessionError> {
        Opening::new(ClientMessage::Hello(Hello {
            revision_min,
            revision_max,
            agent: String::new(),
            codecs: CodecSet::all(),
            token: None,
            features: FeatureSet::default(),
        }))
    }

    /// PROTOCOL.md §11 (2).
    #[test]
    fn the_newest_common_revision_is_chosen() {
        let (oldest, newest) = (*PROTOCOL_REVISIONS.start(), *PROTOCOL_REVISIONS.end());
        for (min, max, expected) in [
            (oldest, newest, newest),
            (newest, newest + 9, newest),
            (0, oldest, oldest),
            (oldest, oldest, oldest),
        ] {
            let opening = open(min, max).unwrap();
            assert!(matches!(opening, Opening::Session(_, revision) if revision == expected), "{opening:?}");
        }
        for (min, max) in [(newest + 1, newest + 2), (0, oldest - 1), (newest, oldest - 1)] {
            let refused = open(min, max).unwrap_err();
            let is_named = |error| matches!(error, SessionError::Incompatible(a, b) if (a, b) == (min, max));
            assert!(is_named(refused), "{min} to {max}");
        }
    }

    #[test]
    fn a_connection_begins_with_hello_or_join() {
        let (session, lane) = (7, LaneId(2));
        let (grant, instance) = (LaneGrant::new([3; LaneGrant::BYTES]), InstanceId([2; 16]));
        let opening = Opening::new(ClientMessage::Join { session, lane, grant, instance }).unwrap();
        let Opening::Lane(join) = opening else { panic!("{opening:?}") };
        assert_eq!((join.session, join.lane, join.grant, join.instance), (session, lane, grant, instance));

        let opening = Opening::new(ClientMessage::Check { session, nonce: [9; 32] }).unwrap();
        assert!(matches!(opening, Opening::Check(Check { session: 7, nonce }) if nonce == [9; 32]));

        let refused = Opening::new(ClientMessage::List).unwrap_err();
        assert!(matches!(refused, SessionError::ProtocolViolation(_)), "{refused}");
    }
}
