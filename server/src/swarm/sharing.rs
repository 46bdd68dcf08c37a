//! [`Sharing`]: how one subscription takes part in the swarms of its versions.

use super::{Seat, SharedVersion, Sharer};
use crate::{retained::Retained, topic::TopicState};
use std::sync::Arc;
use tensor_relay_protocol::{RangeSet, SubscriptionId, Version};

/// The fewest chunks of a version that is shared: of fewer, each member would be pushed a large part anyway.
const CHUNKS_MIN: u32 = 8;

/// A subscription of a client that may share.
#[derive(Debug)]
pub(crate) struct Sharing {
    sharer: Arc<Sharer>,
    subscription: SubscriptionId,
    /// Its seat in its last version, if that is shared.
    seat: Option<Arc<Seat>>,
}

impl Sharing {
    pub(crate) fn new(sharer: Arc<Sharer>, subscription: SubscriptionId) -> Self {
        Self { sharer, subscription, seat: None }
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
        self.seat
            .insert(shared.join(&self.sharer, self.subscription, selected.clone(), base))
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
