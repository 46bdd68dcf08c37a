//! [`Relay`]: offers what clients of this process receive from other servers to clients of this one, while it arrives
//! (PROTOCOL.md §3.20).

mod source;
mod topic;
mod version;

use crate::{TopicOptions, shared::Shared};
use std::{collections::BTreeMap, fmt, sync::Arc};
use tensor_relay_device::{HostSource, Lock};
use tensor_relay_protocol::{ChunkHash, EndReason, Manifest, Metadata, RelayId, RelayPath, Topic, VersionId};
use tensor_relay_transport::{
    egress::Payload,
    forwarding::{Forward, Forwarded, Origin, ReceivedVersion},
};
use topic::RelayedTopic;
use version::RelayedVersion;

/// How a relay offers what it receives.
#[derive(Debug, Clone)]
pub struct RelayOptions {
    /// The relay's id. A version that came through it before is not offered.
    pub id: RelayId,
    /// The options of its topics. One version more than [`keep`](TopicOptions::keep) is retained while the newest one
    /// arrives.
    pub topics: TopicOptions,
    /// Whether every version is offered. If not, one that waits for slow readers gives way to a newer one.
    pub every: bool,
}

/// The topics of a server that come from other servers, with their origins' epochs and version numbers. Cheap to clone.
///
/// Each version is offered from the moment that its manifest is here. A chunk is sent as soon as it is verified, in the
/// encoding in which it came, if the client can decode that, and no version is reported as complete before this process
/// has committed it. If the origin is lost, versions stay on offer, and those under way wait for it.
#[derive(Debug, Clone)]
pub struct Relay(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    shared: Arc<Shared>,
    options: RelayOptions,
    topics: Lock<BTreeMap<Topic, Arc<RelayedTopic>>>,
}

impl Relay {
    pub(crate) fn new(shared: &Arc<Shared>, options: RelayOptions) -> Self {
        Self(Arc::new(Inner { shared: Arc::clone(shared), options, topics: Lock::default() }))
    }

    /// Where a client of an origin offers its versions, and passes them on to `peers`, if it shares them with those. Call
    /// it on a runtime.
    pub fn forward(&self, peers: Option<Arc<dyn Forward>>) -> Arc<dyn Forward> {
        self.forward_of(peers, |_| true)
    }

    /// The same for one of several origins. If it refuses a topic to this relay, that ends the topic here only if it
    /// `may_refuse` it: it may have come from another origin, which does not refuse it.
    pub fn forward_of(
        &self,
        peers: Option<Arc<dyn Forward>>,
        may_refuse: impl Fn(&Topic) -> bool + Send + Sync + 'static,
    ) -> Arc<dyn Forward> {
        Arc::new(RelayForward { relay: self.clone(), peers, may_refuse: MayRefuse(Box::new(may_refuse)) })
    }

    /// Waits until each version of `topic` that began so far is on offer, or will not be. Cancel safe.
    pub async fn offered(&self, topic: &Topic) {
        let topic = self.0.topics.lock().get(topic).cloned();
        if let Some(topic) = topic {
            topic.idle().await;
        }
    }

    /// Offers a version that is here as a whole, such as one of an earlier run. `relays` are those that it came through
    /// before.
    pub fn restore(&self, id: VersionId, version: RestoredVersion) {
        let RestoredVersion { manifest, source, hashes, metadata, relays } = version;
        let Ok(path) = relays.through(self.0.options.id) else { return };
        let (topic, payload) =
            (self.topic(&id.topic), Payload::with_hashes(manifest, Arc::new(source), &hashes));
        RelayedVersion::restored(id, payload, metadata, path, &topic);
    }

    /// Ends a topic for a reason that its origin gave, or with which the origin refuses this relay.
    pub fn end(&self, topic: &Topic, reason: EndReason) {
        if let Some(topic) = self.0.topics.lock().remove(topic) {
            topic.end(reason);
        }
    }

    fn topic(&self, name: &Topic) -> Arc<RelayedTopic> {
        let mut topics = self.0.topics.lock();
        let begin = || RelayedTopic::begin(name.clone(), &self.0.shared, &self.0.options);
        Arc::clone(topics.entry(name.clone()).or_insert_with(begin))
    }
}

/// A version that is here as a whole.
#[derive(Debug)]
pub struct RestoredVersion {
    /// Its manifest.
    pub manifest: Arc<Manifest>,
    /// Its bytes.
    pub source: HostSource,
    /// The hashes of its chunks, with which the bytes were compared.
    pub hashes: Vec<ChunkHash>,
    /// What its publisher says about it.
    pub metadata: Metadata,
    /// The relays that it came through, without this one.
    pub relays: RelayPath,
}

/// The side that a client has.
#[derive(Debug)]
struct RelayForward {
    relay: Relay,
    peers: Option<Arc<dyn Forward>>,
    may_refuse: MayRefuse,
}

/// Whether a refusal of the client's origin ends a topic.
struct MayRefuse(Box<dyn Fn(&Topic) -> bool + Send + Sync>);

impl fmt::Debug for MayRefuse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MayRefuse")
    }
}

impl Forward for RelayForward {
    fn set_origin(&self, origin: Origin) {
        if let Some(peers) = &self.peers {
            peers.set_origin(origin);
        }
    }

    fn begin(&self, version: ReceivedVersion) -> Option<Arc<dyn Forwarded>> {
        let path = version.relays.through(self.relay.0.options.id).ok()?; // Otherwise the client refuses it.
        let peers = self.peers.as_ref().and_then(|peers| peers.begin(version.clone()));
        let topic = self.relay.topic(&version.id.topic);
        Some(RelayedVersion::arriving(version, path, &topic, peers))
    }

    fn revoke(&self, topic: &Topic, taker: [u8; 32], restored: bool) {
        if let Some(peers) = &self.peers {
            peers.revoke(topic, taker, restored);
        }
    }

    /// Other reasons are about this relay's subscription alone: it subscribes again.
    fn end(&self, topic: &Topic, reason: EndReason) {
        if let Some(peers) = &self.peers {
            peers.end(topic, reason);
        }
        let is_over = match reason {
            EndReason::TopicEnded | EndReason::Withdrawn | EndReason::Expired => true,
            EndReason::Forbidden => (self.may_refuse.0)(topic),
            _ => false,
        };
        if is_over {
            self.relay.end(topic, reason);
        }
    }
}
