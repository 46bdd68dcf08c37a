//! What a reader in mode `every` missed.

use crate::VersionId;
use std::fmt;

/// Versions that are missing on a subscription in mode `every`, right before the next snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gap {
    /// The version that came last, or that the subscription was to begin after; none if the epoch is another.
    pub after: Option<VersionId>,
    /// The version that comes next.
    pub found: VersionId,
}

impl Gap {
    /// How many versions are missing; `None` where nobody can tell, because the publisher began a new epoch.
    pub fn missing(&self) -> Option<u64> {
        let after = self.after.as_ref().filter(|after| after.epoch == self.found.epoch)?;
        Some(self.found.version.0.saturating_sub(after.version.0 + 1))
    }
}

impl fmt::Display for Gap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { after, found } = self;
        let verb = |missing| if missing == 1 { "version is" } else { "versions are" };
        match (after, self.missing()) {
            (Some(after), Some(missing)) => write!(
                f,
                "{missing} {} missing of {}: {} was to come, {} is the next there is; the publisher did not retain \
                 what is missing long enough for this reader",
                verb(missing),
                found.topic,
                after.version.next(),
                found.version
            ),
            _ => write!(
                f,
                "{} has begun a new epoch, {}, whose first version here is {}: its publisher was started anew, and \
                 what it published last before may be missing",
                found.topic, found.epoch, found.version
            ),
        }
    }
}
