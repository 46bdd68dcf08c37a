//! Passes over all settings.

use std::time::{Duration, Instant};

/// The numbers of the passes over all settings, from 0, for about `budget`: one at least, and another while the budget
/// suffices for one of average duration. Measuring in passes, instead of repeating each setting, spreads a slow minute of
/// the machine over a few samples of each setting.
pub(super) fn passes(budget: Duration) -> impl Iterator<Item = u32> {
    let begun = Instant::now();
    (0..PASSES_MAX).take_while(move |done| {
        let elapsed = begun.elapsed();
        *done == 0 || elapsed + elapsed / *done <= budget
    })
}

/// The maximum number of passes: further ones make a median hardly more precise.
const PASSES_MAX: u32 = 25;
