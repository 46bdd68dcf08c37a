//! Errors of the protocol, by the party at fault, and the close codes that report them to the peer.
//!
//! Bytes that cannot be parsed are a [`MessageError`], parsed messages that break a rule are a [`ProtocolViolation`],
//! and a chunk without the hash in its header is a [`CorruptChunk`](crate::CorruptChunk). A local error is reported
//! where it occurs; the peer receives no details of it.

use crate::{ChunkIndex, Epoch, GlobError, LaneId, NameError, SubscriptionId, Version, WatchId};
use std::fmt;

/// Bytes from a peer that are not a valid message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// Bytes that are not valid protobuf.
    #[error("the peer sent a malformed message: {0}")]
    Malformed(String),
    /// A message without a mandatory field.
    #[error("the peer sent a message without its field {0:?}")]
    MissingField(&'static str),
    /// A field of bytes with another length than the required one.
    #[error("the peer sent {found} bytes of {field:?} where {expected} are expected")]
    WrongLength {
        /// The field.
        field: &'static str,
        /// The expected length in bytes.
        expected: usize,
        /// The received length in bytes.
        found: usize,
    },
    /// A value of a later revision, in a field that accepts no unknown values.
    #[error(
        "the peer sent {field} = {value}, which this build does not know: the two ends are of different versions"
    )]
    UnknownValue {
        /// The field.
        field: &'static str,
        /// The received value.
        value: u32,
    },
    /// A message or field with too many bytes.
    #[error("{bytes} bytes of {what} are too many: at most {max} are allowed")]
    TooLarge {
        /// The field or message.
        what: &'static str,
        /// The size in bytes.
        bytes: usize,
        /// The limit in bytes.
        max: usize,
    },
    /// A list that is too long.
    #[error("the peer listed {found} {what}, and at most {max} are allowed")]
    TooMany {
        /// The list.
        what: &'static str,
        /// The received length.
        found: usize,
        /// The limit.
        max: usize,
    },
    /// A name that breaks a rule.
    #[error("the peer sent an invalid name: {0}")]
    Name(#[from] NameError),
    /// A pattern that breaks a rule.
    #[error("the peer sent an invalid glob: {0}")]
    Glob(#[from] GlobError),
    /// A data stream of an unknown kind.
    #[error("the peer opened a data stream of kind {0}, which this build does not know")]
    UnknownStreamKind(u8),
    /// A codec that this build does not know, and so did not offer.
    #[error("the peer used codec {0}, which this build does not know and never offered")]
    UnknownCodec(u8),
    /// Reserved bytes of a stream header that are not zero: a later revision may define them.
    #[error("the peer set reserved bytes of a stream header: the two ends are of different versions")]
    ReservedNotZero,
}

impl MessageError {
    pub(crate) fn malformed(error: prost::DecodeError) -> Self {
        Self::Malformed(error.to_string())
    }
}

/// A message that is valid by itself but breaks a rule. The peer has a bug or is hostile, so the session ends.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProtocolViolation {
    /// A message that is not allowed at this moment.
    #[error("the peer sent {found} where {expected} was expected")]
    OutOfTurn {
        /// What was received.
        found: &'static str,
        /// What was expected.
        expected: &'static str,
    },
    /// A message, or a field of one, of a feature that this end did not offer.
    #[error("the peer sent {found}, which needs the feature {feature:?}, which this end did not offer")]
    FeatureNotOffered {
        /// The received message or field.
        found: &'static str,
        /// The feature that it needs.
        feature: &'static str,
    },
    /// A subscription id that was never used.
    #[error("the peer named subscription {0}, which does not exist")]
    UnknownSubscription(SubscriptionId),
    /// A subscription id used twice, or one that would leave too many gaps between used ids.
    #[error("the peer used subscription id {0} twice, or ids with too many gaps between them")]
    DuplicateSubscription(SubscriptionId),
    /// A watch id that does not exist, or has ended.
    #[error("the peer named watch {}, which does not exist", .0.0)]
    UnknownWatch(WatchId),
    /// A watch id used twice.
    #[error("the peer used watch id {} twice", .0.0)]
    DuplicateWatch(WatchId),
    /// A lane number above the largest that the protocol allows.
    #[error("the peer named lane {0}, which is above the largest lane number")]
    LaneOutOfRange(LaneId),
    /// More watches than a session may have.
    #[error("the peer requested more than {0} watches")]
    TooManyWatches(usize),
    /// A version other than the one being sent.
    #[error("the peer named version {version} of epoch {epoch}, which is not being sent")]
    WrongVersion {
        /// The named epoch.
        epoch: Epoch,
        /// The named version.
        version: Version,
    },
    /// A chunk number beyond those of the manifest.
    #[error("the peer sent chunk {chunk} of a version that has {count}")]
    NoSuchChunk {
        /// The chunk.
        chunk: ChunkIndex,
        /// The number of chunks.
        count: u32,
    },
    /// A chunk without a selected tensor.
    #[error("the peer sent chunk {0}, which contains no selected tensor")]
    NotSelected(ChunkIndex),
    /// A chunk whose raw size differs from the manifest.
    #[error("the peer sent chunk {chunk} with {found} raw bytes where the manifest says {expected}")]
    WrongChunkSize {
        /// The chunk.
        chunk: ChunkIndex,
        /// The size by the manifest.
        expected: u64,
        /// The size by the chunk's header.
        found: u32,
    },
    /// An encoding larger than its raw chunk.
    #[error("the peer sent chunk {chunk} encoded in {encoded} bytes, more than its {raw} raw ones")]
    Inflated {
        /// The chunk.
        chunk: ChunkIndex,
        /// The encoded size.
        encoded: u32,
        /// The size in the payload.
        raw: u32,
    },
    /// A chunk that was already received or is being received.
    #[error("the peer sent chunk {0} twice")]
    DuplicateChunk(ChunkIndex),
    /// A base that this end does not hold.
    #[error("the peer coded chunk {chunk} against version {base}, which this end does not hold")]
    UnknownBase {
        /// The chunk.
        chunk: ChunkIndex,
        /// The named base.
        base: Version,
    },
    /// A delta codec without a base, or a base with a codec that needs none.
    #[error("the peer sent chunk {chunk} in {codec}, which needs a base if and only if it makes deltas")]
    CodecAndBase {
        /// The chunk.
        chunk: ChunkIndex,
        /// The codec.
        codec: &'static str,
    },
    /// A codec that this end knows but did not offer.
    #[error("the peer used codec {0}, which was not offered")]
    CodecNotOffered(&'static str),
    /// A second shared encoding of a chunk, which differs from the first.
    #[error("the peer named two different encodings of chunk {0}")]
    OtherEncoding(ChunkIndex),
    /// A list of topics beyond the limit.
    #[error("the peer listed more than {0} topics")]
    TooManyTopics(usize),
    /// A second manifest while one is still arriving.
    #[error("the peer sent two manifests for subscription {0} at once")]
    TwoManifests(SubscriptionId),
    /// More chunks than were granted.
    #[error("the peer sent more chunks than it had credit for")]
    CreditExceeded,
    /// In mode `every`, an announcement while twice the window is unacknowledged.
    #[error("the peer announced many more unacknowledged versions than the window of {0} allows")]
    WindowExceeded(u32),
    /// More credit than the protocol allows.
    #[error("the peer granted more credit than {0} chunks")]
    CreditOverflow(u32),
    /// More requested chunks than a sender queues, or in more ranges.
    #[error("the peer requested more chunks at once than it may")]
    TooManyRequested,
    /// A manifest with another digest than the announced one.
    #[error("the peer sent a manifest that is not the one it announced")]
    WrongManifest,
    /// A version marked `afresh` that this end had not named in `have` or `partial`.
    #[error("the peer announced version {0} afresh, but this end had named no content of it")]
    UnexpectedAfresh(Version),
    /// A version number that does not rise.
    #[error("the peer announced version {found} after version {after} of the same epoch")]
    VersionNotRising {
        /// The announced version.
        found: Version,
        /// The last version that ended or that this end named in `have`.
        after: Version,
    },
}

/// Defines every close code once: number, name, meaning.
macro_rules! close_codes {
    ($($(#[$doc:meta])* $variant:ident = $code:literal, $meaning:literal;)*) => {
        /// Why a connection was closed, as a number (PROTOCOL.md §9).
        ///
        /// It is the QUIC application error code. The text sent beside it is for people and contains no confidential
        /// details.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum CloseCode { $($(#[$doc])* $variant,)* }

        impl CloseCode {
            /// Every code of this revision.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The number on the wire.
            pub fn code(self) -> u32 {
                match self { $(Self::$variant => $code,)* }
            }

            /// The code with this number, if this build knows it.
            pub fn from_code(code: u64) -> Option<Self> {
                match code { $($code => Some(Self::$variant),)* _ => None }
            }

            /// The meaning in a few words.
            pub fn meaning(self) -> &'static str {
                match self { $(Self::$variant => $meaning,)* }
            }
        }
    };
}

close_codes! {
    /// The connection ended normally.
    Done = 0, "done";
    /// An internal failure of the end that closed the connection.
    Internal = 1, "the other end failed; its log says why";
    /// The server is shutting down.
    ShuttingDown = 2, "the server is shutting down";
    /// A message could not be read.
    Malformed = 16, "a message could not be read";
    /// A message broke a rule.
    ProtocolViolation = 17, "a message broke a rule of the protocol";
    /// The two ends share no protocol revision.
    Incompatible = 18, "the two ends share no protocol revision: update the older one";
    /// The peer did not prove that it has access.
    Unauthorised = 32, "access was refused";
    /// The peer did not answer in time.
    TimedOut = 33, "a deadline passed";
    /// The server's limits or memory leave no room for another session or lane.
    TooBusy = 34, "the server has as many sessions as it may, or no room for more";
    /// A lane reached another server process than its session's.
    WrongInstance = 35, "the lane reached another server process than its session's";
}

impl fmt::Display for CloseCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.meaning())
    }
}

impl From<&MessageError> for CloseCode {
    fn from(_: &MessageError) -> Self {
        Self::Malformed
    }
}

impl From<&ProtocolViolation> for CloseCode {
    fn from(_: &ProtocolViolation) -> Self {
        Self::ProtocolViolation
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// PROTOCOL.md §9: the numbers are part of the wire.
    #[test]
    fn close_codes_are_frozen() {
        let codes: Vec<u32> = CloseCode::ALL.iter().map(|c| c.code()).collect();
        assert_eq!(codes, [0, 1, 2, 16, 17, 18, 32, 33, 34, 35]);
        for code in CloseCode::ALL {
            assert_eq!(CloseCode::from_code(code.code().into()), Some(*code));
        }
        assert_eq!(CloseCode::from_code(1 << 40), None);
    }
}
