//! [`Sharing`]: how one subscription takes part in the swarms of its versions.

use super::{Seat, SharedVersion, Sharer, signals::Signals};
use crate::{retained::Retained, topic::TopicState};
use std::{future::pending, sync::Arc};
use tensor_relay_protocol::{RangeSet, SubscriptionId, Version};
use tensor_relay_transport::sending::Input;

/// The fewest chunks of a version that is shared: of fewer, each member would be pushed a large part anyway.
const CHUNKS_MIN: u32 = 8;

/// A subscription of a client that may share.
#[derive(Debug)]
pub(crate) struct Sharing {
    sharer: Arc<Sharer>,
    subscription: SubscriptionId,
    /// What it is to be told, from its first seat on.
    signals: Option<Arc<Signals>>,
    /// Its seat in its last version, if that is shared.
    seat: Option<Arc<Seat>>,
}

impl Sharing {
    pub(crate) fn new(sharer: Arc<Sharer>, subscription: SubscriptionId) -> Self {
        Self { sharer, subscription, signals: None, seat: None }
    }

    /// Whether a version that is announced is shared: it has enough chunks, and the client shares.
    pub(crate) fn is_shared(&self, version: &Retained) -> bool {
        self.sharer.key().is_some() && version.payload.manifest().chunking().count() >= CHUNKS_MIN
    }

    /// Joins the members of a version that begins, and was announced as shared. The client selects `selected` of it, and may
    /// be sent deltas against `base`.
    pub(crate) fn begin(
        &mut self,
        (topic, version): (&TopicState, &Retained),
        selected: &RangeSet,
        base: Option<Version>,
    ) -> &Arc<Seat> {
        let shared = version.shared.get_or_init(|| SharedVersion::begin(topic, version));
        let signals = self.signals.get_or_insert_with(|| topic.grants().follow(&self.sharer));
        let of = (self.subscription, Arc::clone(signals));
        self.seat.insert(shared.join(&self.sharer, of, selected.clone(), base))
    }

    /// Waits for the next input of the subscription. Without a seat, that is what it is told of rights: what it received before
    /// may still be on offer. Cancel safe.
    pub(crate) async fn next(&self) -> Input {
        match (&self.seat, &self.signals) {
            (Some(seat), _) => seat.next().await,
            (None, Some(signals)) => signals.revocation(self.subscription).await,
            (None, None) => pending().await,
        }
    }

    /// Leaves the members of the version.
    pub(crate) fn give_up(&mut self) {
        self.seat = None;
    }

    /// The seat in the last version.
    pub(crate) fn seat(&self) -> Option<&Arc<Seat>> {
        self.seat.as_ref()
    }
}
