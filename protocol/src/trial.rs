//! [`Trial`]: an experiment between two ways of doing the same. [`Pause`]: the time between experiments.

/// The lengths of pauses, in units of the experiment: versions, windows, or microseconds of transfers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pauses {
    /// The length of the first pause.
    pub first: u64,
    /// The factor by which each pause is longer than the one before: most paths do not change.
    pub growth: u64,
    /// The longest pause.
    pub max: u64,
}

/// A pause that is longer each time, because every experiment costs something.
#[derive(Debug, Clone)]
pub struct Pause {
    pauses: Pauses,
    length: u64,
    passed: u64,
}

/// A pause is as long as the first one again once this many times its length has passed without another: what was
/// kept for so long was right.
const LASTING_PAUSES: u64 = 8;

impl Pause {
    /// A pause that is over at once, followed by `pauses`.
    pub fn new(pauses: Pauses) -> Self {
        Self { pauses, length: 0, passed: 0 }
    }

    /// The first of `pauses`.
    pub fn begun(pauses: Pauses) -> Self {
        Self { length: pauses.first, ..Self::new(pauses) }
    }

    /// Counts units that passed.
    pub fn pass(&mut self, units: u64) {
        self.passed = self.passed.saturating_add(units);
    }

    /// The units since it began.
    pub fn passed(&self) -> u64 {
        self.passed
    }

    /// Whether it is over.
    pub fn is_over(&self) -> bool {
        self.passed >= self.length
    }

    /// Begins the next pause.
    pub fn begin(&mut self) {
        let Pauses { first, growth, max } = self.pauses;
        let has_lasted = self.passed >= self.length.saturating_mul(LASTING_PAUSES);
        self.length = if has_lasted { first } else { self.length.saturating_mul(growth).min(max) };
        self.passed = 0;
    }
}

/// Measures an incumbent arm, then a challenger, keeps the better one, and pauses longer each time.
///
/// Pure: the caller measures, with a score `S` that it can compare, and decides when to try what and when to pause. The
/// number of lanes, the transport and the effort of encoding are chosen like this, each between arms `A` of its own.
#[derive(Debug, Clone)]
pub struct Trial<A, S = f64> {
    /// The arm in use: the challenger, while there is one. The caller sets it if something else decides.
    pub arm: A,
    /// The pause since the last trial.
    pub pause: Pause,
    incumbent: Option<(A, S)>,
}

impl<A: Copy, S: Copy> Trial<A, S> {
    /// Begins with `arm`; the first challenger may be tried after `pause`.
    pub fn new(arm: A, pause: Pause) -> Self {
        Self { arm, pause, incumbent: None }
    }

    /// The incumbent and its score, while a challenger is tried.
    pub fn incumbent(&self) -> Option<(A, S)> {
        self.incumbent
    }

    /// Whether a challenger may be tried: none is, and the pause is over.
    pub fn is_due(&self) -> bool {
        self.incumbent.is_none() && self.pause.is_over()
    }

    /// Tries `challenger` against the arm in use, whose score was measured.
    pub fn attempt(&mut self, challenger: A, score: S) {
        self.incumbent = Some((std::mem::replace(&mut self.arm, challenger), score));
    }

    /// Ends the trial: keeps the challenger, or returns to the incumbent. Returns the incumbent and its score, if there
    /// was a trial.
    pub fn conclude(&mut self, keeps: bool) -> Option<(A, S)> {
        let ended = self.incumbent.take();
        if let Some((incumbent, _)) = ended.filter(|_| !keeps) {
            self.arm = incumbent;
        }
        ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAUSES: Pauses = Pauses { first: 4, growth: 2, max: 64 };

    /// The units from the beginning of a pause to its end.
    fn length(pause: &mut Pause) -> u64 {
        pause.begin();
        (0..).find(|_| pause.is_over() || (pause.pass(1), false).1).unwrap()
    }

    #[test]
    fn pauses_grow_to_the_longest() {
        let mut pause = Pause::new(PAUSES);
        assert!(pause.is_over());
        assert_eq!([(); 7].map(|()| length(&mut pause)), [4, 8, 16, 32, 64, 64, 64]);
        pause.pass(LASTING_PAUSES * 64 - 64);
        assert_eq!([(); 2].map(|()| length(&mut pause)), [4, 8], "it lasted");
    }

    proptest! {
        /// For any scores: the arm is the best one that was tried, a trial begins in no pause, and the share of the
        /// trials in all units falls.
        #[test]
        fn the_best_arm_is_kept(scores in prop::collection::vec(0u32..1000, 2..10), units in 100u64..2000) {
            let mut trial = Trial::new(0_usize, Pause::begun(PAUSES));
            let (mut tried, mut best, mut began) = (vec![], scores[0], vec![]);
            for unit in 0..units {
                trial.pause.pass(1);
                if let Some((incumbent, score)) = trial.incumbent() {
                    prop_assert_eq!(score, f64::from(best));
                    let keeps = scores[trial.arm] > best;
                    best = best.max(scores[trial.arm]);
                    prop_assert_eq!(trial.conclude(keeps), Some((incumbent, score)));
                    prop_assert_eq!(scores[trial.arm], best);
                    prop_assert!(keeps || trial.arm == incumbent);
                    trial.pause.begin();
                } else if trial.is_due() {
                    began.push(unit);
                    tried.push((trial.arm + 1) % scores.len());
                    trial.attempt(*tried.last().unwrap(), f64::from(best));
                    prop_assert!(!trial.is_due());
                }
            }
            prop_assert_eq!(began[0] + 1, PAUSES.first);
            let gaps: Vec<u64> = began.windows(2).map(|pair| pair[1] - pair[0]).collect();
            prop_assert!(gaps.is_sorted() && gaps[0] > PAUSES.first, "{:?}", gaps);
        }
    }
}
