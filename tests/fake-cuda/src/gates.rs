/// The gate of a copy engine. It can hold the engine's copies, so that a test counts waiting copies without a clock.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    holds: bool,
    /// The number of copies that may still pass while the gate holds.
    passes: u64,
}

impl Gate {
    /// Holds all copies that have not begun.
    pub(crate) fn hold(&mut self) {
        *self = Self { holds: true, passes: 0 };
    }

    /// Lets `count` more copies pass.
    pub(crate) fn pass(&mut self, count: u64) {
        self.passes += count;
    }

    /// Lets all copies pass.
    pub(crate) fn open(&mut self) {
        *self = Self::default();
    }

    /// Whether a copy may begin now.
    pub(crate) fn is_open(&self) -> bool {
        !self.holds || self.passes > 0
    }

    /// Counts a copy that begins.
    pub(crate) fn enter(&mut self) {
        self.passes = self.passes.saturating_sub(1);
    }
}
