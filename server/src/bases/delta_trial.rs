//! [`DeltaTrial`]: decides whether deltas are worth the memory of bases, for one topic. Pure.

use tensor_relay_protocol::{Pause, Pauses};

/// The pauses after failed trials, in versions, which are not kept as bases. One trial in 256 versions costs little,
/// and detects a topic that starts to change little.
const PAUSES: Pauses = Pauses { first: 8, growth: 2, max: 256 };

/// A trial succeeds if at least one in this many compared bytes is sent as deltas.
const DELTA_SHARE_DIVISOR: u64 = 16;

/// A trial fails after this number of versions in a row of which too little was sent as deltas.
const FAILED_MAX_VERSIONS: u32 = 2;

/// The trial of deltas for one topic: the results of comparing chunks with their bases, from one publish to the next.
///
/// A failed trial costs a read of the base for each compared chunk, and memory at client and server. So a [`Pause`]
/// follows, then another trial, in which one failed version starts the next pause.
#[derive(Debug)]
pub(crate) struct DeltaTrial {
    tried_bytes: u64,
    delta_bytes: u64,
    /// The number of versions in a row of which too little was sent as deltas; the maximum after a pause.
    failed: u32,
    pause: Pause,
}

impl Default for DeltaTrial {
    fn default() -> Self {
        Self { tried_bytes: 0, delta_bytes: 0, failed: 0, pause: Pause::new(PAUSES) }
    }
}

impl DeltaTrial {
    /// Records that a chunk of `bytes` was compared, and whether it is sent as a delta.
    pub(crate) fn note(&mut self, bytes: u64, is_delta: bool) {
        self.tried_bytes = self.tried_bytes.saturating_add(bytes);
        self.delta_bytes = self.delta_bytes.saturating_add(if is_delta { bytes } else { 0 });
    }

    /// Decides whether the next version may be a base. Call once for each version.
    pub(crate) fn decide_next_base(&mut self) -> bool {
        let tried = std::mem::take(&mut self.tried_bytes);
        let deltas = std::mem::take(&mut self.delta_bytes);
        self.pause.pass(1);
        if !self.pause.is_over() || tried == 0 {
            return self.pause.is_over();
        }
        if deltas.saturating_mul(DELTA_SHARE_DIVISOR) >= tried {
            (self.failed, self.pause) = (0, Pause::new(PAUSES));
            return true;
        }
        self.failed += 1;
        if self.failed >= FAILED_MAX_VERSIONS {
            self.pause.begin(); // This version is the first of the pause.
        }
        self.failed < FAILED_MAX_VERSIONS
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The decisions for `versions` in a row, each compared with the previous one if that may be a base.
    fn run(trial: &mut DeltaTrial, versions: u32, is_delta: bool) -> Vec<bool> {
        let publish = |_| {
            let may_be = trial.decide_next_base();
            if may_be {
                trial.note(100, is_delta);
            }
            may_be
        };
        (0..versions).map(publish).collect()
    }

    #[test]
    fn versions_without_common_bytes_pause_longer_each_time() {
        let mut trial = DeltaTrial::default();
        let decisions = run(&mut trial, 1200, false);
        let pauses = decisions.split(|may_be| *may_be).map(<[bool]>::len).filter(|len| *len > 0);
        assert_eq!(pauses.take(8).collect::<Vec<_>>(), [8, 16, 32, 64, 128, 256, 256, 256]);
        let tries = decisions.split(|may_be| !*may_be).map(<[bool]>::len).filter(|len| *len > 0);
        assert_eq!(tries.take(3).collect::<Vec<_>>(), [2, 1, 1], "two fail, then one after each pause");
    }

    #[test]
    fn one_sixteenth_of_equal_bytes_is_enough() {
        for (whole_bytes, is_enough) in [(15, true), (16, false)] {
            let mut trial = DeltaTrial::default();
            let publish = |_| {
                let may_be = trial.decide_next_base();
                trial.note(1, true);
                trial.note(whole_bytes, false);
                may_be
            };
            assert_eq!((0..100).all(publish), is_enough);
        }
    }

    #[test]
    fn a_successful_trial_resets_the_pause() {
        let mut trial = DeltaTrial::default();
        run(&mut trial, 200, false);
        run(&mut trial, 200, true);
        let decisions = run(&mut trial, 40, false);
        let pauses = decisions.split(|may_be| *may_be).map(<[bool]>::len).filter(|len| *len > 0);
        assert_eq!(pauses.take(2).collect::<Vec<_>>(), [8, 16]);
    }

    proptest! {
        /// After any history: a topic that changes little is detected within one pause, and then all versions may be
        /// bases.
        #[test]
        fn a_topic_that_changes_little_is_detected(before in prop::collection::vec((0u64..200, any::<bool>(), any::<bool>()), 0..200)) {
            let mut trial = DeltaTrial::default();
            for (bytes, is_delta, is_published) in before {
                trial.note(bytes, is_delta);
                if is_published {
                    trial.decide_next_base();
                }
            }
            trial.decide_next_base(); // Ends the history.
            run(&mut trial, PAUSES.max as u32, true);
            prop_assert!(run(&mut trial, 100, true).iter().all(|may_be| *may_be));
        }
    }
}
