//! The sending pipeline: source → hash and encode → data stream. [`Payload`] is a version at the sender; the
//! [`Encoder`] encodes its chunks for the wire, once for all subscribers; [`send_chunk`] and [`send_manifest`] send
//! chunks and manifests on a lane. Stages overlap because callers process several chunks at once, bounded by credit:
//! while one waits for the wire, the next is read and encoded.

mod chooser;
mod chunk_cache;
mod encoder;
mod encodings;
mod payload;
mod read;
mod reads;

pub use chooser::CodecRequest;
pub use encoder::{Encoded, Encoder, EncoderStats};
pub use payload::Payload;
pub use read::{READ_TIMEOUT, read};

use crate::{Lane, LaneError};
use tensor_relay_protocol::{ChunkHeader, Manifest, ManifestHeader, StreamHeader, SubscriptionId};

/// The priority of manifests, above that of chunks: a receiver cannot place a chunk without its manifest.
const MANIFEST_PRIORITY: i32 = 100;

/// The priority of all chunks. Lanes send streams of equal priority in the order of opening.
const CHUNK_PRIORITY: i32 = 0;

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
