//! Gaps in mode `every`.

use crate::VersionId;
use std::fmt;

/// Versions missing in mode `every`, right before the next snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gap {
    /// The previous version, or the one that the subscription was to begin after; `None` in another epoch.
    pub after: Option<VersionId>,
    /// The next version.
    pub found: VersionId,
}

impl Gap {
    /// The number of missing versions; `None` if unknown, because the publisher began a new epoch.
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
