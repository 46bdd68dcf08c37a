//! The automatic number of lanes.

use crate::rate::{Measurement, Sample, Steps};
use std::time::Duration;
use tokio::time::Instant;

/// The speed-up below which doubling the lanes is undone: less may be noise, and each lane costs a thread.
const SPEEDUP_MIN: f64 = 1.1;

/// The time to wait for lanes to join; then the best number so far is used.
const JOIN_TIMEOUT: Duration = Duration::from_secs(5);

/// Determines the number of lanes for one link: starts with one lane, doubles the number as long as that makes
/// transfers at least a tenth faster, and keeps the best number.
///
/// Pure: it receives samples and returns the wanted number of lanes. Small versions never add a lane, because they are
/// not sampled.
#[derive(Debug)]
pub(crate) struct Plan {
    max: u32,
    wanted: u32,
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
    /// A plan for one to `max` lanes.
    pub(crate) fn new(max: u32) -> Self {
        Self {
            max,
            wanted: 1,
            best: None,
            settled: max <= 1,
            steps: Steps::default(),
            waited: Duration::ZERO,
            measurement: Measurement::new(),
        }
    }

    /// The wanted number of lanes.
    pub(crate) fn lanes(&self) -> u32 {
        self.wanted
    }

    /// Whether the number is final.
    pub(crate) fn is_settled(&self) -> bool {
        self.settled
    }

    /// Handles a sample; returns whether the wanted number was decided.
    pub(crate) fn handle_sample(&mut self, now: Instant, sample: Sample) -> bool {
        let Some(step) = self.steps.next(now, sample).filter(|_| !self.settled) else {
            return false;
        };
        if step.lanes != Some(self.wanted) {
            self.waited += step.elapsed;
            return self.waited >= JOIN_TIMEOUT && self.choose_best();
        }
        self.measurement.add(step).is_some_and(|bytes_per_s| self.decide(bytes_per_s))
    }

    fn decide(&mut self, bytes_per_s: f64) -> bool {
        let is_faster = |best: BestRate| bytes_per_s >= best.bytes_per_s * SPEEDUP_MIN;
        if bytes_per_s == 0.0 || !self.best.is_none_or(is_faster) {
            return self.choose_best();
        }
        self.best = Some(BestRate { lanes: self.wanted, bytes_per_s });
        self.settled = self.wanted == self.max;
        self.wanted = (self.wanted * 2).min(self.max);
        (self.waited, self.measurement) = (Duration::ZERO, Measurement::new());
        true
    }

    /// Ends the search with the best number so far.
    fn choose_best(&mut self) -> bool {
        self.wanted = self.best.map_or(1, |best| best.lanes);
        self.settled = true;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Runs a plan over transfers of length `transfer` with `pause` between them. The network carries `rate(lanes)`
    /// bytes per second; of the wanted lanes, at most `joinable` join.
    fn run(
        max: u32,
        joinable: u32,
        transfer: Duration,
        pause: Duration,
        rate: impl Fn(u32) -> u64,
    ) -> (Plan, Vec<u32>) {
        let (mut plan, mut tried) = (Plan::new(max), vec![]);
        let (mut now, mut verified_bytes) = (Instant::now(), 0);
        let step = Duration::from_millis(100);
        for tick in 0..6_000u32 {
            let at = step * tick;
            let (transfer_index, offset) = (
                at.as_millis() / (transfer + pause).as_millis(),
                at.as_millis() % (transfer + pause).as_millis(),
            );
            let period = (offset < transfer.as_millis()).then_some(transfer_index as u64);
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

    const TRANSFER_DURATION: Duration = Duration::from_secs(5);
    const PAUSE_DURATION: Duration = Duration::from_secs(1);

    #[test]
    fn lanes_double_while_transfers_get_faster() {
        let (plan, tried) =
            run(16, 16, TRANSFER_DURATION, PAUSE_DURATION, |lanes| 1_000_000 * u64::from(lanes.min(6)));
        assert_eq!((tried, plan.is_settled()), (vec![1, 2, 4, 8, 16, 8], true));
        let (plan, tried) =
            run(16, 16, TRANSFER_DURATION, PAUSE_DURATION, |lanes| 1_000_000 * u64::from(lanes.min(4)));
        assert_eq!((tried, plan.is_settled()), (vec![1, 2, 4, 8, 4], true));
        let (_, tried) = run(6, 16, TRANSFER_DURATION, PAUSE_DURATION, |lanes| 1_000_000 * u64::from(lanes));
        assert_eq!(tried, [1, 2, 4, 6]);
    }

    #[test]
    fn a_plan_for_one_lane_is_settled_at_once() {
        let plan = Plan::new(1);
        assert_eq!((plan.lanes(), plan.is_settled()), (1, true));
    }

    #[test]
    fn lanes_that_do_not_join_end_the_search() {
        let (plan, tried) =
            run(8, 2, TRANSFER_DURATION, PAUSE_DURATION, |lanes| 1_000_000 * u64::from(lanes));
        assert_eq!((tried, plan.is_settled()), (vec![1, 2, 4, 2], true));
    }

    proptest! {
        /// For any rates: the plan stays within its maximum, ends after doubling and one step back, and chooses a
        /// number that is clearly faster than each smaller number that it tried.
        #[test]
        fn the_best_number_is_chosen(max in 2u32..=16, rates in prop::collection::vec(1_000u64..1_000_000, 17)) {
            let (plan, tried) = run(max, max, TRANSFER_DURATION, PAUSE_DURATION, |lanes| rates[lanes as usize]);
            prop_assert!(plan.is_settled() && tried.iter().all(|lanes| (1..=max).contains(lanes)));
            prop_assert!(tried.len() <= 6, "{tried:?}");
            let settled = rates[plan.lanes() as usize] as f64;
            for lanes in tried.iter().filter(|lanes| **lanes < plan.lanes()) {
                prop_assert!(settled >= rates[*lanes as usize] as f64 * 1.09, "{tried:?}");
            }
        }

        /// Transfers that end before a second sample never get a second lane, however much faster they would be.
        #[test]
        fn small_transfers_use_one_lane(max in 2u32..=16, milliseconds in 1u64..100, pause in 100u64..1_000) {
            let (transfer, pause) = (Duration::from_millis(milliseconds), Duration::from_millis(pause));
            let (_, tried) = run(max, max, transfer, pause, |lanes| 1_000_000 * u64::from(lanes));
            prop_assert_eq!(tried, [1]);
        }
    }
}
