//! The manifest streams of one subscription.

/// The state of the manifest streams on this connection.
#[derive(Debug, Default)]
pub(super) struct Manifests {
    /// Whether a manifest is arriving. There is never a second one, so hostile ones cannot pile up.
    pub(super) arriving: bool,
    /// The number of manifests that may still arrive after their version was given up: its manifest stream may outlive
    /// the `Abort`, and the server may send the next version's though it is known. Used only for what would be misbehaviour
    /// otherwise.
    pub(super) stale: u32,
}

impl Manifests {
    /// Whether a manifest may be late because a version was given up; uses up one.
    pub(super) fn pass_stale(&mut self) -> bool {
        let stale = self.stale > 0;
        self.stale = self.stale.saturating_sub(1);
        stale
    }
}
