/// One per copy engine: holds its copies back, so that a test can count what waits without a clock.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    holds: bool,
    /// How many may pass while it holds.
    passes: u64,
}

impl Gate {
    /// Holds back all that has not begun.
    pub(crate) fn hold(&mut self) {
        *self = Self { holds: true, passes: 0 };
    }

    /// Lets so many more pass.
    pub(crate) fn pass(&mut self, count: u64) {
        self.passes += count;
    }

    pub(crate) fn open(&mut self) {
        *self = Self::default();
    }

    /// Whether one may begin now.
    pub(crate) fn is_open(&self) -> bool {
        !self.holds || self.passes > 0
    }

    /// Counts one that begins.
    pub(crate) fn enter(&mut self) {
        self.passes = self.passes.saturating_sub(1);
    }
}
