//! Control messages of both ends (PROTOCOL.md §3).
//!
//! [`wire`] contains the protobuf types; all other code uses the typed messages defined here. The conversion validates
//! every field that a peer sends.

mod address;
mod boxes;
mod client;
mod feature;
pub(crate) mod field;
mod frame;
mod lane;
mod lending;
mod probe;
mod relays;
mod server;
mod sharing;
mod subscribe;
pub(crate) mod wire;

pub use address::{ADDRESSES_MAX, LaneAddress, Transport};
pub use boxes::{BOXES_MAX, Indices, Slice, TensorBox, check_boxes};
pub use client::{ClientMessage, Hello};
pub use feature::{Feature, FeatureSet};
pub use field::PARTIAL_RANGES_MAX;
pub(crate) use field::{Field, exactly, required};
pub(crate) use frame::frame;
pub use frame::{FRAME_MAX_BYTES, decode_frame_length, encode_client, encode_server};
pub use lane::{InstanceId, LaneGrant, LaneId, LaneOffer};
pub use lending::{Lending, Lent, LentOnGpu, NotLent, WantedGpu};
pub use probe::{PROBE_REPORT_BYTES, ProbeBytes, ProbeReport};
pub use relays::{PathError, RELAYS_MAX, RelayId, RelayPath};
pub use server::{Announce, EndReason, HASHES_MAX, Place, ServerMessage, TopicEntry, Welcome};
pub use sharing::{
    ENCODINGS_MAX, Held, PEER_ADDRESSES_MAX, PeerAddress, SOURCE_RANGES_MAX, SOURCES_MAX, Share, Site, Source,
};
pub use subscribe::{
    Consumer, GLOBS_MAX, Have, LAYERS_MAX, Mode, Order, Partial, SELECTION_MAX_BYTES, Start, Subscribe,
};

use crate::MessageError;
use std::fmt;

/// The id of a subscription within a session. The client chooses it and reuses none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SubscriptionId(pub u32);

impl fmt::Display for SubscriptionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// The id of a watch within a session. The client chooses it and reuses none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WatchId(pub u32);

/// The most watches of a session at once.
pub const WATCHES_MAX: usize = 16;

/// The publisher's metadata of one version, e.g. `step = 1200`. Sent with every `Announce`, so keys and values, plus 16
/// bytes for each entry, are limited to 32 KiB; metadata that does not change between versions belongs in the manifest.
pub type Metadata = Vec<(String, String)>;

/// The most bytes of metadata in an `Announce`, so that the message stays within its frame.
pub(crate) const METADATA_MAX_BYTES: usize = 32 << 10;

/// The bytes counted for an entry besides its key and value: at least the size of protobuf's tags and lengths, so that
/// the limit on metadata limits the message, too.
const METADATA_ENTRY_BYTES: usize = 16;

/// Defines an enum of reasons, each with its number and meaning.
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
                    Self::Other(code) => write!(f, "reason {code}, which this build does not know"),
                }
            }
        }
    };
}

pub(crate) use reasons;

reasons! {
    /// Why one end aborted a version of a subscription.
    AbortReason:
    /// Verification at the receiver failed.
    Corrupt = 1, "its bytes do not have the sender's hash";
    /// The source could not be read any more.
    SourceLost = 2, "its source could not be read any more";
    /// No byte was transferred within the deadline.
    Stalled = 3, "no byte of it was transferred within the deadline";
    /// The receiver has no memory for it.
    OverBudget = 4, "the receiver has no memory for it";
    /// The publisher withdrew it, or its time to finish after leaving retention has passed.
    Withdrawn = 5, "its publisher withdrew it";
    /// A newer version is available, and the subscription has `preempt` set.
    Superseded = 6, "a newer version replaced it";
    /// Copying it to the receiver's device failed.
    DeviceFailed = 7, "it could not be copied to the receiver's device";
    /// The publisher changed or freed its memory or files while it was on offer.
    SourceChanged = 8, "its publisher wrote to or freed its memory or files while it was on offer";
    /// A box that the receiver wants does not fit it.
    BoxMisfit = 9, "a box that the receiver wants does not fit it";
}

/// Checks that `metadata` fits an `Announce`.
///
/// # Errors
/// [`MessageError::TooLarge`] otherwise.
pub fn check_metadata(metadata: &Metadata) -> Result<(), MessageError> {
    let bytes: usize = metadata.iter().map(|(k, v)| k.len() + v.len() + METADATA_ENTRY_BYTES).sum();
    match bytes > METADATA_MAX_BYTES {
        true => Err(MessageError::TooLarge { what: "metadata", bytes, max: METADATA_MAX_BYTES }),
        false => Ok(()),
    }
}
