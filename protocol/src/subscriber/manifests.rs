//! The manifest streams of one subscription.

/// What is known of the manifest streams on this connection.
#[derive(Debug, Default)]
pub(super) struct Manifests {
    /// Whether a manifest is on its way. There is never a second, so hostile ones cannot pile up.
    pub(super) arriving: bool,
    /// How often a manifest may still be out of place, because one end gave a version up: the stream of its manifest may
    /// outlive the `Abort`, and the server sends the next version's though it may be known. It is only used for what would
    /// be misbehaviour.
    pub(super) stale: u32,
}

impl Manifests {
    /// Whether a manifest is late because a version was given up, as far as that can be told.
    pub(super) fn pass_stale(&mut self) -> bool {
        let stale = self.stale > 0;
        self.stale = self.stale.saturating_sub(1);
        stale
    }
}
