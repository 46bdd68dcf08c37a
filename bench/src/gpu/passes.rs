//! The number of passes: as many as fit the time.

use std::time::{Duration, Instant};

/// Counts passes over all settings, until the time is used up. Passes instead of repetitions of each setting: a machine
/// that is slow for a minute then disturbs one measurement of every setting, and not all of one.
#[derive(Debug)]
pub(super) struct Passes {
    begun: Instant,
    budget: Duration,
    done: u32,
}

impl Passes {
    /// Passes for about `budget`, at least one.
    pub(super) fn within(budget: Duration) -> Self {
        Self { begun: Instant::now(), budget, done: 0 }
    }

    /// Whether there is time for another pass, which will take as long as those before did.
    pub(super) fn another(&mut self) -> bool {
        let elapsed = self.begun.elapsed();
        let next_ends = elapsed + elapsed / self.done.max(1);
        let begin = self.done == 0 || (next_ends <= self.budget && self.done < PASSES_MAX);
        self.done += u32::from(begin);
        begin
    }
}

/// More do not narrow a median any further that is worth waiting for.
const PASSES_MAX: u32 = 25;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_pass_whatever_the_time() {
        let mut passes = Passes::within(Duration::ZERO);
        assert!(passes.another());
        assert!(!passes.another());
    }

    #[test]
    fn not_for_ever() {
        let mut passes = Passes::within(Duration::from_secs(3600));
        let count = std::iter::from_fn(|| passes.another().then_some(())).count();
        assert_eq!(count, PASSES_MAX as usize);
    }
}
