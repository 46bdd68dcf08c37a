//! Control messages: the messages of both ends beside the data (PROTOCOL.md §3).
//!
//! [`wire`] holds the protobuf types; the typed messages here are what the rest of the code uses. The conversion checks
//! everything that a peer sends.

mod address;
mod client;
mod feature;
pub(crate) mod field;
mod frame;
mod lane;
mod probe;
mod server;
mod subscribe;
pub(crate) mod wire;

pub use address::{ADDRESSES_MAX, LaneAddress, SOURCES_MAX, Source, Transport};
pub use client::{ClientMessage, Hello};
pub use feature::{Feature, FeatureSet};
pub use field::PARTIAL_RANGES_MAX;
pub(crate) use field::{Field, exactly, required};
pub(crate) use frame::frame;
pub use frame::{FRAME_MAX_BYTES, decode_frame_length, encode_client, encode_server};
pub use lane::{InstanceId, LaneGrant, LaneId, LaneOffer};
pub use probe::{PROBE_REPORT_BYTES, ProbeBytes, ProbeReport};
pub use server::{Announce, EndReason, HASHES_MAX, Part, ServerMessage, TopicEntry, Welcome};
pub use subscribe::{
    GLOBS_MAX, Have, LAYERS_MAX, Mode, Order, Partial, SELECTION_MAX_BYTES, Start, Subscribe,
};

use crate::MessageError;
use std::fmt;

/// Identifies a subscription within a session. Chosen by the client, never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SubscriptionId(pub u32);

impl fmt::Display for SubscriptionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Identifies a watch within a session. Chosen by the client, never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WatchId(pub u32);

/// The most watches of a session at once.
pub const WATCHES_MAX: usize = 16;

/// The publisher's metadata of one version, e.g. `step = 1200`. Sent with every `Announce`, so keys and values
/// together, with 16 bytes for each entry, stay below 32 KiB; what does not change between versions belongs into the
/// manifest.
pub type Metadata = Vec<(String, String)>;

/// The most bytes of metadata in an `Announce`, so that the message stays within its frame.
pub(crate) const METADATA_MAX_BYTES: usize = 32 << 10;

/// The overhead counted per entry: more than protobuf's tags and lengths take, so that the bound on metadata bounds the
/// message too.
const METADATA_ENTRY_BYTES: usize = 16;

/// Defines an enum of reasons: number and meaning.
macro_rules! reasons {
    ($(#[$doc:meta])* $Reason:ident: $($(#[$each:meta])* $Variant:ident = $code:literal, $meaning:literal;)*) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum $Reason {
            $($(#[$each])* $Variant,)*
            /// A reason of a later revision.
            Other(u32),
        }

        impl $crate::message::Field for $Reason {
            type Wire = u32;

            fn into_wire(self) -> u32 {
                match self { $(Self::$Variant => $code,)* Self::Other(code) => code }
            }

            fn from_wire(_: &'static str, wire: u32) -> Result<Self, $crate::MessageError> {
                Ok(match wire { $($code => Self::$Variant,)* other => Self::Other(other) })
            }
        }

        impl std::fmt::Display for $Reason {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                match self {
                    $(Self::$Variant => f.write_str($meaning),)*
                    Self::Other(code) => write!(f, "a reason with code {code} that this build does not know"),
                }
            }
        }
    };
}

pub(crate) use reasons;

reasons! {
    /// Why one end gave up a version of a subscription.
    AbortReason:
    /// The bytes did not verify at the receiver.
    Corrupt = 1, "its bytes did not verify";
    /// The source could not be read any more.
    SourceLost = 2, "its source could not be read any more";
    /// No byte moved within the deadline.
    Stalled = 3, "no byte of it moved within the deadline";
    /// The receiver has no memory for it.
    OverBudget = 4, "the receiver has no memory for it";
    /// The publisher withdrew it, or it left retention and the time to finish passed.
    Withdrawn = 5, "its publisher takes it back";
    /// A newer version is there, and the subscriber asked not to wait for older ones.
    Superseded = 6, "a newer version took its place";
    /// The receiver's device could not take it.
    DeviceFailed = 7, "the receiver's device could not take it";
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
