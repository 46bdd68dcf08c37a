//! A counter of passes over all settings.

use std::time::{Duration, Instant};

/// A counter of passes over all settings, until the time budget is used up. Measuring in passes, instead of repeating
/// each setting, spreads a slow minute of the machine over a few samples of each setting.
#[derive(Debug)]
pub(super) struct Passes {
    begun: Instant,
    budget: Duration,
    begun_passes: u32,
}

impl Passes {
    /// Passes for about `budget`, at least one.
    pub(super) fn within(budget: Duration) -> Self {
        Self { begun: Instant::now(), budget, begun_passes: 0 }
    }

    /// Begins another pass, if the budget suffices for one of average duration and [`PASSES_MAX`] is not reached. The
    /// first pass always begins.
    pub(super) fn begin_next(&mut self) -> bool {
        let elapsed = self.begun.elapsed();
        let next_ends = elapsed + elapsed / self.begun_passes.max(1);
        let begin = self.begun_passes == 0 || (next_ends <= self.budget && self.begun_passes < PASSES_MAX);
        self.begun_passes += u32::from(begin);
        begin
    }
}

/// The maximum number of passes: further ones make a median hardly more precise.
const PASSES_MAX: u32 = 25;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_pass_needs_no_budget() {
        let mut passes = Passes::within(Duration::ZERO);
        assert!(passes.begin_next());
        assert!(!passes.begin_next());
    }

    #[test]
    fn the_number_of_passes_is_bounded() {
        let mut passes = Passes::within(Duration::from_secs(3600));
        let count = std::iter::from_fn(|| passes.begin_next().then_some(())).count();
        assert_eq!(count, PASSES_MAX as usize);
    }
}
