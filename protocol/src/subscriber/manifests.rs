//! The manifest streams of one subscription.

/// The state of the manifest streams on this connection.
#[derive(Debug, Default)]
pub(super) struct Manifests {
    /// Whether a manifest is arriving. Another one at the same time is refused, so that a hostile server cannot make
    /// this end buffer many.
    pub(super) arriving: bool,
    /// The number of manifest events that are still excused because versions were given up: the manifest stream of such
    /// a version may outlive the `Abort`, and the server may send the next version's manifest again. Decreased only by
    /// events that would otherwise be a violation.
    pub(super) stale: u32,
}

impl Manifests {
    /// Excuses one manifest event that a given-up version may have caused; false if no excuse is left.
    pub(super) fn excuse_stale(&mut self) -> bool {
        let is_excused = self.stale > 0;
        self.stale = self.stale.saturating_sub(1);
        is_excused
    }
}
