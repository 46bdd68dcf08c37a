//! Gaps: versions that a subscription in mode `every` misses.

use crate::VersionId;
use std::fmt;

/// The versions that a subscription in mode `every` misses right before a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gap {
    /// The version before the gap: the last committed one, or the one before the requested start.
    pub after: Option<VersionId>,
    /// The version after the gap.
    pub found: VersionId,
}

impl Gap {
    /// The number of missing versions; `None` if it is unknown: in a new epoch, and if the number fell.
    pub fn missing(&self) -> Option<u64> {
        let after = self.after.as_ref().filter(|after| after.epoch == self.found.epoch)?;
        self.found.version.0.checked_sub(after.version.0 + 1)
    }
}

impl fmt::Display for Gap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { after, found } = self;
        let versions_are = |missing| if missing == 1 { "version is" } else { "versions are" };
        match (after, self.missing()) {
            (Some(after), Some(missing)) => write!(
                f,
                "{missing} {} missing of {}: {} was expected, {} was received; the publisher did not retain the \
                 missing versions long enough for this reader",
                versions_are(missing),
                found.topic,
                after.version.next(),
                found.version
            ),
            (Some(after), None) if after.epoch == found.epoch => write!(
                f,
                "{} went back to version {} after version {}: its publisher continued from an older record, such as a \
                 restored state directory, and versions with other content may be missing",
                found.topic, found.version, after.version
            ),
            _ => write!(
                f,
                "{} has begun a new epoch, {}, whose first version here is {}: its publisher was restarted, and its \
                 last versions before that may be missing",
                found.topic, found.epoch, found.version
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Epoch, Topic, Version};

    /// The text of the gap between two versions, each with its epoch.
    fn text((after_epoch, after): (u64, u64), (epoch, found): (u64, u64)) -> String {
        let id = |epoch, version| VersionId {
            topic: Topic::new("policy").unwrap(),
            epoch: Epoch(epoch),
            version: Version(version),
        };
        Gap { after: Some(id(after_epoch, after)), found: id(epoch, found) }.to_string()
    }

    #[test]
    fn a_gap_names_what_is_missing_and_why() {
        for (after, found, expected) in [
            ((1, 3), (1, 5), "1 version is missing of policy: 4 was expected, 5 was received;"),
            ((1, 3), (1, 6), "2 versions are missing of policy: 4 was expected, 6 was received;"),
            ((1, 3), (1, 2), "policy went back to version 2 after version 3:"),
            ((1, 3), (2, 9), "policy has begun a new epoch, "),
        ] {
            let found = text(after, found);
            assert!(found.starts_with(expected), "{found}");
        }
    }
}
