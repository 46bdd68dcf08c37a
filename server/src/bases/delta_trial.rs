//! The trial of deltas: whether keeping the versions of a topic pays. Pure.

/// The number of versions without a base after the first failed trial.
const FIRST_REST: u32 = 8;

/// The maximum. One trial in 256 versions costs nothing, and a topic that begins to change little is noticed
/// eventually.
const REST_MAX: u32 = 256;

/// The least share of compared bytes that must be sent as deltas: one in so many.
const LEAST_SHARE: u64 = 16;

/// The number of failed comparisons in a row that end a trial.
const VAIN_MAX: u32 = 2;

/// The results of comparing versions, from one publish to the next.
///
/// A failed trial costs a read of the base for each chunk, and memory at both ends. So a pause follows, then another
/// trial, which one failed version ends; each pause is twice as long.
#[derive(Debug)]
pub(crate) struct DeltaTrial {
    tried_bytes: u64,
    delta_bytes: u64,
    /// The number of failed comparisons in a row.
    vain: u32,
    /// The remaining versions of the pause.
    resting: u32,
    /// The length of the next pause.
    rest: u32,
}

impl Default for DeltaTrial {
    fn default() -> Self {
        Self { tried_bytes: 0, delta_bytes: 0, vain: 0, resting: 0, rest: FIRST_REST }
    }
}

impl DeltaTrial {
    /// Records that a chunk of `bytes` was compared, and whether it is sent as a delta.
    pub(crate) fn note(&mut self, bytes: u64, is_delta: bool) {
        self.tried_bytes = self.tried_bytes.saturating_add(bytes);
        self.delta_bytes = self.delta_bytes.saturating_add(if is_delta { bytes } else { 0 });
    }

    /// Whether the next version may be a base. Call once for each.
    pub(crate) fn next(&mut self) -> bool {
        let tried = std::mem::take(&mut self.tried_bytes);
        let deltas = std::mem::take(&mut self.delta_bytes);
        if self.resting > 0 {
            self.resting -= 1;
            return false;
        }
        if tried == 0 {
            return true;
        }
        if deltas.saturating_mul(LEAST_SHARE) >= tried {
            (self.vain, self.rest) = (0, FIRST_REST);
            return true;
        }
        self.vain += 1;
        let had_a_rest = self.rest > FIRST_REST;
        if self.vain < VAIN_MAX && !had_a_rest {
            return true;
        }
        (self.vain, self.resting) = (0, self.rest - 1); // This one is the first.
        self.rest = (2 * self.rest).min(REST_MAX);
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What `versions` in a row are told, each compared with the one before where that may be a base.
    fn run(worth: &mut DeltaTrial, versions: u32, is_delta: bool) -> Vec<bool> {
        let publish = |_| {
            let may_be = worth.next();
            if may_be {
                worth.note(100, is_delta);
            }
            may_be
        };
        (0..versions).map(publish).collect()
    }

    #[test]
    fn what_has_nothing_in_common_rests_longer_and_longer() {
        let mut worth = DeltaTrial::default();
        let told = run(&mut worth, 1200, false);
        let rests = told.split(|may_be| *may_be).map(<[bool]>::len).filter(|len| *len > 0);
        assert_eq!(rests.take(8).collect::<Vec<_>>(), [8, 16, 32, 64, 128, 256, 256, 256]);
        let tries = told.split(|may_be| !*may_be).map(<[bool]>::len).filter(|len| *len > 0);
        assert_eq!(tries.take(3).collect::<Vec<_>>(), [2, 1, 1], "two in vain, then one after each rest");
    }

    #[test]
    fn a_little_in_common_is_enough() {
        for (in_vain, is_enough) in [(15, true), (16, false)] {
            let mut worth = DeltaTrial::default();
            let publish = |_| {
                let may_be = worth.next();
                worth.note(1, true);
                worth.note(in_vain, false);
                may_be
            };
            assert_eq!((0..100).all(publish), is_enough);
        }
    }

    #[test]
    fn what_was_worth_it_once_rests_as_if_for_the_first_time() {
        let mut worth = DeltaTrial::default();
        run(&mut worth, 200, false);
        run(&mut worth, 200, true);
        let told = run(&mut worth, 40, false);
        let rests = told.split(|may_be| *may_be).map(<[bool]>::len).filter(|len| *len > 0);
        assert_eq!(rests.take(2).collect::<Vec<_>>(), [8, 16]);
    }

    proptest! {
        /// Whatever was before: what changes little is found out within one rest, and then all may be bases.
        #[test]
        fn what_changes_little_is_found_out(before in prop::collection::vec((0u64..200, any::<bool>(), any::<bool>()), 0..200)) {
            let mut worth = DeltaTrial::default();
            for (bytes, is_delta, is_published) in before {
                worth.note(bytes, is_delta);
                if is_published {
                    worth.next();
                }
            }
            worth.next(); // What was before is judged with this.
            run(&mut worth, REST_MAX, true);
            prop_assert!(run(&mut worth, 100, true).iter().all(|may_be| *may_be));
        }
    }
}
