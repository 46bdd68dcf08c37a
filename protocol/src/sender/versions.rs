//! [`Versions`]: what a [`Sender`](super::Sender) asks about a topic.

use crate::{ChunkIndex, EndReason, Epoch, Feature, ManifestDigest, RangeSet, Start, Version, VersionId};
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

    /// The feature that a client must have offered to receive it.
    fn feature(&self) -> Option<Feature>;

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

    fn feature(&self) -> Option<Feature> {
        T::feature(self)
    }
}

/// Which chunk of a version is pushed next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pick {
    /// The first one.
    InOrder,
    /// This one.
    Chunk(ChunkIndex),
    /// None before the topic changes.
    Wait,
}

/// The chunks of a version that can be sent now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Here {
    /// All.
    All,
    /// These. Others that were requested are passed over, of which the receiver learns by a `Held`; others to be pushed
    /// wait.
    Only(Arc<RangeSet>),
    /// These so far: the version is being received, and not committed. Others wait, and so does what depends on all of
    /// them: the list of hashes, and `Complete`.
    SoFar(Arc<RangeSet>),
}

impl Here {
    /// The chunks; `None` for all.
    pub(super) fn chunks(&self) -> Option<&RangeSet> {
        match self {
            Self::All => None,
            Self::Only(chunks) | Self::SoFar(chunks) => Some(chunks),
        }
    }

    /// Whether more will be here.
    pub(super) fn is_growing(&self) -> bool {
        matches!(self, Self::SoFar(_))
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

    /// A version by its epoch and number, retained or kept for those who read it in parts.
    fn find_exactly(&self, key: (Epoch, Version)) -> Option<Self::Version> {
        self.find(key).map(|(_, version)| version)
    }

    /// The version that the client named as its base, if it is still in memory; it need not be retained.
    fn base(&self) -> Option<Self::Version>;

    /// The position where a subscription without `have` begins.
    fn start(&self, start: Start) -> Seq;

    /// Whether `held`, which the client has, is newer than any version of an epoch that its publisher continued: from
    /// an older record than the client knows, such as a restored backup.
    fn is_behind(&self, held: (Epoch, Version)) -> bool;

    /// Why the topic ended, if it has.
    fn ended(&self) -> Option<EndReason>;

    /// In mode `every`: the number of retained versions before `seq` that the reader has not acknowledged, without
    /// those in `given_up`. Removes from these what the reader has passed.
    fn unacknowledged(&self, seq: Seq, given_up: &mut Vec<Seq>) -> usize;

    /// In mode `every`: why the reader lost its place; `None` if it has not.
    fn lost_place(&self) -> Option<EndReason>;

    /// Whether the version is shared: its receivers take chunks from each other. Asked once, when the version begins.
    fn is_shared(&self, _version: &Self::Version) -> bool {
        false
    }

    /// The chunk of a shared version that is pushed next, of the `wanted` ones: selected, not held when the version
    /// began, and not begun. It is asked for only when there is credit and a lane, and what it answers is begun at
    /// once, so that it may be counted as sent. After [`Pick::Wait`] it is asked again at the next event, such as a
    /// change of the topic.
    fn pick(&self, _version: &Self::Version, _wanted: &RangeSet) -> Pick {
        Pick::InOrder
    }

    /// The chunks of the version that can be sent now.
    fn here(&self, _version: &Self::Version) -> Here {
        Here::All
    }
}
