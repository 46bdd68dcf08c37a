//! The version that a subscription is about, on its way in.

use super::Assembly;
use crate::{Announce, Epoch, Version, VersionDigest, VersionId};

/// How far the version is that a subscription is about.
#[derive(Debug)]
pub(super) enum Phase {
    /// Nothing is announced.
    Idle,
    /// A version is announced and its manifest is missing.
    Announced { announce: Announce, complete: Option<VersionDigest> },
    /// Memory is being found.
    Placing(Box<Incoming>),
    /// Chunks are arriving.
    Running(Box<Incoming>),
    /// The connection is gone; what came of the version waits to be continued.
    Detached(Box<Incoming>),
}

/// A version on its way in.
#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) announce: Announce,
    pub(super) assembly: Assembly,
    /// Over how many more connections it came than one.
    pub(super) resumed: u32,
}

impl Incoming {
    pub(super) fn id(&self) -> &VersionId {
        &self.announce.id
    }

    pub(super) fn is(&self, version: (Epoch, Version)) -> bool {
        key(self.id()) == version
    }
}

/// The version without its topic, which a subscription has one of.
pub(super) fn key(id: &VersionId) -> (Epoch, Version) {
    (id.epoch, id.version)
}
