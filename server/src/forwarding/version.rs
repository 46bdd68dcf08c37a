//! [`ForwardedVersion`]: a version that a member of this process receives or has received.

use bytes::Bytes;
use std::{
    fmt,
    future::ready,
    ops::Range,
    sync::{Arc, OnceLock},
};
use tensor_relay_device::{BoxFuture, HostSource, Source, SourceError};
use tensor_relay_protocol::{
    ChunkHeader, EncodingEntry, EndReason, Feature, ManifestDigest, Metadata, Published, RangeSet,
    VersionDigest, VersionId,
};
use tensor_relay_transport::{
    Workers,
    egress::{Pace, Payload, ReceivedChunks},
    forwarding::{Forwarded, ReceivedVersion},
    sending::Offered,
};
use tokio::{sync::watch, time::Instant};

/// The part of a version's payload that kept encodings may take by default.
const KEPT_PART: u64 = 4;

/// The most that they take by default.
const KEPT_BYTES_MAX: u64 = 1 << 30;

/// A version on offer to takers, from its first chunk until its member withdraws it.
#[derive(Debug)]
pub(crate) struct ForwardedVersion {
    id: VersionId,
    metadata: Metadata,
    /// Its manifest and the hashes of its chunks. Its bytes are in `received`.
    payload: Payload,
    received: Arc<ReceivedChunks>,
    abort_at: watch::Sender<Option<Instant>>,
    /// Why the topic ended at its origin, if it did.
    end: OnceLock<EndReason>,
}

impl ForwardedVersion {
    /// A version of which nothing is here yet.
    pub(super) fn new(
        version: ReceivedVersion,
        kept_bytes: Option<u64>,
        pace: Option<Arc<Pace>>,
        workers: Workers,
    ) -> Self {
        let ReceivedVersion { id, manifest, metadata, memory, .. } = version;
        let payload_bytes = manifest.payload_bytes();
        let kept_bytes = kept_bytes.unwrap_or_else(|| (payload_bytes / KEPT_PART).min(KEPT_BYTES_MAX));
        let received =
            ReceivedChunks::new(Arc::clone(&manifest), memory, kept_bytes, workers).with_pace(pace);
        let payload = Payload::new(manifest, Arc::new(Elsewhere { len_bytes: payload_bytes }));
        let abort_at = watch::Sender::new(None);
        Self { id, metadata, payload, received: Arc::new(received), abort_at, end: OnceLock::new() }
    }

    /// Why the topic ended at its origin, if it did.
    pub(crate) fn ended(&self) -> Option<EndReason> {
        self.end.get().copied()
    }

    /// The chunks on offer.
    pub(crate) fn offered(&self) -> Arc<RangeSet> {
        self.received.offered()
    }

    /// Withdraws it, because its topic ended at its origin.
    pub(super) fn end(&self, reason: EndReason) {
        self.end.get_or_init(|| reason); // Takers are told this, and not that it is withdrawn.
        self.received.close();
    }

    /// Withdraws it: what is being sent is aborted, and its memory is free.
    pub(super) fn close(&self) {
        self.received.close();
        self.abort_at.send_replace(Some(Instant::now()));
    }

    fn handle_verified(&self, header: &ChunkHeader, encoding: Option<Bytes>) -> bool {
        // Takers are told the digest of what they were sent.
        let is_known = self.payload.handle_read(header.chunk, header.hash).is_ok();
        is_known && self.received.handle_verified(header, encoding)
    }
}

impl Published for ForwardedVersion {
    fn id(&self) -> &VersionId {
        &self.id
    }

    fn manifest_digest(&self) -> ManifestDigest {
        self.payload.manifest().digest()
    }

    fn feature(&self) -> Option<Feature> {
        self.payload.manifest().feature()
    }
}

impl Offered for ForwardedVersion {
    fn payload(&self) -> &Payload {
        &self.payload
    }

    fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    fn may_be_base(&self) -> bool {
        false
    }

    fn note_digest(&self, _: VersionDigest) {}

    fn is_stood_for_by(&self, _: VersionDigest) -> bool {
        false
    }

    fn abort_at(&self) -> watch::Receiver<Option<Instant>> {
        self.abort_at.subscribe()
    }

    fn received(&self) -> Option<&Arc<ReceivedChunks>> {
        Some(&self.received)
    }
}

/// The member's hold of a version. It is withdrawn when this is dropped.
pub(super) struct OnOffer<R: Fn(&Arc<ForwardedVersion>)> {
    version: Arc<ForwardedVersion>,
    remove: R,
}

impl<R: Fn(&Arc<ForwardedVersion>)> OnOffer<R> {
    /// Holds `version`, until `remove` has removed it.
    pub(super) fn new(version: Arc<ForwardedVersion>, remove: R) -> Self {
        Self { version, remove }
    }
}

impl<R: Fn(&Arc<ForwardedVersion>) + Send + Sync> Forwarded for OnOffer<R> {
    fn keep(&self, header: &ChunkHeader, encoded: &[u8]) -> Option<Bytes> {
        self.version.received.keep(header, encoded)
    }

    fn handle_verified(&self, header: &ChunkHeader, encoding: Option<Bytes>) -> bool {
        self.version.handle_verified(header, encoding)
    }

    fn handle_encodings(&self, entries: &[EncodingEntry]) {
        self.version.received.handle_encodings(entries);
    }

    fn offered(&self) -> RangeSet {
        RangeSet::clone(&self.version.received.offered())
    }

    fn handle_committed(&self, _: Option<HostSource>) {
        tracing::debug!(version = %self.version.id, "A version that was received stays on offer to peers.");
    }
}

impl<R: Fn(&Arc<ForwardedVersion>)> Drop for OnOffer<R> {
    fn drop(&mut self) {
        (self.remove)(&self.version);
        self.version.close();
    }
}

impl<R: Fn(&Arc<ForwardedVersion>)> fmt::Debug for OnOffer<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OnOffer").field(&self.version.id).finish()
    }
}

/// The bytes of a forwarded version, which are not read as a payload's: its chunks are sent as they came.
#[derive(Debug)]
struct Elsewhere {
    len_bytes: u64,
}

impl Source for Elsewhere {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn read(&self, Range { start, end }: Range<u64>) -> BoxFuture<'_, Result<Bytes, SourceError>> {
        Box::pin(ready(Err(SourceError::Gone { start, end })))
    }
}
