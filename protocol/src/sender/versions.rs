//! [`Versions`]: what a [`Sender`](super::Sender) asks about a topic.

use crate::{EndReason, Epoch, ManifestDigest, Start, Version, VersionId};
use std::sync::Arc;

/// The position of a publish in its topic, through all epochs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Seq(pub u64);

impl Seq {
    /// The position of a topic's first publish.
    pub const FIRST: Self = Self(0);

    /// The position of the next publish.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

/// A published version: the caller's own type, which a [`Sender`](super::Sender) returns in its actions.
pub trait Published {
    /// Its identity.
    fn id(&self) -> &VersionId;

    /// The digest of its manifest.
    fn manifest_digest(&self) -> ManifestDigest;

    /// Its epoch and number.
    fn key(&self) -> (Epoch, Version) {
        (self.id().epoch, self.id().version)
    }
}

impl<T: Published> Published for Arc<T> {
    fn id(&self) -> &VersionId {
        T::id(self)
    }

    fn manifest_digest(&self) -> ManifestDigest {
        T::manifest_digest(self)
    }
}

/// The versions of one topic, and the place of one reader in it: facts, which may change between two questions. Each
/// answer is immediate.
pub trait Versions {
    /// A published version. Cheap to clone.
    type Version: Published + Clone;

    /// The newest retained version.
    fn newest(&self) -> Option<(Seq, Self::Version)>;

    /// The oldest retained version from `seq` on.
    fn first_from(&self, seq: Seq) -> Option<(Seq, Self::Version)>;

    /// A retained version by its epoch and number.
    fn find(&self, key: (Epoch, Version)) -> Option<(Seq, Self::Version)>;

    /// The version that the client named as its base, if it is still in memory; it need not be retained.
    fn base(&self) -> Option<Self::Version>;

    /// The position where a subscription without `have` begins.
    fn start(&self, start: Start) -> Seq;

    /// Whether `held`, which the client has, is newer than any version of an epoch that its publisher continued: from an
    /// older record than the client knows, such as a restored backup.
    fn is_behind(&self, held: (Epoch, Version)) -> bool;

    /// Why the topic ended, if it has.
    fn ended(&self) -> Option<EndReason>;

    /// In mode `every`: the number of retained versions before `seq` that the reader has not acknowledged, without
    /// those in `given_up`. Removes from these what the reader has passed.
    fn unacknowledged(&self, seq: Seq, given_up: &mut Vec<Seq>) -> usize;

    /// In mode `every`: why the reader lost its place; `None` if it has not.
    fn lost_place(&self) -> Option<EndReason>;
}
