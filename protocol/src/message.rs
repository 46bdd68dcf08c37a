//! Control messages: what the two ends say to each other beside the data (PROTOCOL.md §3).
//!
//! [`wire`] holds them as protobuf has them; the typed messages here are what the rest of the code sees. Turning one
//! into the other is where everything a peer says is checked.

mod client;
mod frame;
mod lane;
mod server;
mod subscribe;
pub(crate) mod wire;

pub use client::{ClientMessage, Hello};
pub(crate) use frame::frame;
pub use frame::{FRAME_MAX_BYTES, decode_frame_length, encode_client, encode_server};
pub use lane::{LaneGrant, LaneOffer};
pub use server::{Announce, EndReason, ServerMessage, TopicEntry, Welcome};
pub use subscribe::{GLOBS_MAX, Mode, PARTIAL_RANGES_MAX, Partial, SELECTION_MAX_BYTES, Start, Subscribe};

use crate::MessageError;
use std::fmt;

/// Names one subscription within a session. The client chooses it, and never twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SubscriptionId(pub u32);

impl fmt::Display for SubscriptionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Names one watch within a session. The client chooses it, and never twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WatchId(pub u32);

/// How many watches a session may have at once.
pub const WATCHES_MAX: usize = 16;

/// What a publisher says of one version beyond its tensors, e.g. `step = 1200`. Sent with every `Announce`, so keys and
/// values together, with 16 bytes for each entry, stay below 32 KiB; what does not change between versions belongs into the manifest.
pub type Metadata = Vec<(String, String)>;

/// The most bytes of metadata in an `Announce`, so that the message stays within its frame.
pub(crate) const METADATA_MAX_BYTES: usize = 32 << 10;

/// What one entry counts beyond its text: more than protobuf's tags and lengths take, so that the bound on metadata bounds
/// the message too.
const METADATA_ENTRY_BYTES: usize = 16;

/// Why one end gives up one version of one subscription.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AbortReason {
    /// The bytes did not verify at the receiver.
    Corrupt,
    /// The source could not be read any more.
    SourceLost,
    /// No byte moved within the deadline.
    Stalled,
    /// The receiver has no memory for it.
    OverBudget,
    /// The publisher took it back, or it left retention and the time to finish passed.
    Withdrawn,
    /// A newer version is there, and the subscriber asked not to wait for older ones.
    Superseded,
    /// The receiver's device could not take it.
    DeviceFailed,
    /// A reason of a later revision.
    Other(u32),
}

impl AbortReason {
    fn code(self) -> u32 {
        match self {
            Self::Corrupt => 1,
            Self::SourceLost => 2,
            Self::Stalled => 3,
            Self::OverBudget => 4,
            Self::Withdrawn => 5,
            Self::Superseded => 6,
            Self::DeviceFailed => 7,
            Self::Other(code) => code,
        }
    }

    fn from_code(code: u32) -> Self {
        match code {
            1 => Self::Corrupt,
            2 => Self::SourceLost,
            3 => Self::Stalled,
            4 => Self::OverBudget,
            5 => Self::Withdrawn,
            6 => Self::Superseded,
            7 => Self::DeviceFailed,
            other => Self::Other(other),
        }
    }
}

impl fmt::Display for AbortReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Corrupt => f.write_str("its bytes did not verify"),
            Self::SourceLost => f.write_str("its source could not be read any more"),
            Self::Stalled => f.write_str("no byte of it moved within the deadline"),
            Self::OverBudget => f.write_str("the receiver has no memory for it"),
            Self::Withdrawn => f.write_str("its publisher takes it back"),
            Self::Superseded => f.write_str("a newer version took its place"),
            Self::DeviceFailed => f.write_str("the receiver's device could not take it"),
            Self::Other(code) => write!(f, "a reason with code {code} that this build does not know"),
        }
    }
}

/// A field that must be present.
pub(crate) fn required<T>(field: &'static str, value: Option<T>) -> Result<T, MessageError> {
    value.ok_or(MessageError::MissingField(field))
}

/// A field of exactly `N` bytes.
pub(crate) fn exactly<const N: usize>(field: &'static str, bytes: &[u8]) -> Result<[u8; N], MessageError> {
    bytes
        .try_into()
        .map_err(|_| MessageError::WrongLength { field, expected: N, found: bytes.len() })
}

/// Checks that `metadata` fits an `Announce`.
///
/// # Errors
/// [`MessageError::TooLarge`] with the numbers.
pub fn check_metadata(metadata: &Metadata) -> Result<(), MessageError> {
    let bytes: usize = metadata.iter().map(|(k, v)| k.len() + v.len() + METADATA_ENTRY_BYTES).sum();
    match bytes > METADATA_MAX_BYTES {
        true => Err(MessageError::TooLarge { what: "metadata", bytes, max: METADATA_MAX_BYTES }),
        false => Ok(()),
    }
}
