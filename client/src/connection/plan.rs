//! The automatic number of lanes.

use crate::rate::{Measurement, Sample, Steps};
use std::time::Duration;
use tokio::time::Instant;

/// The speed-up that doubling the lanes must bring, or it is undone: less may be chance, and each lane costs a thread.
const WORTH: f64 = 1.1;

/// The time to wait for lanes to join, after which the existing ones must suffice.
const PATIENCE: Duration = Duration::from_secs(5);

/// Seeks the number of lanes for one link: begins with one, doubles it as long as that makes transfers at least a tenth
/// faster, and stays with the best.
///
/// Pure: it takes samples, and says how many lanes it wants. Small versions never cost a lane, since they add nothing to a
/// [`Measurement`].
#[derive(Debug)]
pub(crate) struct Plan {
    most: u32,
    trying: u32,
    best: Option<BestRate>,
    settled: bool,
    steps: Steps,
    waited: Duration,
    measurement: Measurement,
}

#[derive(Debug, Clone, Copy)]
struct BestRate {
    lanes: u32,
    bytes_per_s: f64,
}

impl Plan {
    /// Seeks between one lane and `most`.
    pub(crate) fn new(most: u32) -> Self {
        Self {
            most,
            trying: 1,
            best: None,
            settled: most <= 1,
            steps: Steps::default(),
            waited: Duration::ZERO,
            measurement: Measurement::new(),
        }
    }

    /// The wanted number of lanes.
    pub(crate) fn lanes(&self) -> u32 {
        self.trying
    }

    /// Whether the number is final.
    pub(crate) fn is_settled(&self) -> bool {
        self.settled
    }

    /// Takes a sample; returns whether the wanted number was decided.
    pub(crate) fn handle_sample(&mut self, now: Instant, sample: Sample) -> bool {
        let Some(step) = self.steps.next(now, sample).filter(|_| !self.settled) else {
            return false;
        };
        if step.lanes != Some(self.trying) {
            self.waited += step.passed;
            return self.waited >= PATIENCE && self.settle();
        }
        self.measurement.add(step).is_some_and(|bytes_per_s| self.decide(bytes_per_s))
    }

    fn decide(&mut self, bytes_per_s: f64) -> bool {
        if self.best.is_some_and(|best| bytes_per_s < best.bytes_per_s * WORTH) {
            return self.settle();
        }
        self.best = Some(BestRate { lanes: self.trying, bytes_per_s });
        self.settled = self.trying == self.most;
        self.trying = (self.trying * 2).min(self.most);
        (self.waited, self.measurement) = (Duration::ZERO, Measurement::new());
        true
    }

    /// Settles on the best number so far.
    fn settle(&mut self) -> bool {
        self.trying = self.best.map_or(1, |best| best.lanes);
        self.settled = true;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Runs a plan over transfers of `transfer` each with `pause` between, on a network that carries `rate(lanes)` bytes
    /// per second and on which as many lanes join as are wanted, but no more than `joinable`.
    fn run(
        most: u32,
        joinable: u32,
        transfer: Duration,
        pause: Duration,
        rate: impl Fn(u32) -> u64,
    ) -> (Plan, Vec<u32>) {
        let (mut plan, mut tried) = (Plan::new(most), vec![]);
        let (mut now, mut verified_bytes) = (Instant::now(), 0);
        let step = Duration::from_millis(100);
        for tick in 0..6_000u32 {
            let at = step * tick;
            let (number, into) = (
                at.as_millis() / (transfer + pause).as_millis(),
                at.as_millis() % (transfer + pause).as_millis(),
            );
            let period = (into < transfer.as_millis()).then_some(number as u64);
            let lanes = plan.lanes().min(joinable);
            let _ = plan.handle_sample(now, Sample { period, lanes, verified_bytes });
            if tried.last() != Some(&plan.lanes()) {
                tried.push(plan.lanes());
            }
            verified_bytes += if period.is_some() { rate(lanes) / 10 } else { 0 };
            now += step;
        }
        (plan, tried)
    }

    const LONG: Duration = Duration::from_secs(5);
    const PAUSE: Duration = Duration::from_secs(1);

    #[test]
    fn it_grows_while_that_pays() {
        let (plan, tried) = run(16, 16, LONG, PAUSE, |lanes| 1_000_000 * u64::from(lanes.min(6)));
        assert_eq!((tried, plan.is_settled()), (vec![1, 2, 4, 8, 16, 8], true));
        let (plan, tried) = run(16, 16, LONG, PAUSE, |lanes| 1_000_000 * u64::from(lanes.min(4)));
        assert_eq!((tried, plan.is_settled()), (vec![1, 2, 4, 8, 4], true));
        let (_, tried) = run(6, 16, LONG, PAUSE, |lanes| 1_000_000 * u64::from(lanes));
        assert_eq!(tried, [1, 2, 4, 6]);
    }

    #[test]
    fn with_two_processors_it_stays_at_one() {
        let plan = Plan::new(1);
        assert_eq!((plan.lanes(), plan.is_settled()), (1, true));
    }

    #[test]
    fn lanes_that_do_not_join_are_not_waited_for() {
        let (plan, tried) = run(8, 2, LONG, PAUSE, |lanes| 1_000_000 * u64::from(lanes));
        assert_eq!((tried, plan.is_settled()), (vec![1, 2, 4, 2], true));
    }

    proptest! {
        /// However the rate depends on the number: never more than allowed, settled within as many numbers as doubling
        /// takes and one step back, and with one that no smaller one it tried comes near.
        #[test]
        fn it_settles_with_the_best(most in 2u32..=16, rates in prop::collection::vec(1_000u64..1_000_000, 17)) {
            let (plan, tried) = run(most, most, LONG, PAUSE, |lanes| rates[lanes as usize]);
            prop_assert!(plan.is_settled() && tried.iter().all(|lanes| (1..=most).contains(lanes)));
            prop_assert!(tried.len() <= 6, "{tried:?}");
            let settled = rates[plan.lanes() as usize] as f64;
            for lanes in tried.iter().filter(|lanes| **lanes < plan.lanes()) {
                prop_assert!(settled >= rates[*lanes as usize] as f64 * 1.09, "{tried:?}");
            }
        }

        /// However fast more lanes would be: what is over within two samples never gets one.
        #[test]
        fn small_transfers_stay_at_one(most in 2u32..=16, milliseconds in 1u64..100, pause in 100u64..1_000) {
            let (transfer, pause) = (Duration::from_millis(milliseconds), Duration::from_millis(pause));
            let (_, tried) = run(most, most, transfer, pause, |lanes| 1_000_000 * u64::from(lanes));
            prop_assert_eq!(tried, [1]);
        }
    }
}
