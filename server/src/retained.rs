//! [`Retained`]: one published version.

use crate::{
    base_terms::BaseTerms, consumers::Consumers, loads::Loads, publishable::Relayed, swarm::SharedVersion,
    takers::Copies,
};
use std::{
    ops::Range,
    sync::{Arc, OnceLock},
    time::Duration,
};
use tensor_relay_device::{Charge, SourceError};
use tensor_relay_protocol::{
    Epoch, Feature, ManifestDigest, Metadata, Published, RelayPath, Selection, Tensor, Version,
    VersionDigest, VersionId,
};
use tensor_relay_transport::{
    egress::{Arrival, Payload},
    sending::Offered,
};
use tokio::{sync::watch, time::Instant};

/// One published version, kept in memory while it is in use.
#[derive(Debug)]
pub(crate) struct Retained {
    pub(crate) id: VersionId,
    pub(crate) payload: Arc<Payload>,
    /// The share of the budget for staged versions that its manifest takes.
    pub(crate) _charge: Option<Charge>,
    pub(crate) metadata: Metadata,
    /// The consumers that committed it.
    pub(crate) consumers: Consumers,
    /// The consumers that loaded it. The topic remembers them for longer.
    pub(crate) loads: Arc<Loads>,
    /// The time that its transfers have to finish after it left retention.
    pub(crate) release_timeout: Duration,
    /// When remaining transfers are aborted; set when it leaves retention.
    pub(crate) abort_at: watch::Sender<Option<Instant>>,
    /// Why it can never be read again, if so. The publisher's `Publication` shares it.
    pub(crate) failure: Arc<OnceLock<Box<str>>>,
    /// The number that stands for its digest at clients which map it, once one was told it.
    pub(crate) stand_in: OnceLock<VersionDigest>,
    /// Whether, and for how long, later versions may be encoded against it.
    pub(crate) base: BaseTerms,
    /// Its copies for clients of this host, if it lies on a GPU.
    pub(crate) copies: Copies,
    /// The clients that take it from each other, once there is one.
    pub(crate) shared: OnceLock<Arc<SharedVersion>>,
    /// Where it comes from, if it is received from another server.
    pub(crate) relayed: Option<Relayed>,
}

impl Retained {
    pub(crate) fn has_id(&self, epoch: Epoch, version: Version) -> bool {
        (self.id.epoch, self.id.version) == (epoch, version)
    }

    /// Records that it can never be read again, and returns the reason for its publisher.
    pub(crate) fn handle_unreadable(&self, error: &SourceError) -> &str {
        self.failure.get_or_init(|| {
            let changed = error.changed_range().unwrap_or(0..0);
            let is_changed = |range: Range<u64>| range.start < changed.end && changed.start < range.end;
            let tensors = self.payload.manifest().tensors().iter();
            let has_changed = |tensor: &&Tensor| tensor.ranges().any(is_changed);
            let mut names = tensors.filter(has_changed).map(|tensor| &tensor.name);
            let first = names.next().map(|name| format!(" Its first tensor there is {name}."));
            format!("{error}{}", first.unwrap_or_default()).into()
        })
    }

    /// The digest of what a client selects of it, or a number that stands for it while the chunks are not all hashed: the
    /// client has not to wait for that.
    pub(crate) fn name_for_taker(&self, selection: &Selection) -> VersionDigest {
        let known = self.payload.digest_of(selection.chunks());
        known.unwrap_or_else(|| *self.stand_in.get_or_init(|| VersionDigest(rand::random())))
    }

    /// Whether all of it is here.
    pub(crate) fn is_whole(&self) -> bool {
        self.relayed.as_ref().is_none_or(|relayed| relayed.arrival.is_whole())
    }

    /// Whether it left retention.
    pub(crate) fn has_left_retention(&self) -> bool {
        self.abort_at.borrow().is_some()
    }

    /// Starts the deadline of the transfers in progress.
    pub(crate) fn leave_retention(&self) {
        self.abort_at.send_replace(Some(Instant::now() + self.release_timeout));
    }
}

impl Published for Retained {
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

impl Offered for Retained {
    fn payload(&self) -> &Payload {
        &self.payload
    }

    fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    fn may_be_base(&self) -> bool {
        self.base.may_be
    }

    fn note_digest(&self, digest: VersionDigest) {
        self.loads.note_sent(digest);
    }

    fn is_stood_for_by(&self, digest: VersionDigest) -> bool {
        self.stand_in.get() == Some(&digest)
    }

    fn abort_at(&self) -> watch::Receiver<Option<Instant>> {
        self.abort_at.subscribe()
    }

    fn relays(&self) -> &RelayPath {
        match &self.relayed {
            Some(relayed) => &relayed.path,
            None => RelayPath::none(),
        }
    }

    fn arrival(&self) -> Option<&Arc<Arrival>> {
        self.relayed.as_ref().map(|relayed| &relayed.arrival)
    }
}
