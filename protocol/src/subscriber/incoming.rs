//! The incoming version of a subscription.

use super::Assembly;
use crate::{Announce, Epoch, Version, VersionDigest, VersionId};

/// The phase of a subscription's current version.
#[derive(Debug)]
pub(super) enum Phase {
    /// No version is announced.
    Idle,
    /// A version is announced, but its manifest has not arrived. `complete` is the digest of a `Complete` that has.
    Announced { announce: Announce, complete: Option<VersionDigest> },
    /// Memory is being allocated.
    Placing(Box<Incoming>),
    /// Chunks are arriving.
    Running(Box<Incoming>),
    /// The connection was lost; verified chunks are kept for the next connection.
    Detached(Box<Incoming>),
}

/// A version that is being received.
#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) announce: Announce,
    pub(super) assembly: Assembly,
    /// The number of reconnections during the version's transfer.
    pub(super) resumed: u32,
    /// Whether the connection to the origin was lost while other sources send the version, and the origin has not
    /// announced it again.
    pub(super) is_origin_lost: bool,
}

impl Incoming {
    pub(super) fn id(&self) -> &VersionId {
        &self.announce.id
    }

    pub(super) fn is(&self, version: (Epoch, Version)) -> bool {
        key(self.id()) == version
    }
}

/// The epoch and version of `id`, which identify a version within a subscription.
pub(super) fn key(id: &VersionId) -> (Epoch, Version) {
    (id.epoch, id.version)
}
