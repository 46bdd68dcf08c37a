//! [`RelayedVersion`]: a version that is received from another server, and offered here.

use super::{source::ArrivingSource, topic::RelayedTopic};
use crate::{Publishable, publishable::Relayed};
use bytes::Bytes;
use std::sync::Arc;
use tensor_relay_device::HostSource;
use tensor_relay_protocol::{
    ChunkHeader, EncodingEntry, Epoch, Here, Metadata, RangeSet, RelayPath, Version, VersionId,
};
use tensor_relay_transport::{
    egress::{Arrival, Payload},
    forwarding::{Forwarded, ReceivedVersion},
    sending::Offered,
};

/// A version on offer from its manifest on. The client's hold of it is the last one that matters before the commit: if it is
/// dropped, the version is given up. Afterwards it stays on offer for as long as it is retained.
#[derive(Debug)]
pub(super) struct RelayedVersion {
    pub(super) id: VersionId,
    metadata: Metadata,
    payload: Arc<Payload>,
    /// Where its bytes are, if it is not here as a whole from the beginning.
    source: Option<Arc<ArrivingSource>>,
    pub(super) arrival: Arc<Arrival>,
    path: RelayPath,
    topic: Arc<RelayedTopic>,
    /// Its hold at the client's peers.
    peers: Option<Arc<dyn Forwarded>>,
}

/// What the client holds.
#[derive(Debug)]
struct Hold(Arc<RelayedVersion>);

impl RelayedVersion {
    /// Begins a version of which nothing is here yet.
    pub(super) fn arriving(
        version: ReceivedVersion,
        path: RelayPath,
        topic: &Arc<RelayedTopic>,
        peers: Option<Arc<dyn Forwarded>>,
    ) -> Arc<dyn Forwarded> {
        let ReceivedVersion { id, manifest, metadata, memory, .. } = version;
        let arrival = Arc::<Arrival>::default();
        let workers = topic.shared().config.workers;
        let source =
            Arc::new(ArrivingSource::new(Arc::clone(&manifest), memory, Arc::clone(&arrival), workers));
        let payload = Arc::new(Payload::new(manifest, Arc::clone(&source) as Arc<_>));
        let (source, topic) = (Some(source), Arc::clone(topic));
        let begun = Arc::new(Self { id, metadata, payload, source, arrival, path, topic, peers });
        begun.topic.publish(Arc::clone(&begun));
        Arc::new(Hold(begun))
    }

    /// Begins a version that is here as a whole.
    pub(super) fn restored(
        id: VersionId,
        payload: Payload,
        metadata: Metadata,
        path: RelayPath,
        topic: &Arc<RelayedTopic>,
    ) {
        let arrival = Arc::<Arrival>::default();
        arrival.handle_committed();
        let (payload, topic) = (Arc::new(payload), Arc::clone(topic));
        let begun = Arc::new(Self { id, metadata, payload, source: None, arrival, path, topic, peers: None });
        begun.topic.publish(Arc::clone(&begun));
    }

    pub(super) fn key(&self) -> (Epoch, Version) {
        (self.id.epoch, self.id.version)
    }

    /// What is published of it.
    pub(super) fn publishable(&self) -> (Publishable, Metadata) {
        let relayed = Relayed { arrival: Arc::clone(&self.arrival), path: self.path.clone() };
        let payload = Arc::clone(&self.payload);
        let version = Publishable { payload, returned: None, charge: None, relayed: Some(relayed) };
        (version, self.metadata.clone())
    }
}

impl Forwarded for Hold {
    fn keep(&self, header: &ChunkHeader, encoded: &[u8]) -> Option<Bytes> {
        let kept = self.0.peers.as_ref().and_then(|peers| peers.keep(header, encoded));
        kept.or_else(|| self.0.topic.shared().egress.encoder.keep(header, encoded))
    }

    fn handle_verified(&self, header: &ChunkHeader, encoding: Option<Bytes>) -> bool {
        let RelayedVersion { payload, arrival, topic, peers, id, .. } = &*self.0;
        if payload.handle_read(header.chunk, header.hash).is_err() {
            return false; // Its origin has changed it: the version will not be committed.
        }
        let base = header.base.and_then(|base| topic.find((id.epoch, base)));
        let base = base.as_ref().map(|base| base.payload());
        topic
            .shared()
            .egress
            .encoder
            .handle_received(payload, header, encoding.clone(), base);
        arrival.handle_verified(header.chunk.0);
        topic.handle_arrived();
        peers.as_ref().is_some_and(|peers| peers.handle_verified(header, encoding))
    }

    fn handle_encodings(&self, entries: &[EncodingEntry]) {
        if let Some(peers) = &self.0.peers {
            peers.handle_encodings(entries);
        }
    }

    fn offered(&self) -> RangeSet {
        match (&self.0.peers, self.0.arrival.here()) {
            (Some(peers), _) => peers.offered(),
            (None, Here::SoFar(chunks) | Here::Only(chunks)) => RangeSet::clone(&chunks),
            (None, Here::All) => RangeSet::from_range(0..self.0.payload.manifest().chunking().count()),
        }
    }

    fn handle_committed(&self, whole: Option<HostSource>) {
        let RelayedVersion { id, source, arrival, topic, peers, .. } = &*self.0;
        if let Some(peers) = peers {
            peers.handle_committed(whole.clone());
        }
        if source.as_ref().is_some_and(|source| source.handle_committed(whole)) {
            arrival.handle_committed();
            topic.handle_whole(self.0.key());
        } else {
            tracing::error!(version = %id, "A version is not relayed, because it was not received into host memory.");
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if self.0.arrival.give_up() {
            self.0.topic.give_up(self.0.key());
        }
    }
}
