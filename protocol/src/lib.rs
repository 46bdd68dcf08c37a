//! The tensor-relay protocol: the meaning of every byte on the wire.
//!
//! This crate is pure: its inputs are bytes, numbers and facts, its outputs bytes, numbers and decisions. It uses no
//! socket, thread, clock or file, so every rule of the protocol can be tested without them. `PROTOCOL.md` beside this
//! crate specifies the same protocol in prose; tests cite its clauses.
//!
//! Input is parsed once, on arrival: every [`Topic`], [`Manifest`] and [`ClientMessage`] value is valid by itself, and
//! no inner code checks that again. Hostile bytes cause errors that name the party to blame ([`error`](mod@error)),
//! never a panic, and never an allocation beyond [`Limits`].

#![deny(unsafe_code)]

mod access;
mod boxes;
mod chunk;
mod codec;
mod credit;
pub mod engine_cache;
pub mod error;
pub mod files;
mod glob;
mod integrity;
mod limits;
mod manifest;
mod message;
mod name;
mod peers;
mod protobuf;
mod ranges;
pub mod safetensors;
mod selection;
mod sender;
pub mod sidecar;
mod subscriber;
pub mod swarm;
mod tensor;
mod ticket;
mod trial;
mod version;

pub use access::{
    Claims, Grant, GrantError, Secret, SecretError, SecretId, TicketId, Token, TokenError, Verb, Verbs,
};
pub use boxes::{Bounds, NotWholeBytes, Overlap, Rectangle};
pub use chunk::{ChunkHeader, ChunkIndex, Chunking, HEADER_BYTES, ManifestHeader, ProbeHeader, StreamHeader};
pub use codec::{
    BitPlanes, Codec, CodecChoice, CodecId, CodecSet, Context, DecodeError, Effort, Planes, Raw, SMALL_BYTES,
    SizeEstimate, Sparse, Zstd, codec, worthwhile_bytes,
};
#[doc(hidden)]
pub use codec::{BitPlanesOn, CodecPath};
pub use credit::Credit;
pub use error::{CloseCode, MessageError, ProtocolViolation};
pub use glob::{Glob, GlobError};
pub use integrity::{ChunkHash, ChunkHasher, CorruptChunk, ManifestDigest, Verified, VersionDigest};
pub use limits::Limits;
pub use manifest::{
    Cuts, CutsError, LayoutError, Manifest, ManifestError, PAYLOAD_ALIGNMENT, Piece, Tensor, TensorSpec,
};
pub use message::{
    ADDRESSES_MAX, AbortReason, Announce, BOXES_MAX, ClientMessage, Consumer, ENCODINGS_MAX, EndReason,
    FRAME_MAX_BYTES, Feature, FeatureSet, GLOBS_MAX, HASHES_MAX, Have, Held, Hello, Indices, InstanceId,
    LAYERS_MAX, LaneAddress, LaneGrant, LaneId, LaneOffer, Lending, Lent, LentOnGpu, Metadata, Mode, NotLent,
    Order, PARTIAL_RANGES_MAX, PEER_ADDRESSES_MAX, PROBE_REPORT_BYTES, Partial, PathError, PeerAddress,
    Place, ProbeBytes, ProbeReport, RELAYS_MAX, RelayId, RelayPath, SELECTION_MAX_BYTES, SOURCE_RANGES_MAX,
    SOURCES_MAX, ServerMessage, Share, Site, Slice, Source, Start, Subscribe, SubscriptionId, TensorBox,
    TopicEntry, Transport, WATCHES_MAX, WantedGpu, WatchId, Welcome, check_boxes, check_metadata,
    decode_frame_length, encode_client, encode_server,
};
pub use name::{NameError, ReaderName, TensorName, Topic};
pub use peers::{EncodingEntry, EncodingHash, EncodingHasher, PeerSecret};
pub use ranges::RangeSet;
pub use selection::{BoxError, Part, PartPlace, Selection, Spread, Wanted};
pub use sender::{
    Announcement, Attempt, ChunkRequest, Claim, Ended, Here, Named, Pick, Published, ReadRetry, SendAction,
    Sender, SenderAction, Seq, SubscriptionMessage, Versions,
};
pub use subscriber::{
    Action, Assembly, Commit, Gap, Outcome, Released, StreamToken, Subscriber, VersionFault,
};
pub use tensor::{Dtype, Shape, ShapeError, Shard};
pub use ticket::{Ticket, TicketError};
pub use trial::{Pause, Pauses, Trial};
pub use version::{Epoch, Version, VersionId};

/// The application protocol that both ends name in the TLS handshake (ALPN). With a peer of another major protocol the
/// handshake fails, before either end misreads a byte.
pub const ALPN: &[u8] = b"tensor-relay/1";

/// The protocol revisions that this build supports, oldest first. Revisions N and N-1 interoperate.
pub const PROTOCOL_REVISIONS: std::ops::RangeInclusive<u32> = 1..=1;
