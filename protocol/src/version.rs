//! Version identity: (topic, epoch, version).

use crate::Topic;
use std::fmt;

/// The epoch of a version: one life of a topic.
///
/// It is random for each start of a publisher: versions of a restarted publisher begin again at 1, and must not be
/// mistaken for earlier ones. For topics served from files, the epoch is derived from their content or stored beside
/// the server's key, so that it outlives a restart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Epoch(pub u64);

/// The number of a version within its epoch. The first is 1; numbers only rise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version(pub u64);

impl Version {
    /// The number of an epoch's first version. Zero means "none" on the wire.
    pub const FIRST: Self = Self(1);

    /// The number of the next version.
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

/// The identity of a version.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct VersionId {
    /// The topic.
    pub topic: Topic,
    /// The topic's epoch.
    pub epoch: Epoch,
    /// The version's number within the epoch.
    pub version: Version,
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl fmt::Display for VersionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} version {} (epoch {})", self.topic, self.version, self.epoch)
    }
}
