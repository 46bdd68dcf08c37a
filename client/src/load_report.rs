//! [`LoadReport`]: how an application tells the server that it has loaded a version.

use crate::command::Command;
use tensor_relay_protocol::{Epoch, SubscriptionId, Version, VersionDigest};
use tokio::sync::mpsc;

/// Tells the server that the application has loaded a version, i.e. uses it from now on: the publisher may wait for that
/// (`Publication::loaded` of the server). A commit only says that the version has arrived.
///
/// Cheap to clone; it keeps none of the version's memory. It may be sent after the subscription has ended, and again: a
/// version counts once for each consumer. It is sent on the present connection of the client, or once there is one. It
/// has no effect on a server that does not offer the feature `loaded`; nor if the subscription has ended and its
/// connection was lost since.
#[derive(Debug, Clone)]
pub struct LoadReport {
    commands: mpsc::UnboundedSender<Command>,
    subscription: SubscriptionId,
    epoch: Epoch,
    version: Version,
    digest: VersionDigest,
}

impl LoadReport {
    pub(crate) fn new(
        commands: mpsc::UnboundedSender<Command>,
        subscription: SubscriptionId,
        (epoch, version): (Epoch, Version),
        digest: VersionDigest,
    ) -> Self {
        Self { commands, subscription, epoch, version, digest }
    }

    /// The digest of the chunks that were received.
    pub fn digest(&self) -> VersionDigest {
        self.digest
    }

    /// Reports that the received chunks were loaded as they are.
    pub fn send(&self) {
        self.send_digest(self.digest);
    }

    /// Reports `digest` of the chunks as they were loaded, for applications that compute it over their own memory. If it
    /// differs from [`digest`](Self::digest), the server does not count the load, and logs a warning.
    pub fn send_digest(&self, digest: VersionDigest) {
        let Self { subscription, epoch, version, .. } = *self;
        let _ = self.commands.send(Command::Loaded { subscription, epoch, version, digest }); // Fails after the end.
    }

    /// A report that reaches nobody, for tests.
    #[cfg(test)]
    #[expect(clippy::disallowed_methods, reason = "a test sends few messages")]
    pub(crate) fn unsent() -> Self {
        let key = (Epoch(1), Version(1));
        Self::new(mpsc::unbounded_channel().0, SubscriptionId(1), key, VersionDigest([0; 32]))
    }
}
