//! The sending pipeline: source → hash and encode → data stream. [`Payload`] is a version at the sender; the
//! [`Encoder`] encodes its chunks for the wire, once for all subscribers; [`send_chunk`] and [`send_manifest`] send
//! chunks and manifests on a lane; [`Egress`] is what those who send share. Stages overlap because callers process several chunks at once, bounded by credit:
//! while one waits for the wire, the next is read and encoded.

mod arrival;
mod chooser;
mod chunk_cache;
mod encoder;
mod encoding_log;
mod encodings;
mod pace;
mod payload;
mod read;
mod reads;
mod received;

pub use arrival::{Arrival, GivenUp};
pub use chooser::CodecRequest;
pub use encoder::{Encoded, Encoder, EncoderStats};
pub use encoding_log::{EncodingClaim, EncodingLog};
pub use pace::Pace;
pub use payload::Payload;
pub use read::{READ_TIMEOUT, read};
pub use received::ReceivedChunks;

use crate::{ChunkTimes, InUse, Lane, LaneError, Tally};
use std::time::Duration;
use tensor_relay_protocol::{ChunkHeader, Manifest, ManifestHeader, StreamHeader, SubscriptionId};

/// The priority of manifests, above that of chunks: a receiver cannot place a chunk without its manifest.
const MANIFEST_PRIORITY: i32 = 100;

/// The priority of all chunks. Lanes send streams of equal priority in the order of opening.
const CHUNK_PRIORITY: i32 = 0;

/// What all subscriptions of a process share to send, and where that is counted.
#[derive(Debug)]
pub struct Egress {
    /// Encodes each chunk once for all of them.
    pub encoder: Encoder,
    /// The maximum number of chunks in progress, for each lane of a subscription.
    pub chunks_in_flight: usize,
    /// The time without progress after which a transfer has stalled.
    pub stall_timeout: Duration,
    /// The bytes of copies of chunks that are being sent, of sources that are not in memory in one piece.
    pub copies: InUse,
    /// The budget for them. A slow subscriber may hold its copies for long, so nobody waits for it: while it is used up,
    /// each subscription sends one such chunk at a time.
    pub copies_max_bytes: u64,
    /// The chunks sent, of all topics.
    pub tally: Tally,
    /// The times that chunks took.
    pub chunk_times: ChunkTimes,
    /// Transfers in progress, each of one version to one subscription.
    pub transfers: InUse,
}

/// Sends `manifest` for `subscription` on a new stream. `progress` is called with the length of each piece that the
/// lane accepted.
///
/// # Errors
/// [`LaneError`] when the lane ended or the receiver stopped the stream.
pub async fn send_manifest(
    lane: &Lane,
    subscription: SubscriptionId,
    manifest: &Manifest,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<(), LaneError> {
    let encoded = manifest.encoded();
    let header = ManifestHeader { subscription, bytes: encoded.len() as u32, digest: manifest.digest() };
    let mut stream = lane.open_data(MANIFEST_PRIORITY).await?;
    stream.write_header(&StreamHeader::Manifest(header)).await?;
    stream.write(encoded.clone(), progress).await?;
    stream.finish()
}

/// Sends one chunk on a new stream. `progress` is called with the length of each piece that the lane accepted; a
/// session aborts the transfer if there is no progress within the session's deadline.
///
/// # Errors
/// [`LaneError`] when the lane ended or the receiver stopped the stream.
pub async fn send_chunk(
    lane: &Lane,
    header: ChunkHeader,
    encoded: &Encoded,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<(), LaneError> {
    let mut stream = lane.open_data(CHUNK_PRIORITY).await?;
    stream.write_header(&StreamHeader::Chunk(header)).await?;
    stream.write(encoded.bytes.clone(), progress).await?;
    stream.finish()
}
